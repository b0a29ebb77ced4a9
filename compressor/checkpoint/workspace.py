"""Where an output is built: a locked sibling folder that becomes the output in one rename.

``OUT.blr-partial/`` holds the journal and, at the end, every file of the output. ``OUT`` itself
is absent until all of it has been written, flushed and listed in the manifest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from blr.compressor.checkpoint.disk import (
    folder_bytes,
    fsync_folder,
    remove_scratch,
    remove_tree,
    storage_errors,
    write_stream,
)
from blr.compressor.checkpoint.header import parse_json
from blr.compressor.checkpoint.journal import Journal, canonical_json
from blr.compressor.checkpoint.manifest import (
    MANIFEST,
    read_manifest,
    verify_files,
    verify_listed,
)
from blr.compressor.errors import InputError, OutputError

RUN_FILE = "run.json"
Verify = Callable[[Path, dict[str, Any]], list[str]]
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
        check_output(self.output, overwrite)
        self.partial = sibling(self.output, "partial")
        self.retired = sibling(self.output, "replaced")
        self.lock_file = sibling(self.output, "lock")
        self.journal = Journal(self.partial / "journal")
        self.pickled = self.partial / "pickled"  # room for converted pickle weights
        self.fingerprint: dict[str, Any] = {}
        self.overwrite, self.restart = overwrite, restart
        self._after_kill = False

    def __enter__(self) -> Workspace:
        with storage_errors(self.output.parent):
            self._acquire()
            try:
                self._settle_replacement()
                check_output(self.output, self.overwrite)
                if self.restart:
                    remove_tree(self.partial)
            except BaseException:
                self._unlock()
                raise
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # not ours to look into, or to delete
            if not self._holds_work():
                remove_tree(self.partial)
        self._unlock()

    def open(self, fingerprint: dict[str, Any]) -> None:
        """Make the partial folder ready for a run.

        Args:
            fingerprint: everything a resumed run must agree on, by name, JSON-ready.

        Raises:
            OutputError: left by a run with another fingerprint (the message names what changed).
        """
        self.fingerprint = json.loads(canonical_json(fingerprint))
        left = self._left_fingerprint() if self._holds_work() else None
        if left is not None:
            self._check_fingerprint(left)
        self.journal.folder.mkdir(parents=True, exist_ok=True)
        remove_scratch(self.partial)
        if left is None:
            write_stream(self.partial / RUN_FILE, [canonical_json(self.fingerprint)])
            fsync_folder(self.partial)

    def finished(self, read: str) -> bool:
        """Whether an earlier run with this fingerprint was killed when all was written.

        Args:
            read: digest of everything that the run reads, as it is now.

        Such a run may have been stopped before the last rename, which is then made up for, or
        after it, if it was to overwrite.
        """
        if self._is_result(self.partial, read, verify_listed):
            self.commit()
            return True
        (self.partial / MANIFEST).unlink(missing_ok=True)
        done = self._after_kill and self._is_result(self.output, read, verify_files)
        if done:
            remove_tree(self.partial)
        return done

    def commit(self) -> None:
        """Turn the partial folder, whose manifest is written, into the output.

        Everything that the manifest does not list is purged first, then one rename.
        """
        self._purge({*read_manifest(self.partial)["files"], MANIFEST})
        if self.overwrite and self.output.exists():
            remove_tree(self.retired)
            os.rename(self.output, self.retired)
        os.rename(self.partial, self.output)
        fsync_folder(self.output.parent)
        remove_tree(self.retired)

    def used_bytes(self) -> int:
        """What an earlier run left of its work in the partial folder, in bytes."""
        return folder_bytes(self.partial) - folder_bytes(self.pickled)

    def _purge(self, listed: set[str]) -> None:
        """Delete what is not listed from the partial folder and flush all of its folders."""
        for path in sorted(self.partial.rglob("*"), reverse=True):  # what a folder holds before it
            name = str(path.relative_to(self.partial))
            if not path.is_dir() or path.is_symlink():
                if name not in listed:
                    path.unlink()
            elif any(kept.startswith(f"{name}/") for kept in listed):
                fsync_folder(path)
            else:
                path.rmdir()
        fsync_folder(self.partial)

    def _is_result(self, folder: Path, read: str, verify: Verify) -> bool:
        """Whether `folder` holds what this run would produce, whole."""
        try:
            manifest = read_manifest(folder)
        except OutputError:
            return False
        same = manifest.get("run") == self.fingerprint and manifest.get("input_sha256") == read
        return same and not verify(folder, manifest)

    def _settle_replacement(self) -> None:
        """Finish or undo an --overwrite that was killed between its renames."""
        if not self.retired.exists():
            return
        if not os.path.lexists(self.output):
            os.rename(self.retired, self.output)
        elif (self.output / MANIFEST).exists():
            remove_tree(self.retired)

    def _holds_work(self) -> bool:
        """Whether there is anything to resume in the partial folder: a finished layer or all."""
        return (self.partial / MANIFEST).exists() or any(self.journal.folder.glob("*.safetensors"))

    def _left_fingerprint(self) -> dict[str, Any] | None:
        """That of the run which left the partial folder, None if there is none."""
        path = self.partial / RUN_FILE
        if path.exists():
            try:
                return parse_json(path.read_bytes(), path)
            except InputError:
                raise OutputError(
                    f"{path}: damaged, it should be JSON; pass --restart to discard the folder"
                ) from None
        try:
            return read_manifest(self.partial).get("run")
        except OutputError:
            return None

    def _check_fingerprint(self, left: dict[str, Any]) -> None:
        changed = _changes(left, self.fingerprint)
        if changed:
            raise OutputError(
                f"{self.partial}: left by a run with other settings ({'; '.join(changed)}); "
                "run again with those, or pass --restart to discard it"
            )

    def _acquire(self) -> None:
        from filelock import FileLock, Timeout

        self._after_kill = self.lock_file.exists()
        self._lock = FileLock(self.lock_file)
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            raise OutputError(
                f"{self.output}: another blr run is writing it; wait for it or choose another --output"
            ) from None
        HELD_LOCKS.add(self.lock_file)

    def _unlock(self) -> None:
        with suppress(OSError):  # a folder made read-only meanwhile
            self.lock_file.unlink()  # while held: filelock checks for unlinked inodes
        self._lock.release()
        HELD_LOCKS.discard(self.lock_file)


def sibling(output: Path, kind: str) -> Path:
    """The path beside `output` that holds its partial folder, lock or replaced output."""
    return output.with_name(f"{output.name}.blr-{kind}")


def check_output(output: Path, overwrite: bool = False) -> None:
    """Raise OutputError unless `output` can be written: see there before anything slow is done."""
    output = Path(os.path.abspath(output))
    parent = output.parent
    with storage_errors(parent):
        if not output.name:
            raise OutputError(f"{output}: not a folder that can be made; choose another --output")
        if not parent.is_dir():
            raise OutputError(f"{parent}: no such folder to write {output.name} into; create it first")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise OutputError(f"{parent}: not writable; choose an output folder you can write to")
        if os.path.lexists(output):
            _check_occupied(output, overwrite)


def _check_occupied(output: Path, overwrite: bool) -> None:
    if not output.is_dir() or output.is_symlink():
        raise OutputError(f"{output}: exists and is not a folder; choose another --output")
    if not any(output.iterdir()):
        return
    if not overwrite:
        raise OutputError(
            f"{output}: the output folder exists and is not empty; "
            "remove it, choose another --output, or pass --overwrite if blr wrote it"
        )
    read_manifest(output)


def _changes(left: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """What differs between two fingerprints, named down to the single setting."""
    found = []
    for key in {**left, **now}:
        was, is_now = left.get(key), now.get(key)
        if type(was) is dict and type(is_now) is dict:
            found += _changes(was, is_now, f"{prefix}{key}.")
        elif was != is_now:
            found.append(f"{prefix}{key} was {_short(was)}, now {_short(is_now)}")
    return found


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
