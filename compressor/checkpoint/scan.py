"""Reads a whole checkpoint once before the work starts: is it finite, and which bytes are they."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass

import torch

from blr.compressor.checkpoint.disk import sha256_file
from blr.compressor.checkpoint.header import TensorEntry
from blr.compressor.checkpoint.journal import canonical_json
from blr.compressor.checkpoint.numerics import count_bad, norm
from blr.compressor.checkpoint.source import TORCH_NAMES, Source
from blr.compressor.checkpoint.trust import ShardDigests, read_listed
from blr.compressor.errors import NumericsError
from blr.compressor.progress import Progress


@dataclass(frozen=True)
class Scan:
    """`digest`: SHA-256 over every tensor and file that an output takes from a source. `norms`: a bound
    of the Euclidean norm of each tensor that was checked, by name."""

    digest: str
    norms: dict[str, float]


def scan_source(source: Source, finite: Collection[str], remedy: str, progress: Progress) -> Scan:
    """Read all of `source`, which is compared with its manifest if it has one.

    Args:
        finite: names of floating-point tensors that must hold no NaN or Inf. remedy: if one does.

    Raises:
        NumericsError: one of them does. InputError: a shard that its manifest does not list so.
    """
    found: dict[str, str] = {}
    norms: dict[str, float] = {}
    shards = ShardDigests(source)
    with progress.layers(len(source.entries), "reading") as advance:
        for name, entry in source.entries.items():
            advance(name)
            found[name], norm = _read(source, entry, shards, remedy if name in finite else None)
            norms |= {name: norm} if name in finite else {}
    shards.check(read_listed(source.folder))
    files = {name: sha256_file(path) for name, path in source.extra_files().items()}
    return Scan(hashlib.sha256(canonical_json([found, files])).hexdigest(), norms)


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
