"""Reads safetensors headers strictly, in front of the library's own parser and without torch.

The library is a good parser, but it lets the last of two equal keys win, spends seconds and a
gigabyte on a huge header and hangs on a FIFO. Everything here fails with `InputError` before a
byte of tensor data is read. Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import io
import json
import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from blr.compressor.errors import InputError

# Bits per element. Types nobody here computes with are known so that they can be copied untouched.
BITS: dict[str, int] = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32},
    **{"U64": 64, "I64": 64, "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64},
    **{"F8_E4M3": 8, "F8_E5M2": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 8},
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
}
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})

MAX_HEADER_BYTES = 25_000_000
MAX_NAME_CHARACTERS = 1024
MAX_DIMENSIONS = 64  # torch's own limit
MAX_ELEMENTS = 2**63
# The shortest possible entry, '"a":{"dtype":"F4","shape":[],"data_offsets":[0,0]},', has 50 bytes
# and three brackets; long runs of brackets in big headers only serve to exhaust the JSON parser.
BYTES_PER_BRACKET = 10
DAMAGED = "download the file again or save it anew with safetensors"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One stored tensor: its bytes are `file`[`start`:`end`], offsets absolute in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Stored size in bytes."""
        return self.end - self.start

    @property
    def parameters(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_float(self) -> bool:
        """Whether the type is one `blr` computes with; others are copied untouched or refused."""
        return self.dtype in FLOATS


@dataclass(frozen=True, slots=True)
class Header:
    """What a safetensors file declares: `entries` in the order of their bytes, and `metadata`."""

    entries: dict[str, TensorEntry]
    metadata: dict[str, str]


def quote(text: object, limit: int = 80) -> str:
    """`text` as one short printable line: escaped, and cut in the middle beyond `limit`."""
    plain = str(text)
    escaped = plain if plain.isprintable() and plain.isascii() else ascii(plain)[1:-1]
    if len(escaped) > limit:
        escaped = f"{escaped[: limit // 2]}...{escaped[-limit // 2 :]}"
    return f"'{escaped}'"


def refuse(path: Path, found: str, expected: str, remedy: str = DAMAGED) -> NoReturn:
    """Raises `InputError`: `path`, what was found there, what was expected, what to do."""
    raise InputError(f"{quote(path, 160)[1:-1]}: found {found}; expected {expected}; {remedy}")


def open_regular(path: Path) -> io.FileIO:
    """Opens a regular file for unbuffered reading; never waits on a FIFO nor touches a device.

    Raises:
        InputError: it does not exist, cannot be read, or is not a regular file.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            refuse(path, "a folder, FIFO or device", "a regular file", "replace it by the file")
        # O_NONBLOCK: the path may have become a FIFO since it was looked at
        file = io.FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        refuse(path, f"no readable file ({reason})", "a regular file", "check name and permissions")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        refuse(path, "a FIFO or device", "a regular file", "replace it by the file")
    return file


def read_exactly(file: io.FileIO, path: Path, start: int, count: int) -> bytearray:
    """`count` bytes at offset `start`; `path` names the file in errors.

    Raises:
        InputError: the file ends early or cannot be read.
    """
    buffer = bytearray(count)
    view, done = memoryview(buffer), 0
    try:
        file.seek(start)
        while done < count:
            got = file.readinto(view[done:])
            if not got:
                refuse(path, f"the end of the file at byte {start + done}", f"{count} bytes more")
            done += got
    except OSError as error:
        refuse(path, f"a read error ({error.strerror})", "a readable file", "check the disk")
    return buffer


def parse_json(data: bytes | bytearray, path: Path, *, constants: bool = False) -> dict[str, Any]:
    """The JSON object in `data`; `path` names the file in errors.

    `constants` lets NaN and Infinity pass, which Python writes into some model configs.

    Raises:
        InputError: invalid UTF-8 or JSON, a key twice in one object, nesting beyond the parser's
            depth, or anything but an object.
    """
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique_pairs,
            parse_constant=float if constants else _no_constant,
        )
    except RecursionError:
        refuse(path, "deeply nested JSON", "a few levels at most")
    except ValueError as error:  # JSON, UTF-8, duplicate keys, integers of thousands of digits
        refuse(path, f"invalid JSON ({_reason(error)})", "one JSON object with unique keys")
    if type(value) is not dict:
        refuse(path, f"JSON of type {type(value).__name__}", "an object")
    return value


def check_name(name: str, path: Path) -> None:
    """Refuses tensor names that are unsafe as file names, in a log or on a terminal.

    Raises:
        InputError: empty, over 1024 characters, '..', slash, backslash, or a character that does
            not print (NUL, line ends, direction marks, lone surrogates).
    """
    problem = ""
    if not name:
        problem = "is empty"
    elif len(name) > MAX_NAME_CHARACTERS:
        problem = f"has {len(name)} characters (at most {MAX_NAME_CHARACTERS})"
    elif not name.isprintable():
        problem = "has a character that does not print"
    elif "/" in name or "\\" in name or ".." in name:
        problem = "contains '/', '\\' or '..'"
    if problem:
        remedy = "rename the tensor and save the file anew"
        refuse(path, f"unsafe tensor name {quote(name)}, which {problem}", "a plain name", remedy)


def read_header(path: Path) -> Header:
    """Reads and checks the header of the safetensors file `path`; tensor data stay unread.

    Raises:
        InputError: not a regular file, truncated, malformed in any way, or regions of tensors
            that do not tile the data exactly (overlap, hole, trailing bytes, beyond the end).
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        raw = _header_bytes(file, path, size)
    fields = parse_json(raw, path)
    metadata = _check_metadata(fields.pop("__metadata__", {}), path)
    base = 8 + len(raw)
    entries = [_entry(name, value, path, base, size) for name, value in fields.items()]
    entries.sort(key=lambda entry: (entry.start, entry.end, entry.name))
    _check_tiling(entries, path, base, size)
    return Header({entry.name: entry for entry in entries}, metadata)


def _header_bytes(file: io.FileIO, path: Path, size: int) -> bytearray:
    if size < 8:
        refuse(path, f"{size} bytes", "a safetensors file of at least 8 bytes")
    length = int.from_bytes(read_exactly(file, path, 0, 8), "little")
    if length > MAX_HEADER_BYTES:
        refuse(path, f"a header of {length} bytes", f"at most {MAX_HEADER_BYTES}")
    if length > size - 8:
        refuse(path, f"a header of {length} bytes in a file of {size}", "a header inside the file")
    raw = read_exactly(file, path, 8, length)
    if not raw.startswith(b"{"):
        refuse(path, f"a header that starts with {quote(bytes(raw[:8]))}", "a JSON object")
    brackets = raw.count(b"{") + raw.count(b"[")
    if length > 1_000_000 and brackets * BYTES_PER_BRACKET > length:
        refuse(path, f"{brackets} brackets in the header", "three per tensor")
    return raw


def _check_metadata(metadata: Any, path: Path) -> dict[str, str]:
    if type(metadata) is not dict or any(type(value) is not str for value in metadata.values()):
        refuse(path, "header metadata with values that are no strings", "strings only")
    return metadata


def _entry(name: str, raw: Any, path: Path, base: int, size: int) -> TensorEntry:
    """The entry of one tensor, checked by itself; `base` is where data begin, `size` the file's."""
    check_name(name, path)
    if type(raw) is not dict or raw.keys() != {"dtype", "shape", "data_offsets"}:
        found = sorted(raw)[:9] if type(raw) is dict else type(raw).__name__
        expected = "exactly the fields dtype, shape and data_offsets"
        refuse(path, f"tensor {quote(name)} described by {quote(found)}", expected)
    dtype = raw["dtype"]
    if type(dtype) is not str or dtype not in BITS:
        known = ", ".join(BITS)
        refuse(path, f"dtype {quote(dtype, 40)} of tensor {quote(name)}", f"one of {known}")
    shape = _integers(name, raw, "shape", path)
    start, end = _offsets(name, raw, path, size - base)
    _check_size(name, dtype, shape, end - start, path)
    return TensorEntry(name, dtype, shape, path, base + start, base + end)


def _integers(name: str, raw: dict[str, Any], key: str, path: Path) -> tuple[int, ...]:
    value = raw[key]
    if type(value) is not list or len(value) > MAX_DIMENSIONS:
        expected = f"a list of at most {MAX_DIMENSIONS} integers"
        refuse(path, f"{key} of tensor {quote(name)} that is none", expected)
    # `type(...) is int` because True and 1.0 are equal to 1
    if any(type(item) is not int or not 0 <= item < MAX_ELEMENTS for item in value):
        refuse(path, f"{key} {quote(value)} of tensor {quote(name)}", "integers from 0 to 2**63")
    return tuple(value)


def _offsets(name: str, raw: dict[str, Any], path: Path, available: int) -> tuple[int, int]:
    offsets = _integers(name, raw, "data_offsets", path)
    if len(offsets) != 2 or not offsets[0] <= offsets[1] <= available:
        found = f"data_offsets {quote(list(offsets))} of tensor {quote(name)}"
        refuse(path, found, f"begin and end within the {available} bytes of data")
    return offsets[0], offsets[1]


def _check_size(name: str, dtype: str, shape: tuple[int, ...], nbytes: int, path: Path) -> None:
    # Zeros are left out of the product: a huge extent beside a zero still overflows as a stride.
    if math.prod(n for n in shape if n) >= MAX_ELEMENTS:
        found = f"shape {quote(list(shape))} of tensor {quote(name)}"
        refuse(path, found, "fewer than 2**63 elements")
    bits = math.prod(shape) * BITS[dtype]
    if bits != nbytes * 8:
        found = f"{nbytes} bytes for tensor {quote(name)}"
        refuse(path, found, f"{bits / 8:.10g} for {dtype} {quote(list(shape))}")


def _check_tiling(entries: list[TensorEntry], path: Path, base: int, size: int) -> None:
    """Refuses regions that overlap, leave a hole, or stop before the end of the file."""
    at = base
    for entry in entries:
        if entry.start != at:
            what = "overlaps the one before it" if entry.start < at else "leaves a hole before it"
            found = f"tensor {quote(entry.name)}, whose region {what} (byte {entry.start})"
            refuse(path, found, f"tensors one after another (byte {at})")
        at = entry.end
    if at != size:
        refuse(path, f"{size - at} trailing bytes after the last tensor", f"a file of {at} bytes")


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"duplicate key {quote(key)}")
            seen.add(key)
    return fields


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _reason(error: ValueError) -> str:
    return quote(error, 160)[1:-1]
