"""Reads a whole checkpoint once before the work starts: is it finite, and which bytes are they."""

import hashlib
import os
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock

import torch

from blr.compressor.base.disk import sha256_file
from blr.compressor.base.errors import NumericsError
from blr.compressor.base.progress import READING, Progress
from blr.compressor.checkpoint.header import TORCH_NAMES, TensorEntry
from blr.compressor.checkpoint.numerics import count_bad, norm
from blr.compressor.checkpoint.remote import remote_shard
from blr.compressor.checkpoint.source import Source
from blr.compressor.workspace.journal import canonical_json
from blr.compressor.workspace.manifest import ShardDigests

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
    """Read all of `source`, and compare it with its manifest if it has one.

    Raises NumericsError with `remedy` for NaN or Inf in one of the tensors `finite` (None: all floats),
    InputError for a shard that differs from its manifest.
    """
    if finite is None:
        finite = {entry.name for entry in source.entries.values() if entry.is_float}
    shards = ShardDigests(source)
    places = {_place(source.entries[name]) for name in finite}
    with progress.layers(len(source.stored), READING) as advance:
        found = _read_shards(source, places, remedy, shards, advance)
    shards.check()
    digests = {name: found[_place(entry)][0] for name, entry in source.entries.items()}
    norms = {name: found[_place(source.entries[name])][1] for name in source.entries if name in finite}
    files = {name: sha256_file(path) for name, path in source.extra_files().items()}
    return Scan(hashlib.sha256(canonical_json([digests, files])).hexdigest(), norms)


def _place(entry: TensorEntry) -> Place:
    return entry.file, entry.start, entry.end


def _read_shards(
    source: Source,
    finite: set[Place],
    remedy: str,
    shards: ShardDigests,
    advance: Callable[[str], None],
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
            return {
                place: value for part in pool.map(read, parts.values()) for place, value in part.items()
            }
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
        raise NumericsError(
            f"{entry.file}: tensor {entry.name!r} holds {bad} NaN or Inf values of "
            f"{entry.parameters}, expected finite weights; {remedy}"
        )
    return digest.hexdigest(), square**0.5
