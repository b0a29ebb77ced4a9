"""Durable file operations: written under a name of their own, flushed, then renamed into place."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from blr.compressor.errors import BlrError, OutputError, StorageError

CHUNK = 1 << 24  # bytes read or written at once
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
BROKEN = (errno.EIO, errno.ENXIO, errno.ESTALE)
UNFIT = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP)  # no folder can have that name
TAKEN = (errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.EISDIR)  # others moved or made files
SCRATCH = ".tmp"  # suffix of what is being written; left behind only by a kill


def fsync_folder(folder: Path) -> None:
    """Make the folder's entries (creations, renames, deletions) durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def scratch_for(path: Path) -> Path:
    """A name beside `path` that no other process uses, to write to before renaming."""
    return path.with_name(f"{path.name[:100]}.{secrets.token_hex(6)}{SCRATCH}")


def settle(scratch: Path, path: Path) -> None:
    """Flush the finished file `scratch` and rename it to `path`. The folder is not flushed."""
    descriptor = os.open(scratch, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.rename(scratch, path)


def write_stream(path: Path, chunks: Iterable[bytes]) -> tuple[int, str]:
    """Write `chunks` to `path`, which is absent (or as before) until all of them are on the disk.

    Returns:
        Its size in bytes and its SHA-256. The folder is not flushed: the caller does it once.
    """
    digest, size = hashlib.sha256(), 0
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = scratch_for(path)
    try:
        with open(scratch, "xb") as file:
            for chunk in chunks:
                file.write(chunk)
                digest.update(chunk)
                size += len(chunk)
        settle(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)  # a full disk gets its room back
        raise
    return size, digest.hexdigest()


def remove_scratch(folder: Path) -> None:
    """Delete what killed runs were writing below `folder`."""
    for path in folder.rglob(f"*{SCRATCH}"):
        path.unlink(missing_ok=True)


def read_chunks(path: Path) -> Iterator[bytes]:
    """The bytes of a file, `CHUNK` at a time."""
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            yield chunk


def sha256_file(path: Path) -> str:
    """SHA-256 of a file, streamed."""
    digest = hashlib.sha256()
    for chunk in read_chunks(path):
        digest.update(chunk)
    return digest.hexdigest()


def remove_tree(folder: Path) -> None:
    """Delete a folder and all it holds, if it is there."""
    if folder.exists():
        try:
            shutil.rmtree(folder)
        except OSError as error:
            error.filename = str(folder)  # shutil names the entry alone
            raise
        fsync_folder(folder.parent)


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below `folder`, 0 if it is not there."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@contextmanager
def storage_errors(folder: Path, needed: int | None = None, own: Path | None = None) -> Iterator[None]:
    """Turn operating-system errors while writing under `folder` into errors with a remedy.

    `needed` is the estimate of the bytes the whole run writes there, if known. Errors about files
    whose path does not begin with `own` (`folder` if None) pass. The safetensors library reports
    its own without a number: its text is searched.
    """
    try:
        yield
    except BlrError:
        raise
    except Exception as error:
        translated = _translate(_errno(error, own or folder), folder, needed)
        if translated is None:
            raise
        raise translated from error


def _errno(error: Exception, own: Path) -> int | None:
    """The system's number of an error about `own`; of one that safetensors reports, by its text."""
    if type(error).__name__ == "SafetensorError":
        known = (code for code in (*FULL, *DENIED, *BROKEN) if os.strerror(code) in str(error))
        return next(known, None)
    if not isinstance(error, OSError):
        return None
    if not isinstance(error.filename, str | bytes):
        return error.errno
    place = os.path.abspath(os.fsdecode(error.filename))
    return error.errno if place.startswith(str(own)) or place == str(own.parent) else None


def _translate(code: int | None, folder: Path, needed: int | None) -> BlrError | None:
    what = os.strerror(code).lower() if code else ""
    if code in FULL:
        return StorageError(
            f"{folder}: {what}; the run needs "
            + (f"about {needed} bytes there: " if needed else "more room: ")
            + "free or enlarge the disk, then run the same command again, it resumes"
        )
    if code in DENIED:
        return OutputError(f"{folder}: {what}; choose an output folder you can write to")
    if code in UNFIT:
        return OutputError(f"{folder}: {what}; choose another --output")
    if code in TAKEN:
        return OutputError(
            f"{folder}: {what}; another program changed the output or its partial folder, "
            "run the same command again"
        )
    if code in BROKEN:
        return StorageError(f"{folder}: {what}; check the disk, then run the same command again")
    return None


def check_space(folder: Path, needed: int) -> None:
    """Refuse before the work starts when `folder`'s disk cannot hold `needed` more bytes."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise StorageError(
            f"{folder}: {free} bytes free, the run needs about {needed} bytes: "
            "free or enlarge the disk, or choose another --output"
        )
