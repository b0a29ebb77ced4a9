"""Sizes as people write them."""

from __future__ import annotations

import re

from blr.compressor.base.errors import UsageError
from blr.compressor.base.quoting import quote

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_size(text: str) -> int:
    """``500MB``, ``5GB``, ``2GiB`` or a number of bytes, as bytes. Raises UsageError otherwise."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in UNITS:
        raise UsageError(f"size {quote(text)}: expected a number with B, KB, MB, GB or GiB, as 5GB")
    size = int(float(match[1]) * UNITS[match[2].upper()])
    if size < 1:
        raise UsageError(f"size {text!r}: expected at least one byte")
    return size
