"""The folder of a sweep: what is done lies in it point by point, and another run goes on.

``sweep.json`` marks the folder and names every point whose files it may hold, before one is written.
What has another name, or lies there as a link, is the user's and is neither read, written nor removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from blr.compressor.base.disk import write_stream
from blr.compressor.base.errors import BlrError, OutputError
from blr.compressor.base.exhaustion import storage_errors
from blr.compressor.checkpoint.regular import read_start
from blr.compressor.commands.judged import Figure, Judged
from blr.compressor.workspace import ownership
from blr.compressor.workspace.journal import canonical_json, changes
from blr.compressor.workspace.lock import Lock
from blr.compressor.workspace.manifest import MANIFEST, read_manifest
from blr.compressor.workspace.ownership import output_of
from blr.compressor.workspace.strict_json import Kept, Told, read_kept
from blr.compressor.workspace.workspace import Workspace

ABOUT: Literal["sweep of blr"] = "sweep of blr"
REMEDY = "move it away, or choose another --output"
ANEW = "remove it, and the point is made again"
Seconds = Annotated[float, Field(ge=0)]
Divergence = Annotated[float, Field(ge=0)]
RESULT, PAGE = "sweep.json", "sweep.html"
LOCK = "sweep.lock"
NOTES, OUTPUTS = ("points", "logs"), "outputs"
PAGE_MARK = "swept by blr</title>"
OTHERS = "not made by this sweep"


class SweepNote(Told):
    """``sweep.json``: what all points have in common, and the digests of all points."""

    about: Literal["sweep of blr"]
    common: dict[str, object]
    made: dict[Annotated[str, Field(pattern=r"^\w[\w.+-]*$")], str] = Field(default_factory=dict)


class Record(Kept):
    """``points/NAME.json``: what a finished point has come to; `digest` is that of `SweepNote.made`."""

    perplexities: Annotated[list[Figure], Field(min_length=1)]
    kl: list[Divergence] = Field(default_factory=list)  # of the dense model's record none
    bits: Figure | None = None
    bytes: Annotated[int, Field(gt=0)] | None = None
    seconds: Seconds
    kept: bool
    digest: str


class Spent(Kept):
    """``logs/NAME.spent.json``: seconds that the commands of a point have taken."""

    seconds: Seconds


class Totals(Told):
    """Of a report."""

    bits: Figure


class OutputReport(Told):
    """``report.json`` of an output."""

    totals: Totals


def read_judgement(path: Path) -> Judged:
    """What a command has printed to `path`, empty for what cannot be read."""
    try:
        return read_kept(path, Judged, "") or Judged()
    except BlrError:
        return Judged()


def point_digest(recipe: dict[str, object], heal: float | None) -> str:
    """SHA-256 of a point: its recipe, but for the GPU of predictions, and its minutes of healing."""
    asked = {name: value for name, value in recipe.items() if name != "gpu"}
    return hashlib.sha256(canonical_json([asked, heal or None])).hexdigest()


def is_made(output: Path, digest: str, common: dict[str, object]) -> bool:
    """Whether `output` is, by its manifest, what such a sweep makes of the point with this `digest`."""
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


class Folder:
    """The folder of a sweep: ``sweep.json``, and for each point ``points/NAME.json``, ``logs/NAME.log``
    and perhaps ``outputs/NAME``. `common` settings are of all points, `points` of this run by digest."""

    def __init__(
        self, path: Path, common: dict[str, object], points: Mapping[str, str] | None = None
    ) -> None:
        self.path = Path(os.path.abspath(path))
        self.common = json.loads(json.dumps(common))
        self.points = dict(points or {})
        self.made = dict(self.points)  # with those of earlier runs

    @contextmanager
    def held(self, restart: bool) -> Iterator[None]:
        """Hold the folder meanwhile. Raises OutputError if it is another's, or in use."""
        with storage_errors(self.path):
            self._check_place(restart)
            self.path.mkdir(exist_ok=True)
            lock = Lock(self.path / LOCK, self.path)
            lock.acquire()
        try:
            with storage_errors(self.path):
                self._claim(restart)
            yield
        finally:
            lock.release()

    def _check_place(self, restart: bool) -> SweepNote | None:
        """The sweep that lies here, if there is one. Raises OutputError."""
        if not self.path.parent.is_dir():
            raise OutputError(f"{self.path.parent}: no such folder; create it first")
        if os.path.lexists(self.path) and not self.path.is_dir():
            raise OutputError(f"{self.path}: exists and is not a folder; choose another --output")
        found = self._found()
        left = any(any((self.path / part).glob("*")) for part in ("points", OUTPUTS))
        if found and found.common != self.common and not restart and left:
            differ = "; ".join(changes(found.common, self.common))
            remedy = "run again with those, choose another --output, or pass --restart to begin it anew"
            raise OutputError(f"{self.path}: a sweep with other settings ({differ}); {remedy}")
        return found

    def _claim(self, restart: bool) -> None:
        """Make the folder this sweep's, under the lock: another may have changed it until then."""
        found = self._check_place(restart)
        earlier = SweepNote(about=ABOUT, common=self.common) if found is None else found
        for part in (*NOTES, OUTPUTS):
            if os.path.lexists(self.path / part):
                ownership.check_folder(self.path / part)
        path = self.path / PAGE
        if os.path.lexists(path) and not (_is_plain(path) and PAGE_MARK in read_start(path)):
            ownership.in_the_way(path, OTHERS)
        if restart:
            self._clear(earlier)
        known = {} if restart else earlier.made
        for name, digest in self.points.items():
            self._check_free(name, name in known, digest)
        self.made = {**known, **self.points}
        if restart or found is None or (found.common, found.made) != (self.common, self.made):
            self.finish({})
        for part in (*NOTES, OUTPUTS):
            (self.path / part).mkdir(exist_ok=True)

    def _check_free(self, name: str, known: bool, digest: str) -> None:
        """Raise OutputError for files in the place of a point's that no sweep made."""
        for path in filter(os.path.lexists, map(self.path.joinpath, files_of(name))):
            if not (known and _is_plain(path)):
                ownership.in_the_way(path, OTHERS)
        output = self.output(name)
        if os.path.lexists(output) and (
            os.path.islink(output) or not is_made(output, digest, self.common)
        ):
            ownership.in_the_way(output, OTHERS)

    def _clear(self, earlier: SweepNote) -> None:
        """Remove what an earlier sweep has made. Raises OutputError, before that, for anything else."""
        listed = {file for name in earlier.made for file in files_of(name)}
        notes = [path for part in NOTES for path in (self.path / part).glob("*")]
        for path in notes:
            named = ownership.is_named(path.relative_to(self.path).as_posix(), listed)
            if not named or not _is_plain(path):
                ownership.in_the_way(path, OTHERS)
        outputs = self._outputs(earlier)
        with ExitStack() as held:
            for path in outputs:
                held.enter_context(Workspace(path, overwrite=True, restart=True))
            for path in filter(Path.exists, outputs):
                ownership.remove(path, listed_in(path))
        for path in notes:
            path.unlink()

    def _outputs(self, earlier: SweepNote) -> list[Path]:
        """Outputs that an earlier sweep made or began. Raises OutputError for others."""
        found = sorted({output_of(path) for path in (self.path / OUTPUTS).glob("*")})
        for path in found:
            digest, begun = earlier.made.get(path.name, ""), not os.path.lexists(path)
            own = begun or (not os.path.islink(path) and is_made(path, digest, earlier.common))
            if not digest or not own:
                ownership.in_the_way(path, OTHERS)
        return found

    def tidy(self, name: str) -> None:
        """Remove the checkpoint of a point, but not where anything else lies in it."""
        path = self.output(name)
        with suppress(OSError, OutputError):
            if self.is_written(name):
                ownership.remove(path, listed_in(path))

    def is_written(self, name: str) -> bool:
        """Whether the checkpoint of a point is there."""
        return is_made(self.output(name), self.made.get(name, ""), self.common)

    def _found(self) -> SweepNote | None:
        """The sweep in this folder; None if it is empty."""
        if not self.path.exists() or all(path.name == LOCK for path in self.path.iterdir()):
            return None
        if (found := read_kept(self.path / RESULT, SweepNote, REMEDY)) is None:
            raise OutputError(f"{self.path}: not empty and no sweep of blr; choose another --output")
        return found

    def record(self, name: str) -> Record | None:
        """What is known of a point that is done. Raises OutputError for another's record."""
        path = self.path / "points" / f"{name}.json"
        if (found := read_kept(path, Record, ANEW)) is None:
            return None
        texts = len(self.common.get("texts", found.perplexities))
        sized = found.bits is not None and found.bytes is not None and len(found.kl) == texts
        digest = self.made.get(name, "")
        if len(found.perplexities) != texts or found.digest != digest or (digest and not sized):
            raise OutputError(f"{path}: found the record of another point or sweep; {ANEW}")
        return found

    def output(self, name: str) -> Path:
        return self.path / OUTPUTS / name

    def log(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"

    def spent(self, name: str) -> float:
        """Seconds that the commands of a point have taken. Raises OutputError as `read_kept`."""
        found = read_kept(self.path / "logs" / f"{name}.spent.json", Spent, ANEW)
        return 0.0 if found is None else found.seconds

    def finish(self, result: dict[str, object]) -> None:
        """Write ``sweep.json``: whose the folder is, and the `result` of the sweep if there is one."""
        self.write(RESULT, {"about": ABOUT, "common": self.common, "made": self.made, **result})

    def write(self, name: str, content: dict[str, object] | str) -> None:
        """A file, whole or not at all."""
        text = content if isinstance(content, str) else json.dumps(content, indent=1) + "\n"
        write_stream(self.path / name, [text.encode()])


def files_of(name: str) -> list[str]:
    """Files of a point in the folder, beside its checkpoint."""
    return [f"points/{name}.json", *(f"logs/{name}.{kind}" for kind in ("log", "out", "spent.json"))]


def _is_plain(path: Path) -> bool:
    return stat.S_ISREG(os.lstat(path).st_mode)


def listed_in(output: Path) -> set[str]:
    """What the manifest of an output lists, and the manifest. Raises OutputError without one."""
    return {*read_manifest(output)["files"], MANIFEST}
