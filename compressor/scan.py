"""Reads a whole checkpoint once before the work starts: is it finite, and which bytes are they."""

from __future__ import annotations

import hashlib

import torch

from blr.compressor.checkpoint.disk import sha256_file
from blr.compressor.checkpoint.header import TensorEntry
from blr.compressor.checkpoint.journal import canonical_json
from blr.compressor.checkpoint.source import TORCH_NAMES, Source
from blr.compressor.errors import NumericsError
from blr.compressor.plan import Plan
from blr.compressor.progress import Progress


def scan_source(source: Source, plan: Plan, progress: Progress) -> str:
    """SHA-256 over every tensor and file that the output takes from `source`.

    Raises NumericsError when a weight that `plan` replaces holds NaN or Inf.
    """
    replaced = {planned.layer.entry.name for planned in plan.layers}
    found = {}
    with progress.layers(len(source.entries), "reading") as advance:
        for name, entry in source.entries.items():
            advance(name)
            found[name] = _digest(source, entry, finite=name in replaced)
    files = {str(path): sha256_file(source.folder / path) for path in source.extra_files()}
    return hashlib.sha256(canonical_json([found, files])).hexdigest()


def _digest(source: Source, entry: TensorEntry, *, finite: bool) -> str:
    """SHA-256 of a stored tensor; with `finite`, its NaN and Inf values are counted as well."""
    digest, bad = hashlib.sha256(), 0
    for piece in source.read_bytes(entry):
        digest.update(piece)
        if finite:
            values = torch.frombuffer(piece, dtype=getattr(torch, TORCH_NAMES[entry.dtype]))
            bad += int((~torch.isfinite(values)).sum())
    if bad:
        raise NumericsError(
            f"{entry.file}: tensor {entry.name!r} holds {bad} NaN or Inf values of "
            f"{entry.parameters}, expected finite weights; repair the checkpoint or --exclude the layer"
        )
    return digest.hexdigest()
