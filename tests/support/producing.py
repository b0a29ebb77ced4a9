"""A run of the least size: what compress and export do to the disk, without a model or torch; and what
lies in folders."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import Any

from blr.compressor.base.disk import check_space, fsync_folder, write_stream
from blr.compressor.base.exhaustion import storage_errors
from blr.compressor.workspace.lock import HELD_LOCKS, Lock
from blr.compressor.workspace.manifest import MANIFEST, build_manifest, read_manifest, verify_files
from blr.compressor.workspace.ownership import check_apart, check_output
from blr.compressor.workspace.workspace import Workspace

SHARD = (2).to_bytes(8, "little") + b"{}"  # one that holds no tensor
FILES = {"config.json": b"{}", "model.safetensors": SHARD, "1_Pooling/config.json": b"[]"}
LAYER = "a" * 64
RUN = {"recipe": {"cf": 2}}


def produce(output: Path, source: Path | None = None, *, run: Any = RUN, **options: bool) -> None:
    """Write `FILES` to `output`, with one finished layer in the journal on the way."""
    check_output(output, options.get("overwrite", False))
    if source is not None:
        check_apart(output, source)
    with Workspace(output, **options) as workspace, storage_errors(workspace.output.parent):
        check_space(workspace.output.parent, 1000 - workspace.used_bytes())
        workspace.open(run)
        if workspace.finished("0" * 64):
            return
        write_stream(workspace.journal.folder / f"{LAYER}.safetensors", [b"factors"])
        workspace.claim(FILES)
        written = {n: write_stream(workspace.partial / n, [data]) for n, data in FILES.items()}
        fsync_folder(workspace.partial)
        manifest = build_manifest(workspace.partial, written, input_sha256="0" * 64, run=run)
        write_stream(workspace.partial / MANIFEST, [manifest])
        workspace.commit()


def is_whole(output: Path) -> bool:
    """Whether `output` is what `produce` writes, and nothing is beside it."""
    manifest = read_manifest(output)
    beside = [path for path in output.parent.iterdir() if path.name.startswith(f"{output.name}.blr-")]
    return manifest["files"].keys() == FILES.keys() and not verify_files(output, manifest) + beside


def stop_before_commit(output: Path, **options: Any) -> None:
    """Leave what a run leaves that is killed when its layer is done: partial folder and lock."""
    _stopped("claim", output, **options)


def stop_before_rename(output: Path, **options: Any) -> None:
    """Leave what a run leaves that is killed as it moves folders: one without a `run.json`."""
    _stopped("rename", output, **options)


def _stopped(at: str, output: Path, **options: Any) -> None:
    class Stopped(Exception):
        pass

    def stop(*arguments: Any, **named: Any) -> None:
        if at == "claim" or Path(arguments[0]).suffix == ".blr-partial":
            raise Stopped
        return before(*arguments, **named)

    where, name = (Workspace, "_remove_scratch") if at == "claim" else (os, "rename")
    before, leave = getattr(where, name), Workspace.__exit__
    setattr(where, name, stop)
    Workspace.__exit__ = lambda self, *error: _vanish(self._lock)
    try:
        produce(output, **options)
    except Stopped:
        pass
    finally:
        setattr(where, name, before)
        Workspace.__exit__ = leave


def _vanish(lock: Lock) -> None:
    """Let go of a lock as the end of a process does."""
    os.close(lock._descriptor)
    HELD_LOCKS.discard(lock.path)


def files(output: Path) -> dict[str, str]:
    """SHA-256 by name of a whole output. Fails on a part of one."""
    manifest = read_manifest(output)
    assert verify_files(output, manifest) == []
    return {name: listed["sha256"] for name, listed in manifest["files"].items()}


def listing(root: Path) -> list[tuple[str, int, int]]:
    """Every path below `root` with size and time of change, links not followed: `snapshot` without a
    look inside."""
    return [(str(p), p.lstat().st_size, p.lstat().st_mtime_ns) for p in sorted(root.rglob("*"))]


def snapshot(root: Path) -> dict[str, tuple[Any, ...]]:
    """Every path below `root` with its kind, mode, time and contents; links as links."""
    found = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder) / name
            status = path.lstat()
            found[str(path.relative_to(root))] = (
                status.st_mode,
                status.st_mtime_ns,
                status.st_ino,
                _content(path, status.st_mode),
            )
    return found


def _content(path: Path, mode: int) -> str:
    if stat.S_ISLNK(mode):
        return os.readlink(path)
    return hashlib.sha256(path.read_bytes()).hexdigest() if stat.S_ISREG(mode) else ""
