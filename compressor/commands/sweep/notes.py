"""What the files of a sweep hold, and how an output in it is known to be the sweep's own."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from blr.compressor.base.errors import BlrError, OutputError
from blr.compressor.workspace.journal import canonical_json
from blr.compressor.workspace.manifest import read_manifest
from blr.compressor.workspace.strict_json import Kept, Told, read_kept

ABOUT: Literal["sweep of blr"] = "sweep of blr"
REMEDY = "move it away, or choose another --output"
ANEW = "remove it, and the point is made again"
Figure = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(ge=0)]


class Sweep(Told):
    """``sweep.json``: `common` is what all points have in common, `made` are all points whose files the
    folder may hold, with the digests of what makes them (`point_digest`)."""

    about: Literal["sweep of blr"]
    common: dict[str, Any]
    made: dict[Annotated[str, Field(pattern=r"^\w[\w.+-]*$")], str] = Field(default_factory=dict)


class Record(Kept):
    """``points/NAME.json``: what a point that is done has come to; `digest` is that of `Sweep.made`."""

    perplexities: Annotated[list[Figure], Field(min_length=1)]
    bits: Figure | None = None
    bytes: Annotated[int, Field(gt=0)] | None = None
    seconds: Seconds
    kept: bool
    digest: str


class Spent(Kept):
    """``logs/NAME.spent.json``: seconds that the commands of a point have taken."""

    seconds: Seconds


class Judged(Told):
    """What `blr eval --format json` prints of one text."""

    perplexity: Figure


class Judgement(Told):
    """What it prints of one or several; or why it failed."""

    error: str | None = None
    perplexity: Figure | None = None
    texts: list[Judged] = Field(default_factory=list)

    @property
    def perplexities(self) -> list[float]:
        """One a text."""
        alone = [] if self.perplexity is None else [self.perplexity]
        return [text.perplexity for text in self.texts] or alone


class Totals(Told):
    """Of a report."""

    bits: Figure


class Report(Told):
    """``report.json`` of an output."""

    totals: Totals


def read_sweep(path: Path) -> Sweep | None:
    """``sweep.json`` at `path`, None if there is none. Raises OutputError as `read_kept`."""
    return read_kept(path, Sweep, REMEDY)


def read_judgement(path: Path) -> Judgement:
    """What a command has printed to `path`, empty for what cannot be read."""
    try:
        return read_kept(path, Judgement, "") or Judgement()
    except BlrError:
        return Judgement()


def point_digest(recipe: dict[str, Any], heal: float | None) -> str:
    """SHA-256 of what makes a point of a model: its recipe, but for the GPU that times are predicted
    for, and its minutes of healing."""
    asked = {name: value for name, value in recipe.items() if name != "gpu"}
    return hashlib.sha256(canonical_json([asked, heal or None])).hexdigest()


def is_made(output: Path, digest: str, common: dict[str, Any]) -> bool:
    """Whether `output` is what a sweep with these settings makes of the point with this `digest`: by its
    manifest the same recipe, weights, text, device and version."""
    try:
        manifest = read_manifest(output)
    except OutputError:
        return False
    run = manifest.get("run") or {}
    recipe, heal, by = run.get("recipe"), run.get("heal"), run.get("versions")
    if not isinstance(recipe, dict) or not isinstance(by, dict):
        return False
    found = {
        **{"headers": run.get("source"), "weights": manifest.get("input_sha256")},
        **{"calibration": run.get("calibration"), "device": run.get("device"), "version": by.get("blr")},
    }
    expected = {name: common.get(name) for name in found}
    return point_digest(recipe, heal) == digest and found == expected
