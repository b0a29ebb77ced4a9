"""Reads safetensors headers and indices strictly and without torch. The library lets the last of two
equal keys win, spends a gigabyte on a huge header and hangs on a FIFO. Format:
https://huggingface.co/docs/safetensors"""

import io
import math
import os
from dataclasses import dataclass
from pathlib import Path

from blr.compressor.base.quoting import quote
from blr.compressor.checkpoint.regular import (
    POINTER,
    inside,
    open_regular,
    parse_json,
    read_exactly,
    read_json,
    refuse,
    refuse_pointer,
)
from blr.compressor.checkpoint.remote import remote_shard

# Bits per element. Types nobody here computes with are known so that they can be copied untouched.
BITS: dict[str, int] = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32},
    **{"U64": 64, "I64": 64, "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64},
    **{"F8_E4M3": 8, "F8_E5M2": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 8},
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
}
# safetensors dtype -> name in torch; F4 and F6 have no byte of their own and are only copied
TORCH_NAMES = {
    **{"BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16"},
    **{"U32": "uint32", "I32": "int32", "U64": "uint64", "I64": "int64", "C64": "complex64"},
    **{"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"},
    **{"F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"},
}
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})

MAX_HEADER_BYTES = 25_000_000
MAX_INDEX_BYTES = 25_000_000  # of JSON this takes a second and half a gigabyte to parse
MAX_NAME_CHARACTERS = 1024
MAX_DIMENSIONS = 64  # torch's own limit
MAX_ELEMENTS = 2**63
# The shortest possible entry, '"a":{"dtype":"F4","shape":[],"data_offsets":[0,0]},', has 50 bytes
# and three brackets; long runs of brackets in big headers only serve to exhaust the JSON parser.
BYTES_PER_BRACKET = 10


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
        return self.end - self.start

    @property
    def parameters(self) -> int:
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


def check_name(name: str, path: Path) -> None:
    """Raise InputError for a tensor name that is unsafe as a file name, in a log or on a terminal:
    empty, over 1024 characters, with "..", a slash or a character that does not print."""
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
    """Read and check the header of a safetensors file. Raises InputError unless it is a regular file,
    well-formed, with regions of tensors that tile the data exactly."""
    with open_regular(path) as file:
        size = _size(file, path)
        raw = _header_bytes(file, path, size)
    fields = parse_json(raw, path)
    metadata = fields.pop("__metadata__", {})
    if type(metadata) is not dict or any(type(value) is not str for value in metadata.values()):
        refuse(path, "header metadata with values that are no strings", "strings only")
    base = 8 + len(raw)
    entries = [_entry(name, value, path, base, size) for name, value in fields.items()]
    entries.sort(key=lambda entry: (entry.start, entry.end, entry.name))
    at = base
    for entry in entries:
        if entry.start != at:
            what = "overlaps the one before it" if entry.start < at else "leaves a hole before it"
            found = f"tensor {quote(entry.name)}, whose region {what} (byte {entry.start})"
            refuse(path, found, f"tensors one after another (byte {at})")
        at = entry.end
    if at != size:
        refuse(path, f"{size - at} trailing bytes after the last tensor", f"a file of {at} bytes")
    return Header({entry.name: entry for entry in entries}, metadata)


def header_bytes(path: Path) -> bytes:
    """The bytes of a safetensors file before its tensors. Raises InputError as `read_header`."""
    with open_regular(path) as file:
        raw = _header_bytes(file, path, _size(file, path))
    return len(raw).to_bytes(8, "little") + raw


def _size(file: io.FileIO, path: Path) -> int:
    """The size of the file, or of the file on the hub that it stands in for."""
    shard = remote_shard(path)
    return os.fstat(file.fileno()).st_size if shard is None else shard.size


def _header_bytes(file: io.FileIO, path: Path, size: int) -> bytearray:
    if size < 8:
        refuse(path, f"{size} bytes", "a safetensors file of at least 8 bytes")
    start = read_exactly(file, path, 0, min(size, len(POINTER)))
    refuse_pointer(path, start)
    length = int.from_bytes(start[:8], "little")
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


