"""Durable file operations: written, flushed, renamed, and the folder flushed as well."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from blr.compressor.errors import BlrError, OutputError, StorageError

CHUNK = 1 << 24  # bytes read or written at once
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
BROKEN = (errno.EIO, errno.ENXIO, errno.ESTALE)


def fsync_folder(folder: Path) -> None:
    """Make the folder's entries (creations, renames, deletions) durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_stream(path: Path, chunks: Iterable[bytes]) -> tuple[int, str]:
    """Write `chunks` to a new file at `path` and flush it.

    Returns:
        Its size in bytes and its SHA-256. The folder is not flushed: the caller does it once.
    """
    digest, size = hashlib.sha256(), 0
    with open(path, "wb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def write_atomic(path: Path, data: bytes) -> None:
    """Write `path` so that it is either absent (or as before) or complete after a crash."""
    scratch = path.with_name(path.name + ".tmp")
    write_stream(scratch, [data])
    os.rename(scratch, path)
    fsync_folder(path.parent)


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
        shutil.rmtree(folder)
        fsync_folder(folder.parent)


@contextmanager
def storage_errors(folder: Path, needed: int | None = None) -> Iterator[None]:
    """Turn operating-system errors while writing under `folder` into errors with a remedy.

    `needed` is the estimate of the bytes the whole run writes there, if known. The safetensors library
    reports its own I/O errors without a number, so its text is searched as well.
    """
    try:
        yield
    except BlrError:
        raise
    except OSError as error:
        code = error.errno
        if code not in (*FULL, *DENIED, *BROKEN):
            raise
        raise _translate(code, folder, needed) from error
    except Exception as error:
        known = (c for c in (*FULL, *DENIED, *BROKEN) if os.strerror(c) in str(error))
        code = next(known, None) if type(error).__name__ == "SafetensorError" else None
        if code is None:
            raise
        raise _translate(code, folder, needed) from error


def _translate(code: int, folder: Path, needed: int | None) -> BlrError:
    what = os.strerror(code).lower()
    if code in FULL:
        return StorageError(
            f"{folder}: {what}; the run needs "
            + (f"about {needed} bytes there: " if needed else "more room: ")
            + "free or enlarge the disk, then run the same command again, it resumes"
        )
    if code in DENIED:
        return OutputError(f"{folder}: {what}; choose an output folder you can write to")
    return StorageError(f"{folder}: {what}; check the disk, then run the same command again")


def check_space(folder: Path, needed: int) -> None:
    """Refuse before the work starts when `folder`'s disk cannot hold `needed` more bytes."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise StorageError(
            f"{folder}: {free} bytes free, the run needs about {needed} bytes: "
            "free or enlarge the disk, or choose another --output"
        )
