"""Finds the dense model that a checkpoint was made of, and checks whether a student came from a
teacher.

Compression leaves embeddings alone, so they are equal, or nearly so after further training. Those of
two unrelated models are almost orthogonal, and their distance is 1 or more. The first loss tells less:
a compression without a text can lose as much as an unrelated teacher would show.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blr.compressor.base.errors import InputError, OutputError, UsageError
from blr.compressor.base.quoting import quote
from blr.compressor.checkpoint.context import of_text
from blr.compressor.checkpoint.header import TORCH_NAMES, TensorEntry
from blr.compressor.checkpoint.source import Source
from blr.compressor.exporting.origin import Checkpoint
from blr.compressor.loading.resolve import REPOSITORY, Found, resolve_model
from blr.compressor.workspace.manifest import read_manifest

if TYPE_CHECKING:
    from torch import Tensor

NUMBERS = 1 << 20  # numbers of a tensor that are compared
FAR = 0.5  # relative distance of tensors that are taken to be of unrelated models
LOST = 0.5  # share of the nats of a random guess that is taken to be of an unrelated teacher
EXPECTED = "expected the dense model that the compressed one came from; check --teacher"


def named_teacher(student: Path, offline: bool = False) -> Found:
    """The dense model that the output in `student` was made of: a folder with the recorded name here or
    beside the output, else the repository on the hub at the recorded commit. Raises UsageError or
    HubError."""
    source = _manifest(student).get("source")
    told = source if isinstance(source, dict) else {}
    name, revision = told.get("name"), told.get("revision")
    if not (isinstance(name, str) and name and isinstance(revision, str | None)):
        raise UsageError(
            f"{student}: no manifest that names the model it was made of; give the dense model by "
            "--teacher"
        )
    places = (Path(name), student.resolve().parent / name) if Path(name).name == name else ()
    for place in places:
        if (place / "config.json").is_file():
            return resolve_model(f"{place.resolve()}")
    if revision is not None and REPOSITORY.fullmatch(name) and not os.path.lexists(name):
        return resolve_model(name, revision=revision, offline=offline)
    raise UsageError(
        f"{student}: made of {quote(name, 160)[1:-1]}, which is no folder here or beside it; "
        "give the dense model by --teacher"
    )


def recorded_digest(student: Path) -> str | None:
    """SHA-256 of the dense model (`scan_source`) as the manifest has it; None if it has none."""
    manifest = _manifest(student)
    teacher = manifest.get("teacher")
    told = teacher.get("sha256") if isinstance(teacher, dict) else None
    return told or manifest.get("input_sha256")


def _manifest(student: Path) -> dict[str, Any]:
    try:
        return read_manifest(student)
    except OutputError:
        return {}


def check_teacher(student: Checkpoint, teacher: Checkpoint, force: bool) -> list[str]:
    """Check that the student was made of `teacher`; returns the doubts that `force` lets the run go on
    with. Raises InputError if the student is dense, the teacher is not, they differ in vocabulary, or,
    without `force`, for any doubt."""
    if not student.compressed:
        raise InputError(
            f"{student.source.folder}: a dense checkpoint, there is nothing to heal; "
            "give an output of blr compress"
        )
    if teacher.compressed:
        raise InputError(
            f"{teacher.source.folder}: compressed by blr; expected the dense checkpoint as the teacher"
        )
    sizes = [of_text(each.source.config).get("vocab_size") for each in (student, teacher)]
    if sizes[0] != sizes[1]:
        tokens = f"a vocabulary of {quote(sizes[1])} tokens, not {quote(sizes[0])} as the compressed"
        raise InputError(f"{teacher.source.folder}: {tokens} model; {EXPECTED}")
    found = [line for line in (_other_ids(student, teacher), strangeness(student, teacher)) if line]
    if found and not force:
        raise InputError(f"{teacher.source.folder}: {found[0]}; {EXPECTED}, or pass --force")
    return [f"{teacher.source.folder}: {line}" for line in found]


def _other_ids(student: Checkpoint, teacher: Checkpoint) -> str | None:
    from blr.compressor.loading.sidecar_files import token_ids

    ids = [token_ids(checkpoint.source.folder) for checkpoint in (student, teacher)]
    if ids[0] is None or ids[1] is None or ids[0][1] == ids[1][1]:
        return None
    return "a tokenizer that gives other ids than the compressed model's"


def strangeness(student: Checkpoint, teacher: Checkpoint) -> str | None:
    """A complaint if the teacher's numbers are not near the student's; else None. The student's largest
    unchanged matrix is compared with the teacher's of that name, or else with the nearest of its
    shape."""
    ours, theirs = _matrices(student.source), _matrices(teacher.source)
    plain = [entry for name, entry in ours.items() if name.rpartition(".")[0] not in student.specs]
    if not plain:
        return None
    shapes = {entry.shape for entry in theirs.values()}
    own = max(plain, key=lambda entry: (entry.shape in shapes, entry.parameters))
    like = _like(own, theirs)
    if not like:
        return f"no matrix of the sizes {list(own.shape)} of the compressed model's {own.name}"
    far = min(_distance(student.source, own, teacher.source, other) for other in like)
    if not far > FAR:
        return None
    return (
        f"{own.name} is not the compressed model's nor near it (they differ by {far:.2f} of their size)"
    )


def first_loss(held: Mapping[str, Mapping[str, Any]], config: Mapping[str, Any]) -> list[str]:
    """A hint if the divergence before training is as large as an unrelated teacher's would be."""
    guess = log(of_text(config).get("vocab_size") or 1)
    far = max((merits.get("kl", 0.0) for merits in held.values()), default=0.0)
    if not far > LOST * guess:
        return []
    return [
        f"before training the answers are {far:.1f} nats a token from the teacher's: either the "
        "compression lost nearly all (compress with --text TEXT), or it came from another model "
        "(check --teacher)"
    ]


def _matrices(source: Source) -> dict[str, TensorEntry]:
    found = source.entries.items()
    return {n: e for n, e in found if len(e.shape) == 2 and e.parameters and e.is_float}


def _like(ours: TensorEntry, theirs: Mapping[str, TensorEntry]) -> list[TensorEntry]:
    """The matrix of the same name and shape, else all of that shape: a head may be tied, a name
    prefixed."""
    named = theirs.get(ours.name)
    if named is not None and named.shape == ours.shape:
        return [named]
    return [entry for entry in theirs.values() if entry.shape == ours.shape]


def _distance(student: Source, ours: TensorEntry, teacher: Source, other: TensorEntry) -> float:
    """‖a − b‖ of two stored tensors relative to the larger norm; 0 if both are 0."""
    a, b = _start(student, ours), _start(teacher, other)
    size = max(float(a.norm()), float(b.norm()))
    return float((a - b).norm()) / size if size else 0.0


def _start(source: Source, entry: TensorEntry) -> Tensor:
    """The first `NUMBERS` numbers of a tensor, float64 [n]."""
    import torch  # not at start-up: a named teacher is looked for before

    dtype = getattr(torch, TORCH_NAMES[entry.dtype])
    piece = next(source.read_bytes(entry, NUMBERS * dtype.itemsize))
    return torch.frombuffer(piece, dtype=dtype).double()
