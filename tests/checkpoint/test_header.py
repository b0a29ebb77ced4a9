"""The strict header reader agrees with the safetensors library on good files, and on bad ones
never fails otherwise than with `InputError`."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from safetensors.torch import save

from blr.compressor.base.errors import InputError
from blr.compressor.base.quoting import quote
from blr.compressor.checkpoint.header import BITS, TORCH_NAMES, Header, check_name, read_header
from blr.compressor.checkpoint.regular import parse_json

FAST = settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
# F8_E8M0 and the FNUZ types cannot be made from 0 and 1 on every version of torch
DTYPES = sorted(set(TORCH_NAMES) - {"F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\\."), min_size=1, max_size=20)
SAFE_NAMES = NAMES.filter(lambda name: name.isprintable() and name != "__metadata__")
TENSORS = st.dictionaries(
    SAFE_NAMES,
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=4)),
    max_size=6,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)


def stored(tensors: dict[str, tuple[str, list[int]]]) -> bytes:
    """The library's own file for `tensors`, name -> dtype and shape, filled with a byte pattern."""
    made = {}
    for name, (dtype, shape) in tensors.items():
        values = torch.arange(math.prod(shape)).remainder(2).reshape(shape)
        made[name] = values.to(getattr(torch, TORCH_NAMES[dtype]))
    return save(made, {"format": "pt"})


def read(folder: Path, content: bytes) -> Header | None:
    """The header of a file with `content`, None if refused in the way users may see."""
    path = folder / "a.safetensors"
    path.write_bytes(content)
    try:
        return read_header(path)
    except InputError as error:
        assert str(error).isprintable() and len(str(error)) < 500
        return None


@FAST
@given(TENSORS)
def test_agrees_with_library(tmp_path: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    content = stored(tensors)
    header = read(tmp_path, content)
    assert header is not None and header.metadata == {"format": "pt"}
    theirs = dict(deserialize(content))
    assert header.entries.keys() == theirs.keys()
    for name, entry in header.entries.items():
        assert entry.dtype == theirs[name]["dtype"]
        assert list(entry.shape) == theirs[name]["shape"]
        assert content[entry.start : entry.end] == bytes(theirs[name]["data"])
        assert entry.nbytes * 8 == entry.parameters * BITS[entry.dtype]


@pytest.mark.parametrize("dtype", BITS)
def test_every_dtype(tmp_path: Path, dtype: str) -> None:
    entry = {"dtype": dtype, "shape": [2, 4], "data_offsets": [0, BITS[dtype]]}
    raw = json.dumps({"a": entry}).encode() + b"   "  # padding is allowed
    header = read(tmp_path, struct.pack("<Q", len(raw)) + raw + bytes(BITS[dtype]))
    assert header is not None
    found = header.entries["a"]
    assert (found.shape, found.parameters, found.nbytes) == ((2, 4), 8, BITS[dtype])
    assert (found.start, found.end) == (8 + len(raw), 8 + len(raw) + BITS[dtype])
    assert found.is_float == (dtype in {"F64", "F32", "F16", "BF16"})


def test_entries_come_in_byte_order(tmp_path: Path) -> None:
    raw = json.dumps(
        {
            "late": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]},
            "empty": {"dtype": "U8", "shape": [0, 9], "data_offsets": [1, 1]},
            "early": {"dtype": "U8", "shape": [], "data_offsets": [0, 1]},
        }
    ).encode()
    header = read(tmp_path, struct.pack("<Q", len(raw)) + raw + bytes(3))
    assert header is not None and list(header.entries) == ["early", "empty", "late"]


@FAST
@given(st.binary(max_size=200), st.booleans())
def test_random_bytes(tmp_path: Path, content: bytes, framed: bool) -> None:
    read(tmp_path, struct.pack("<Q", len(content)) + content if framed else content)


@FAST
@given(JSON)
def test_random_json(tmp_path: Path, value: Any) -> None:
    raw = json.dumps({"a": value}).encode()
    assert read(tmp_path, struct.pack("<Q", len(raw)) + raw) is None


@FAST
@given(TENSORS.filter(bool), st.data())
def test_mutated_field(
    tmp_path: Path, tensors: dict[str, tuple[str, list[int]]], data: st.DataObject
) -> None:
    """One field of a good header exchanged; what is accepted, the library accepts as well."""
    content = stored(tensors)
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    name = data.draw(st.sampled_from(sorted(tensors)))
    field = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "more"]))
    header[name][field] = data.draw(JSON | st.lists(st.integers(-2, 2**64), max_size=3))
    raw = json.dumps(header).encode()
    mutated = struct.pack("<Q", len(raw)) + raw + content[8 + length :]
    if read(tmp_path, mutated) is not None:
        deserialize(mutated)


@FAST
@given(TENSORS, st.data())
def test_mutated_bytes(
    tmp_path: Path, tensors: dict[str, tuple[str, list[int]]], data: st.DataObject
) -> None:
    """A byte changed, or the file cut or extended; never more lenient than the library."""
    content = bytearray(stored(tensors))
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(at, len(content)))
    mutated = bytes(content[:cut]) + data.draw(st.binary(max_size=3))
    if read(tmp_path, mutated) is not None:
        try:
            deserialize(mutated)
        except SafetensorError as error:
            pytest.fail(f"accepted what the library refuses: {error}")


@FAST
@given(st.text(st.characters(), max_size=40) | st.text("a./\\\0\n", max_size=8))
def test_names(name: str) -> None:
    path = Path("a.safetensors")
    bad = not name or not name.isprintable() or any(part in name for part in ("/", "\\", ".."))
    if bad:
        with pytest.raises(InputError, match="unsafe tensor name"):
            check_name(name, path)
    else:
        check_name(name, path)
        name.encode()  # no lone surrogates


@FAST
@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_parse_json(data: bytes) -> None:
    try:
        assert type(parse_json(data, Path("config.json"))) is dict
    except InputError as error:
        assert str(error).isprintable()


@FAST
@given(st.text(max_size=300))
def test_quote_is_short_and_printable(text: str) -> None:
    quoted = quote(text)
    assert quoted.isascii() and quoted.isprintable() and len(quoted) <= 85
