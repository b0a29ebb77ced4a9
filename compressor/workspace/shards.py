"""Writes safetensors shards as streams: the layout is fixed first, then bytes pass through. The
library's writer would need a whole shard in memory."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from blr.compressor.base.disk import Bytes, write_stream
from blr.compressor.base.errors import UsageError
from blr.compressor.base.quoting import quote
from blr.compressor.checkpoint.config import TRANSFORMERS, Library
from blr.compressor.checkpoint.header import BITS, TensorEntry

DEFAULT_SHARD_BYTES = 5_000_000_000
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True)
class Slot:
    """One tensor of the output: its name and the stored tensor whose bytes it takes."""

    name: str
    origin: TensorEntry


def assign_shards(
    slots: list[Slot], max_bytes: int, library: Library = TRANSFORMERS
) -> dict[str, list[Slot]]:
    """File name to its tensors, filled in order up to `max_bytes` (one larger tensor fills one). Inside
    a shard wider dtypes come first, which keeps every tensor aligned to its elements."""
    groups: list[list[Slot]] = [[]]
    size = 0
    for slot in slots:
        if groups[-1] and size + slot.origin.nbytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(slot)
        size += slot.origin.nbytes
    ordered = [sorted(group, key=lambda s: -BITS[s.origin.dtype]) for group in groups]
    if len(ordered) == 1:
        return {library.single: ordered[0]}
    numbered = (f"{n:05d}-of-{len(ordered):05d}" for n in range(1, len(ordered) + 1))
    names = (f"{library.weights}-{number}.safetensors" for number in numbered)
    return dict(zip(names, ordered, strict=True))


def index_name(shards: Iterable[str]) -> str:
    """What lists the files of those names."""
    return next(iter(shards)).partition("-")[0].removesuffix(".safetensors") + ".safetensors.index.json"


def write_shards(
    folder: Path,
    shards: Mapping[str, list[Slot]],
    read: Callable[[TensorEntry], Iterable[Bytes]],
    headers: Mapping[str, bytes] | None = None,
) -> dict[str, tuple[int, str]]:
    """Write every shard, then the index if there are several. Returns file name to (bytes, SHA-256).
    headers: by file, in the place of that of safetensors."""
    written = {}
    for name, slots in shards.items():
        written[name] = write_stream(folder / name, _shard_bytes(slots, read, (headers or {}).get(name)))
    if len(shards) > 1:
        name = index_name(shards)
        weight_map = {slot.name: name for name, slots in shards.items() for slot in slots}
        total = sum(slot.origin.nbytes for slots in shards.values() for slot in slots)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        written[name] = write_stream(folder / name, [(json.dumps(index, indent=2).encode() + b"\n")])
    return written


def _shard_bytes(
    slots: list[Slot], read: Callable[[TensorEntry], Iterable[Bytes]], header: bytes | None
) -> Iterator[Bytes]:
    yield _header(slots) if header is None else header
    for slot in slots:
        yield from read(slot.origin)


def _header(slots: list[Slot]) -> bytes:
    """Eight bytes of length, then JSON padded with spaces to a multiple of eight."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for slot in slots:
        end = offset + slot.origin.nbytes
        described = {"dtype": slot.origin.dtype, "shape": list(slot.origin.shape)}
        table[slot.name] = {**described, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def parse_size(text: str) -> int:
    """``500MB``, ``5GB``, ``2GiB`` or a number of bytes, as bytes. Raises UsageError otherwise."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in UNITS:
        raise UsageError(f"size {quote(text)}: expected a number with B, KB, MB, GB or GiB, as 5GB")
    size = int(float(match[1]) * UNITS[match[2].upper()])
    if size < 1:
        raise UsageError(f"size {text!r}: expected at least one byte")
    return size
