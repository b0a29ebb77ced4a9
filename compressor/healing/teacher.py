"""Finds the teacher that a compressed checkpoint's manifest names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from blr.compressor.base.errors import OutputError, UsageError
from blr.compressor.base.quoting import quote
from blr.compressor.loading.resolve import REPOSITORY, Found, resolve_model
from blr.compressor.workspace.manifest import read_manifest


def named_teacher(student: Path, offline: bool = False) -> Found:
    """The dense model that the output in `student` was made of: a folder of the recorded name here or
    beside the output, else the repository on the hub at the recorded commit.

    Raises:
        UsageError: the manifest names none that is there. HubError: as `resolve_model`.
    """
    name, revision = _recorded(student)
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
    """SHA-256 over the dense model (`scan_source`), as the manifest in `student` has it; None for one
    that has no manifest, or was healed by an earlier version."""
    manifest = _manifest(student)
    teacher = manifest.get("teacher")
    told = teacher.get("sha256") if isinstance(teacher, dict) else None
    return told or manifest.get("input_sha256")


def _recorded(student: Path) -> tuple[str, str | None]:
    """Name and commit of the source. Raises UsageError where there is none."""
    source = _manifest(student).get("source")
    found = source if isinstance(source, dict) else {}
    name, revision = found.get("name"), found.get("revision")
    if not (isinstance(name, str) and name and isinstance(revision, str | None)):
        raise UsageError(
            f"{student}: no manifest that names the model it was made of; give the dense model by "
            "--teacher"
        )
    return name, revision


def _manifest(student: Path) -> dict[str, Any]:
    """Of the output in `student`, empty where none can be read."""
    try:
        return read_manifest(student)
    except OutputError:
        return {}
