"""Where an output is built: a locked sibling folder that becomes the output in one rename.

``OUT.blr-partial/`` holds the journal and, at the end, every file of the output. ``OUT`` itself
is absent until all of it has been written, flushed and listed in the manifest.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from blr.compressor.checkpoint.disk import fsync_folder, remove_tree, storage_errors, write_atomic
from blr.compressor.checkpoint.journal import Journal, canonical_json
from blr.compressor.checkpoint.manifest import MANIFEST, read_manifest, verify_files
from blr.compressor.errors import OutputError

RUN_FILE = "run.json"
HELD_LOCKS: set[Path] = set()  # lock files of this process, for whoever ends it abruptly


class Workspace:
    """Exclusive access to the partial folder of one output; use as a context manager.

    Args:
        output: the folder to produce.
        overwrite: replace an existing output of ours.
        restart: discard what an earlier run left instead of resuming it.

    Raises (on entering):
        OutputError: locked by another run, not writable, or occupied.
    """

    def __init__(self, output: Path, *, overwrite: bool = False, restart: bool = False) -> None:
        self.output = Path(os.path.abspath(output))
        self.partial = self.output.with_name(self.output.name + ".blr-partial")
        self.retired = self.output.with_name(self.output.name + ".blr-replaced")
        self.lock_file = self.output.with_name(self.output.name + ".blr-lock")
        self.journal = Journal(self.partial / "journal")
        self.pickled = self.partial / "pickled"  # room for converted pickle weights
        self.fingerprint: dict[str, Any] = {}
        self.overwrite, self.restart = overwrite, restart

    def __enter__(self) -> Workspace:
        from filelock import FileLock, Timeout

        check_parent(self.output)
        self._lock = FileLock(self.lock_file, mode=0o644)
        try:
            with storage_errors(self.output.parent):
                self._lock.acquire(blocking=False)
        except Timeout:
            raise OutputError(
                f"{self.output}: another blr run is writing it; wait for it or choose another output"
            ) from None
        HELD_LOCKS.add(self.lock_file)
        try:
            self._refuse_occupied_output()
            if self.restart:
                remove_tree(self.partial)
        except BaseException:
            self._unlock()
            raise
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._unlock()

    def open(self, fingerprint: dict[str, Any]) -> bool:
        """Make the partial folder ready for a run, or find it finished.

        Args:
            fingerprint: everything a resumed run must agree on, by name, JSON-ready.

        Returns:
            True when an earlier run had done all but the last rename: only `commit` is left.

        Raises:
            OutputError: left by a run with another fingerprint (the message names what changed).
        """
        self.fingerprint = json.loads(canonical_json(fingerprint))
        if self._left_complete():
            return True
        self.journal.folder.mkdir(parents=True, exist_ok=True)
        self._check_fingerprint()
        return False

    def commit(self) -> None:
        """Turn the partial folder, whose manifest is written, into the output.

        Everything that the manifest does not list is purged first, then one rename.
        """
        listed = {*read_manifest(self.partial)["files"], MANIFEST}
        for path in sorted(self.partial.iterdir()):
            if path.name not in listed:
                remove_tree(path) if path.is_dir() else path.unlink()
        fsync_folder(self.partial)
        if self.overwrite and self.output.exists():
            remove_tree(self.retired)
            os.rename(self.output, self.retired)
        os.rename(self.partial, self.output)
        fsync_folder(self.output.parent)
        remove_tree(self.retired)

    def _left_complete(self) -> bool:
        """Whether an earlier run with our fingerprint was stopped after its manifest."""
        if not (self.partial / MANIFEST).exists():
            return False
        manifest = read_manifest(self.partial)
        if manifest.get("run") == self.fingerprint and not verify_files(self.partial, manifest):
            return True
        (self.partial / MANIFEST).unlink()
        return False

    def _refuse_occupied_output(self) -> None:
        if not os.path.lexists(self.output):
            return
        if not self.output.is_dir() or self.output.is_symlink():
            raise OutputError(f"{self.output}: exists and is not a folder; choose another --output")
        if not any(self.output.iterdir()):
            return
        if not self.overwrite:
            raise OutputError(
                f"{self.output}: the output folder exists and is not empty; "
                "remove it, choose another --output, or pass --overwrite if blr wrote it"
            )
        read_manifest(self.output)

    def _check_fingerprint(self) -> None:
        path = self.partial / RUN_FILE
        if not path.exists():
            write_atomic(path, canonical_json(self.fingerprint))
            return
        left = json.loads(path.read_bytes())
        changed = [k for k in {**left, **self.fingerprint} if left.get(k) != self.fingerprint.get(k)]
        if changed:
            found = "; ".join(
                f"{k} was {_short(left.get(k))}, now {_short(self.fingerprint.get(k))}" for k in changed
            )
            raise OutputError(
                f"{self.partial}: left by a run with other settings ({found}); "
                "run again with those, or pass --restart to discard it"
            )

    def _unlock(self) -> None:
        self.lock_file.unlink(missing_ok=True)  # while held: filelock checks for unlinked inodes
        self._lock.release()
        HELD_LOCKS.discard(self.lock_file)


def check_parent(output: Path) -> None:
    """Raise OutputError unless the folder that will hold `output` exists and is writable."""
    parent = Path(os.path.abspath(output)).parent
    if not parent.is_dir():
        raise OutputError(f"{parent}: no such folder to write {output.name} into; create it first")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise OutputError(f"{parent}: not writable; choose an output folder you can write to")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
