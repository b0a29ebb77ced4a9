"""Where an output is built: ``OUT.blr-partial/``, a locked sibling with the journal and, at the end,
every file of the output. It becomes ``OUT`` in one rename, when all is flushed and in the manifest."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from blr.compressor.base.disk import check_space, folder_bytes, fsync_folder
from blr.compressor.base.errors import OutputError
from blr.compressor.base.exhaustion import storage_errors
from blr.compressor.checkpoint.source import JOURNAL
from blr.compressor.workspace import ownership
from blr.compressor.workspace.journal import Journal, canonical_json, changes
from blr.compressor.workspace.lock import Lock
from blr.compressor.workspace.manifest import MANIFEST, read_manifest, verify_files, verify_listed
from blr.compressor.workspace.ownership import absolute, check_output, sibling

Verify = Callable[[Path, dict[str, object]], list[str]]


class Workspace:
    """Exclusive access to the partial folder of one output, as a context manager. `overwrite`
    replaces an existing output of blr. `restart` discards what an earlier run left. `visiting` adds
    to the journal of another process and does not enter. Raises OutputError, on entering, if another
    run holds it, or if it is not writable or not of blr."""

    def __init__(
        self, output: Path, *, overwrite: bool = False, restart: bool = False, visiting: bool = False
    ) -> None:
        self.output = absolute(output)
        if not visiting:
            check_output(self.output, overwrite)
        self.partial = sibling(self.output, "partial")
        self.retired = sibling(self.output, "replaced")
        self.journal = Journal(self.partial / JOURNAL)
        self.pickled = self.partial / ownership.PICKLED  # room for converted pickle weights
        self.fingerprint: dict[str, object] = {}
        self.overwrite, self.restart = overwrite, restart
        self._lock = Lock(sibling(self.output, "lock"), self.output)
        self._files: set[str] = set()  # all that the partial folder may hold, by the marker in it
        self._replaced: ownership.Entries = {}  # what is in the output that is overwritten
        self._left: dict[str, object] | None = None  # fingerprint of the run that left it there
        self._after_kill = False

    def __enter__(self) -> Workspace:
        with storage_errors(self.output.parent):
            self.output.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
            try:
                self._enter()
            except BaseException:
                self._lock.release()
                raise
        return self

    def _enter(self) -> None:
        self._after_kill = self._lock.after_kill
        if self._lock.moving:
            self._settle_replacement()
        check_output(self.output, self.overwrite)
        if self._replaces():
            self._check_retired()
            self._replaced = ownership.check_whole(self.output)
        self._take_partial()
        if self._lock.moving:
            self._lock.settled()
        if self.restart and os.path.lexists(self.partial):
            ownership.remove(self.partial, self._files)
            self._files, self._left = set(), None

    def __exit__(self, *error: object) -> None:
        with suppress(OSError, OutputError):  # not ours to look into, or to delete
            if self._is_marked() and not self._holds_work():
                ownership.remove(self.partial, self._files)
        self._lock.release()

    def claim(self, names: Iterable[str] = ()) -> None:
        """Mark the partial folder as ours, with the names of files that are about to be written."""
        self._files |= {*names, ownership.RUN_FILE, MANIFEST}
        with storage_errors(self.output.parent):
            ownership.write_marker(self.partial, self.fingerprint or self._left, self._files)

    def open(self, fingerprint: dict[str, object]) -> None:
        """Make the partial folder ready for a run, which `fingerprint` (JSON-ready) describes. Raises
        OutputError, naming the differences, for work of a run with another one."""
        self.fingerprint = json.loads(canonical_json(fingerprint))
        changed = changes(self._left, self.fingerprint) if self._left is not None else []
        if changed and self._holds_work():
            discard = "pass --restart to discard it" if self._is_marked() else "move it away"
            found = f"left by a run with other settings ({'; '.join(changed)})"
            raise OutputError(f"{self.partial}: {found}; run again with those, or {discard}")
        if self._is_marked() or not os.path.lexists(self.partial):
            self.claim()
            self.journal.folder.mkdir(exist_ok=True)
            self._remove_scratch()

    def _remove_scratch(self) -> None:
        found = ownership.check_listed(self.partial, self._files)
        ownership.delete(self.partial, {n: s for n, s in found.items() if ownership.is_scratch(n)})

    def finished(self, read: str) -> bool:
        """Whether an earlier run of this fingerprint had written everything; `read` is the digest of its
        input. One that was stopped before the last rename is committed now."""
        if self.holds_result(self.partial, read):
            self.commit()
            return True
        if not self._is_marked():
            ownership.in_the_way(self.partial, "an output of its own, made from other weights")
        (self.partial / MANIFEST).unlink(missing_ok=True)
        done = self._after_kill and self.holds_result(self.output, read, verify_files)
        if done:
            ownership.remove(self.partial, self._files)
        return done

    def commit(self) -> None:
        """Turn the partial folder, whose manifest is written, into the output: purge and rename."""
        listed = {*read_manifest(self.partial)["files"], MANIFEST}
        found = ownership.check_listed(self.partial, self._files | listed)
        replaces = self._replaces()
        if replaces:
            self._check_retired()
            if not ownership.unchanged(self._replaced, self.output):
                ownership.in_the_way(self.output, "changed while this run worked")
        self._purge(found, {*listed, ownership.RUN_FILE})
        self._lock.begin_moving()  # from here on it is the lock that tells whose the folder is
        (self.partial / ownership.RUN_FILE).unlink(missing_ok=True)
        fsync_folder(self.partial)
        if replaces:
            os.rename(self.output, self.retired)
        try:
            os.rename(self.partial, self.output)
        except OSError:
            if replaces:
                os.rename(self.retired, self.output)
            raise
        fsync_folder(self.output.parent)
        if replaces:
            ownership.remove(self.retired, self._replaced)
        self._lock.moving = False  # `release` removes the lock again

    @contextmanager
    def room(self, needed: int, check: bool = True) -> Iterator[None]:
        """Turn errors of storage into StorageError; with `check` first ask for `needed` bytes."""
        parent = self.output.parent
        with storage_errors(parent, needed, self.output, self._holds_work):
            if check:
                check_space(parent, needed - self.used_bytes())
            yield

    def used_bytes(self) -> int:
        """What an earlier run left of its work in the partial folder, in bytes."""
        return folder_bytes(self.partial) - folder_bytes(self.pickled)

    def _replaces(self) -> bool:
        return self.overwrite and self.output.is_dir() and any(self.output.iterdir())

    def _check_retired(self) -> None:
        if os.path.lexists(self.retired):
            ownership.in_the_way(self.retired, "where the replaced output is kept for a moment")

    def _purge(self, found: ownership.Entries, listed: set[str]) -> None:
        """Delete what is not listed from the partial folder and flush all folders in it."""
        kept = {n for n in found if n in listed or any(name.startswith(f"{n}/") for name in listed)}
        ownership.delete(self.partial, {n: s for n, s in found.items() if n not in kept})
        for name in kept:
            if stat.S_ISDIR(found[name].st_mode):
                fsync_folder(self.partial / name)

    def holds_result(self, folder: Path, read: str, verify: Verify = verify_listed) -> bool:
        """Whether `folder` is whole, and what a run with this fingerprint makes of what it reads."""
        try:
            manifest = read_manifest(folder)
        except OutputError:
            return False
        same = manifest.get("run") == self.fingerprint and manifest.get("input_sha256") == read
        return same and not verify(folder, manifest)

    def _settle_replacement(self) -> None:
        """Finish or undo an --overwrite that was killed between its renames."""
        if not os.path.lexists(self.retired):
            return
        ownership.check_folder(self.retired)
        listed = {MANIFEST}
        if any(self.retired.iterdir()):  # it may have been killed as it deleted the last of it
            listed |= read_manifest(self.retired)["files"].keys()
        ownership.check_listed(self.retired, listed)
        if not os.path.lexists(self.output):
            os.rename(self.retired, self.output)
        elif (self.output / MANIFEST).exists():
            ownership.remove(self.retired, listed)

    def _take_partial(self) -> None:
        """Check that the partial folder is of blr. A whole output in it is this run's to finish only
        with the same fingerprint, or if the lock tells of a killed move."""
        if not os.path.lexists(self.partial):
            return
        ownership.check_folder(self.partial)
        marker = ownership.read_marker(self.partial)
        if marker is not None:
            files, self._left = marker
            self._files = {*files, ownership.RUN_FILE, MANIFEST}
            ownership.check_listed(self.partial, self._files)
        elif (self.partial / MANIFEST).exists():
            manifest = read_manifest(self.partial)
            self._files = {*manifest["files"], MANIFEST, ownership.RUN_FILE}
            self._left = manifest.get("run") or {}
            ownership.check_listed(self.partial, self._files)
            if self._lock.moving:
                self.claim()
            elif self.restart:
                ownership.in_the_way(self.partial, "a whole output, which --restart does not discard")
        elif ownership.is_unborn(self.partial) or (self._after_kill and not any(self.partial.iterdir())):
            ownership.remove(self.partial, {ownership.RUN_FILE})
        else:
            ownership.in_the_way(self.partial, "without the mark of blr")

    def _is_marked(self) -> bool:
        return os.path.lexists(self.partial / ownership.RUN_FILE)

    def _holds_work(self) -> bool:
        """Whether there is anything to resume in the partial folder: a finished layer or all."""
        return (self.partial / MANIFEST).exists() or any(self.journal.folder.glob("*.safetensors"))
