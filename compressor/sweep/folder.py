"""The folder of a sweep: what is done lies in it point by point, and another run goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from blr.compressor.checkpoint import ownership
from blr.compressor.checkpoint.destination import output_of
from blr.compressor.checkpoint.disk import write_stream
from blr.compressor.checkpoint.fingerprint import changes
from blr.compressor.checkpoint.lock import Lock
from blr.compressor.checkpoint.manifest import MANIFEST, read_manifest
from blr.compressor.checkpoint.remedies import storage_errors
from blr.compressor.checkpoint.workspace import Workspace
from blr.compressor.errors import OutputError

ABOUT = "sweep of blr"
RESULT = "sweep.json"
LOCK = "sweep.lock"
PARTS = ("points", "logs", "outputs")
NOTES = (".json", ".log", ".out")  # files in the first two


class Folder:
    """`path` with ``sweep.json``, and for each point ``points/NAME.json``, ``logs/NAME.log`` and, while
    it is made or if outputs are kept, ``outputs/NAME``.

    Args:
        common: what all points have in common; a folder of another sweep is refused.
    """

    def __init__(self, path: Path, common: dict[str, Any]) -> None:
        self.path = Path(os.path.abspath(path))
        self.common = json.loads(json.dumps(common))

    @contextmanager
    def held(self, restart: bool) -> Iterator[None]:
        """While active the folder is this process's.

        Raises OutputError: something else lies there, a sweep of other settings, or one that runs.
        """
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

    def _check_place(self, restart: bool) -> dict[str, Any] | None:
        """What the sweep that lies here has in common, if there is one. Raises OutputError."""
        if not self.path.parent.is_dir():
            raise OutputError(f"{self.path.parent}: no such folder; create it first")
        if os.path.lexists(self.path) and not self.path.is_dir():
            raise OutputError(f"{self.path}: exists and is not a folder; choose another --output")
        found = self._found()
        if found is not None and found != self.common and not restart and self._has_work():
            self._differs(found)
        return found

    def _claim(self, restart: bool) -> None:
        """Make the folder this sweep's, under the lock: another may have changed it until then."""
        found = self._check_place(restart)
        if restart:
            self._clear()
        for part in PARTS:
            (self.path / part).mkdir(parents=True, exist_ok=True)
        if found is None or found != self.common:
            self.write(RESULT, {"about": ABOUT, "common": self.common})

    def _clear(self) -> None:
        """Remove what an earlier sweep has made. Raises OutputError, before any checkpoint is gone, for
        what is not of blr, or was changed since."""
        notes = [path for part in PARTS[:2] for path in (self.path / part).glob("*")]
        for path in notes:
            if not path.is_file() or path.is_symlink() or not path.name.endswith(NOTES):
                ownership.in_the_way(path, "not written by a sweep")
        outputs = sorted({output_of(path) for path in (self.path / "outputs").glob("*")})
        with ExitStack() as held:
            for path in outputs:
                held.enter_context(Workspace(path, overwrite=True, restart=True))
            for path in filter(Path.exists, outputs):
                ownership.remove(path, listed_in(path))
        for path in notes:
            path.unlink()

    def tidy(self, name: str) -> None:
        """Remove the checkpoint of a point, but not where anything else lies in it."""
        path = self.output(name)
        with suppress(OSError, OutputError):
            ownership.remove(path, listed_in(path))

    def _found(self) -> dict[str, Any] | None:
        """What the sweep that lies here has in common; None if there is nothing."""
        if not self.path.exists() or all(path.name == LOCK for path in self.path.iterdir()):
            return None
        found = read_json(self.path / RESULT)
        if found.get("about") != ABOUT or not isinstance(found.get("common"), dict):
            raise OutputError(f"{self.path}: not empty and no sweep of blr; choose another --output")
        return found["common"]

    def _has_work(self) -> bool:
        """Whether a run has left anything beside what it was asked for."""
        return any(any((self.path / part).glob("*")) for part in ("points", "outputs"))

    def _differs(self, found: dict[str, Any]) -> NoReturn:
        raise OutputError(
            f"{self.path}: a sweep with other settings ({'; '.join(changes(found, self.common))}); run "
            "again with those, choose another --output, or pass --restart to begin it anew"
        )

    def record(self, name: str) -> dict[str, Any] | None:
        """What is known of a point that is done."""
        return read_json(self.path / "points" / f"{name}.json") or None

    def output(self, name: str) -> Path:
        """Where a point's checkpoint is made."""
        return self.path / "outputs" / name

    def log(self, name: str) -> Path:
        """What a point's commands have said."""
        return self.path / "logs" / f"{name}.log"

    def spent(self, name: str) -> float:
        """Seconds that the commands of a point have taken."""
        return float(read_json(self.path / "logs" / f"{name}.spent.json").get("seconds", 0.0))

    def spend(self, name: str, seconds: float) -> None:
        """Keep them."""
        self.write(f"logs/{name}.spent.json", {"seconds": seconds})

    def write(self, name: str, content: dict[str, Any] | str) -> None:
        """A file, whole or not at all."""
        text = content if isinstance(content, str) else json.dumps(content, indent=1) + "\n"
        write_stream(self.path / name, [text.encode()])


def listed_in(output: Path) -> set[str]:
    """What the manifest of an output lists, and the manifest. Raises OutputError without one."""
    return {*read_manifest(output)["files"], MANIFEST}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty if there is none that can be read."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
