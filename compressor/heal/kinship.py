"""Whether a teacher is the model that a student came from, told by a tensor that both have as it is.

Compression leaves embeddings alone: they are equal, or nearly so after training on. Of two models
that have nothing to do with each other, they are as good as orthogonal, their distance 1 or more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blr.compressor.checkpoint.header import TensorEntry
from blr.compressor.checkpoint.source import TORCH_NAMES, Source
from blr.compressor.export.origin import Checkpoint

NUMBERS = 1 << 20  # of a tensor that are read
FAR = 0.5


def strangeness(student: Checkpoint, teacher: Checkpoint) -> str | None:
    """A line on a teacher whose numbers are far from the student's; None where they are near, or no
    tensor has the same name and shape in both. Reads a part of one tensor of each.

    Raises InputError where it cannot be read.
    """
    name = _shared(student, teacher)
    if name is None:
        return None
    ours, theirs = (_start(each.source, each.source.entries[name]) for each in (student, teacher))
    far = _distance(ours, theirs)
    if not far > FAR:
        return None
    return (
        f"{teacher.source.folder}: {name} is not the compressed model's nor near it (they differ by "
        f"{far:.2f} of their size); expected the dense model it came from; check --teacher"
    )


def _shared(student: Checkpoint, teacher: Checkpoint) -> str | None:
    """The largest matrix of floats of one shape in both that no structured layer holds."""
    found = []
    for name, entry in student.source.entries.items():
        other = teacher.source.entries.get(name)
        if other is None or entry.shape != other.shape or name.rpartition(".")[0] in student.specs:
            continue
        if len(entry.shape) == 2 and entry.parameters and entry.is_float and other.is_float:
            found.append(entry)
    return max(found, key=lambda entry: entry.parameters).name if found else None


def _start(source: Source, entry: TensorEntry) -> Tensor:
    """The first `NUMBERS` of a tensor, float64 [n]."""
    dtype = getattr(torch, TORCH_NAMES[entry.dtype])
    piece = next(source.read_bytes(entry, NUMBERS * dtype.itemsize))
    return torch.frombuffer(piece, dtype=dtype).double()


def _distance(a: Tensor, b: Tensor) -> float:
    """‖a − b‖ over the larger of both norms, 0 where both are."""
    size = max(float(a.norm()), float(b.norm()))
    return float((a - b).norm()) / size if size else 0.0
