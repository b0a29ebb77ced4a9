"""Durable file operations: written under a name of their own, flushed, then renamed into place."""

import errno
import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from blr.compressor.base.errors import CapabilityError, StorageError

Bytes = bytes | bytearray | memoryview
CHUNK = 1 << 24  # bytes read or written at once
# What file systems without durable folders (some network ones) answer to fsync: there is no more to do
NO_FSYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)
# ... and to link
NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.EXDEV)
SCRATCH = ".tmp"  # suffix of what is being written; left behind only by a kill
_made: set[Path] = set()


def flush(descriptor: int) -> None:
    """Make what was written durable, where the file system can."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_FSYNC:
            raise


def fsync_folder(folder: Path) -> None:
    """Make the folder's entries (creations, renames, deletions) durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        flush(descriptor)
    finally:
        os.close(descriptor)


def scratch_for(path: Path) -> Path:
    """A name beside `path` that no other process uses, to write to before renaming."""
    return path.with_name(f"{path.name[:100]}.{secrets.token_hex(6)}{SCRATCH}")


def settle(scratch: Path, path: Path, new: bool = False) -> None:
    """Flush the finished file `scratch` and rename it to `path`; `new` raises FileExistsError for a file
    there. The folder is not flushed."""
    with open(scratch, "rb") as file:
        flush(file.fileno())
    try:
        if new:
            os.link(scratch, path)
            os.unlink(scratch)
            return
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
    os.rename(scratch, path)


def write_stream(path: Path, chunks: Iterable[Bytes], new: bool = False) -> tuple[int, str]:
    """Write `chunks` to `path` whole or not at all; the size and SHA-256. `new` raises FileExistsError
    if the file exists. The folder is not flushed."""
    digest, size = hashlib.sha256(), 0
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = scratch_for(path)
    try:
        with open(scratch, "xb") as file:
            for chunk in chunks:
                file.write(chunk)
                digest.update(chunk)
                size += len(chunk)
        settle(scratch, path, new)
    except BaseException:
        scratch.unlink(missing_ok=True)  # a full disk gets its room back
        raise
    return size, digest.hexdigest()


def sha256_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below `folder`, 0 if it is not there."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def check_space(folder: Path, needed: int) -> None:
    """Raise StorageError when `folder`'s disk cannot hold `needed` more bytes."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:  # a file system that does not tell: then writing will
        return
    if free < needed:
        remedy = "free or enlarge the disk, or choose another --output"
        raise StorageError(f"{folder}: {free} bytes free, the run needs about {needed} bytes: {remedy}")


def pieces(data: bytes | Path) -> Iterator[bytes]:
    """Of bytes, all at once; of a file, a chunk at a time."""
    if not isinstance(data, Path):
        yield data
        return
    with open(data, "rb") as file:
        while chunk := file.read(CHUNK):
            yield chunk


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder of this block. Raises as `make_scratch`."""
    folder = make_scratch()
    try:
        yield folder
    finally:
        remove_scratch(folder)


def make_scratch() -> Path:
    """A temporary folder, for `remove_scratch`. Raises CapabilityError where there can be none."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="blr-"))
    except OSError as error:
        raise CapabilityError(f"no folder for temporary files ({error}); set TMPDIR to one") from None
    _made.add(folder)
    return folder


def remove_scratch(*folders: Path) -> None:
    """Remove these folders, or all that are left."""
    for folder in folders or tuple(_made):
        shutil.rmtree(folder, ignore_errors=True)
        _made.discard(folder)
