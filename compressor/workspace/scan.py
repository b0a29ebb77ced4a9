"""Reads a whole checkpoint once before the work starts: is it finite, and which bytes are they. Factors'
Euclidean norms bound every weight of a layer, so that only one beyond that is multiplied out."""

import hashlib
import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import isfinite, prod
from pathlib import Path
from threading import Event, Lock

import torch
from torch import Tensor

from blr.compressor.base.disk import sha256_file
from blr.compressor.base.errors import NumericsError
from blr.compressor.base.progress import READING, Progress
from blr.compressor.checkpoint.header import TORCH_NAMES, TensorEntry
from blr.compressor.checkpoint.remote import remote_shard
from blr.compressor.checkpoint.source import Source
from blr.compressor.structures.packing import restored
from blr.compressor.structures.specs import Spec
from blr.compressor.workspace.journal import canonical_json
from blr.compressor.workspace.manifest import ShardDigests

CHECKED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
REMEDY = "repair the checkpoint, or choose a --dtype with their range"
THREADS = 8  # shards read at once
Place = tuple[Path, int, int]  # of the bytes of a tensor, which may have several names


@dataclass(frozen=True)
class Scan:
    """`digest`: SHA-256 over every tensor and file that an output takes from a source. `norms`: a bound
    of the Euclidean norm of each tensor that was checked, by name."""

    digest: str
    norms: dict[str, float]


def scan_source(
    source: Source, remedy: str, progress: Progress, finite: Collection[str] | None = None
) -> Scan:
    """Read all of `source`, and compare it with its manifest if it has one. Raises NumericsError with
    `remedy` for NaN or Inf in one of the tensors `finite` (None: all floats), InputError for a shard
    that differs from its manifest."""
    if finite is None:
        finite = {entry.name for entry in source.entries.values() if entry.is_float}
    shards = ShardDigests(source)
    places = {_place(source.entries[name]) for name in finite}
    with progress.layers(len(source.stored), READING) as advance:
        found = _read_shards(source, places, remedy, shards, advance)
    shards.check()
    digests = {name: found[_place(entry)][0] for name, entry in source.entries.items()}
    norms = {name: found[_place(source.entries[name])][1] for name in source.entries if name in finite}
    files = {name: sha256_file(path) for name, path in source.extras.carried.items()}
    return Scan(hashlib.sha256(canonical_json([digests, files])).hexdigest(), norms)


def _place(entry: TensorEntry) -> Place:
    return entry.file, entry.start, entry.end


def _read_shards(
    source: Source, finite: set[Place], remedy: str, shards: ShardDigests, advance: Callable[[str], None]
) -> dict[Place, tuple[str, float]]:
    """`_read` of every stored tensor by place, each shard's in order, some shards at once."""
    parts: dict[Path, list[TensorEntry]] = {}
    for entry in source.stored:
        parts.setdefault(entry.file, []).append(entry)
    over, turn = Event(), Lock()

    def read(entries: list[TensorEntry]) -> dict[Place, tuple[str, float]]:
        found = {}
        for entry in entries:
            if over.is_set():
                break
            with turn:
                advance(entry.name)
            place = _place(entry)
            found[place] = _read(source, entry, shards, remedy if place in finite else None)
        return found

    at_once = 1 if any(map(remote_shard, parts)) else min(THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(at_once) as pool:
        try:
            return {p: value for part in pool.map(read, parts.values()) for p, value in part.items()}
        finally:
            over.set()  # an error, or a signal, need not wait for the rest


def _read(
    source: Source, entry: TensorEntry, shards: ShardDigests, remedy: str | None
) -> tuple[str, float]:
    """SHA-256 of a stored tensor and, with a `remedy`, the norm of its values, which must be finite."""
    digest, bad, square = hashlib.sha256(), 0, 0.0
    for piece in source.read_bytes(entry):
        digest.update(piece)
        shards.update(entry, piece)
        if remedy is not None:
            values = torch.frombuffer(piece, dtype=getattr(torch, TORCH_NAMES[entry.dtype]))
            bad += count_bad(values)
            square += norm(values) ** 2
    if bad:
        found = f"holds {bad} NaN or Inf values of {entry.parameters}, expected finite weights"
        raise NumericsError(f"{entry.file}: tensor {entry.name!r} {found}; {remedy}")
    return digest.hexdigest(), square**0.5


def count_bad(tensor: Tensor) -> int:
    """How many values of `tensor` are NaN or Inf; extremes first, which are found much faster."""
    if tensor.dtype not in CHECKED or not tensor.numel():
        return 0
    least, most = torch.aminmax(tensor.detach())  # NaN if there is one
    return 0 if isfinite(least) and isfinite(most) else int((~torch.isfinite(tensor)).sum())


def norm(tensor: Tensor) -> float:
    """A bound, within a few percent, of the Euclidean norm of `tensor`; perhaps inf beyond 1e18."""
    return 1.05 * float(torch.linalg.vector_norm(tensor.detach()))


def check_finite(tensor: Tensor, name: str, how: str = "") -> None:
    """Raise NumericsError when `tensor` holds NaN or Inf; `name` and `how` begin the message."""
    if bad := count_bad(tensor):
        found = f"holds {bad} NaN or Inf values of {tensor.numel()} {how}; expected finite ones"
        raise NumericsError(f"{name} {found}: {REMEDY}")


def check_product(
    name: str,
    spec: Spec,
    norms: list[float],
    tensors: Callable[[], Mapping[str, Tensor]],
    dtype: torch.dtype,
) -> None:
    """Raise NumericsError when the weight of a structured layer exceeds the range of `dtype`. The
    product of the `norms` of its factors bounds it; `tensors` is called only beyond that bound."""
    limit = torch.finfo(dtype).max
    if prod(norms) <= limit:
        return
    weight = restored(spec, tensors(), torch.float64)
    if not bool((weight.abs() <= limit).all()):  # NaN is not
        found = f"its factors {', '.join(spec.shapes())} multiply to values out of range of {dtype}"
        raise NumericsError(f"{name}: {found}, expected finite weights; {REMEDY}")
