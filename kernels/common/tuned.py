"""Reads the measured tables: the user's own of `blr tune`, then those shipped in configs/tuned/.

A checkpoint's copy of the kernels has the shipped tables as a Python file in the place of this
one (`compressor/modeling/vendor.py` writes it), with the same function.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any


@cache
def tuned_rules(gpu: str) -> list[dict[str, Any]]:
    """Rules for a GPU by its key, the user's before the shipped ones; [] if nobody measured it.

    A table of the user that cannot be read is a warning, since it is only about speed.
    """
    from blr.compressor.errors import BlrError
    from blr.compressor.tuned_table import read_table, shipped_table, user_table

    rules = []
    try:
        rules += read_table(user_table(gpu))
    except BlrError as error:
        warnings.warn(f"tuned kernels: {error}", stacklevel=2)
    return rules + read_table(shipped_table(gpu))