def _entry(name: str, raw: object, path: Path, base: int, size: int) -> TensorEntry:
    """The entry of one tensor, checked by itself; `base` is where data begin, `size` the file's."""
    check_name(name, path)
    if type(raw) is not dict or raw.keys() != {"dtype", "shape", "data_offsets"}:
        fields = sorted(raw)[:9] if type(raw) is dict else type(raw).__name__
        expected = "exactly the fields dtype, shape and data_offsets"
        refuse(path, f"tensor {quote(name)} described by {quote(fields)}", expected)
    dtype = raw["dtype"]
    if type(dtype) is not str or dtype not in BITS:
        known = ", ".join(BITS)
        refuse(path, f"dtype {quote(dtype, 40)} of tensor {quote(name)}", f"one of {known}")
    shape = _integers(name, raw, "shape", path)
    offsets, available = _integers(name, raw, "data_offsets", path), size - base
    if len(offsets) != 2 or not offsets[0] <= offsets[1] <= available:
        found = f"data_offsets {quote(list(offsets))} of tensor {quote(name)}"
        refuse(path, found, f"begin and end within the {available} bytes of data")
    start, end = offsets
    _check_size(name, dtype, shape, end - start, path)
    return TensorEntry(name, dtype, shape, path, base + start, base + end)


def _integers(name: str, raw: dict[str, object], key: str, path: Path) -> tuple[int, ...]:
    value = raw[key]
    if type(value) is not list or len(value) > MAX_DIMENSIONS:
        expected = f"a list of at most {MAX_DIMENSIONS} integers"
        refuse(path, f"{key} of tensor {quote(name)} that is none", expected)
    # `type(...) is int` because True and 1.0 are equal to 1
    if any(type(item) is not int or not 0 <= item < MAX_ELEMENTS for item in value):
        refuse(path, f"{key} {quote(value)} of tensor {quote(name)}", "integers from 0 to 2**63")
    return tuple(value)


def _check_size(name: str, dtype: str, shape: tuple[int, ...], nbytes: int, path: Path) -> None:
    # Zeros are left out of the product: a huge extent beside a zero still overflows as a stride.
    if math.prod(n for n in shape if n) >= MAX_ELEMENTS:
        found = f"shape {quote(list(shape))} of tensor {quote(name)}"
        refuse(path, found, "fewer than 2**63 elements")
    bits = math.prod(shape) * BITS[dtype]
    if bits != nbytes * 8:
        found = f"{nbytes} bytes for tensor {quote(name)}"
        refuse(path, found, f"{bits / 8:.10g} for {dtype} {quote(list(shape))}")


def find_shards(folder: Path, single: str, index: str) -> tuple[list[Path], dict[str, str]]:
    """The weight files of `folder`, sorted, and file names by tensor if there is an index. Raises
    InputError for a malformed index, unsafe names, missing files."""
    has_single = os.path.lexists(folder / single)
    if not os.path.lexists(folder / index):
        return [inside(folder, single)], {}
    weight_map = read_index(inside(folder, index), Path(single).suffix)
    names = sorted(set(weight_map.values()))
    if has_single and names != [single]:
        remedy = "remove the one that is not meant"
        refuse(folder, f"both {single} and {index}", "one of them", remedy)
    return [inside(folder, name) for name in names], weight_map


def read_index(path: Path, suffix: str) -> dict[str, str]:
    """File names by tensor of the index at `path`. Raises InputError for unsafe or missing ones."""
    index = read_json(path, MAX_INDEX_BYTES)
    weight_map = index.get("weight_map")
    if type(weight_map) is not dict or not weight_map:
        refuse(path, "no weight_map object", '{"weight_map": {tensor: file}}')
    for tensor, file in weight_map.items():
        check_name(tensor, path)
        if type(file) is not str or not _is_plain(file, suffix):
            found = f"file {quote(file)} for tensor {quote(tensor)}"
            refuse(path, found, f"the plain name of a {suffix} file in the same folder")
    return weight_map


def _is_plain(file: str, suffix: str) -> bool:
    """Whether `file` is a file name without folders, '..' or characters that do not print."""
    safe = file.isprintable() and ".." not in file and not set("/\\:") & set(file)
    return safe and file.endswith(suffix) and len(file) <= 255 and not file.startswith(".")
