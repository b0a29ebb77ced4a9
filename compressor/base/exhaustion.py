"""Errors of the machine and its file systems as errors of ours: what it lacks, whatever a library calls
that, whose fault it is and what to do about it."""

import errno
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from blr.compressor.base.errors import BlrError, CapabilityError, InputError, OutputError, StorageError
from blr.compressor.base.quoting import first_line

# How libraries say so: CPython's threads, torch's allocators, C++, the dynamic loader, Rust
_SIGNS = re.compile(
    r"can't start new thread|out[ _]of[ _]memory|can(no|')t allocate memory|not enough memory"
    r"|std::bad_alloc|failed to map segment|cannot create (thread|execution plan)|unable to mmap"
    r"|pthread_create|memory allocation of \d+ bytes failed",
    re.IGNORECASE,
)
_GPU_FULL = re.compile(
    r"Tried to allocate ([\d.]+ \w+)\. GPU (\d+) has a total capacity of ([\d.]+ \w+) of which "
    r"([\d.]+ \w+) is free"
)
OUT_OF_MEMORY = "OutOfMemoryError"  # of torch, of a GPU's
PANIC = "PanicException"  # of Rust libraries: no subclass of Exception, so that nobody hides a bug
AGAIN = "run the same command again"
OTHERS = "another program changed the output or its partial folder, run the same command again"
ROOTED = "a mount point or in use, which no finished folder can be renamed to; choose another --output"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
UNFIT = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP)  # no folder can have that name
TAKEN = (errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.EISDIR)  # others moved or made files
UNMOVABLE = (errno.EBUSY, errno.EXDEV, errno.ETXTBSY)
TRANSIENT = (errno.EINTR, errno.EAGAIN, errno.ETIMEDOUT, errno.EDEADLK, errno.ENOLCK, errno.ENOBUFS)
SHORTAGES = {
    errno.EMFILE: "allow more open files (ulimit -n)",
    errno.ENFILE: "close other programs, the machine has no more files to open",
    errno.ENOMEM: "free memory or take a larger machine",
}
# Number -> the kind of error and what to do, for whatever is written
_WRITING: dict[int, tuple[type[BlrError], str]] = {
    **dict.fromkeys(FULL, (StorageError, "")),
    **dict.fromkeys(DENIED, (OutputError, "choose an output folder you can write to")),
    **dict.fromkeys(UNFIT, (OutputError, "choose another --output")),
    **dict.fromkeys(TAKEN, (OutputError, OTHERS)),
    **dict.fromkeys(UNMOVABLE, (OutputError, ROOTED)),
    **dict.fromkeys(TRANSIENT, (StorageError, f"the file system does not keep up: {AGAIN}")),
    **{code: (CapabilityError, f"{remedy}, then {AGAIN}") for code, remedy in SHORTAGES.items()},
}
_OTHER = (StorageError, f"check the disk, then {AGAIN}")


def raise_exhausted(error: BaseException) -> None:
    """Raise an `error` of blr again, and CapabilityError for one caused by want of memory or threads."""
    if isinstance(error, BlrError):
        raise error
    if said := exhausted(error):
        raise CapabilityError(_told(said)) from error


def _told(said: str) -> str:
    if not said.startswith("CUDA out of memory"):
        remedy = "raise the limit (ulimit -v, -u, the container's), free some, or take a larger machine"
        return f"this machine has too little memory or too few threads ({said}); {remedy}"
    found = _GPU_FULL.search(said)
    asked, gpu, size, free = found.groups() if found else ("more", "0", "its memory", "too little")
    return (
        f"the GPU has too little memory: {asked} were needed, {free} of {size} are free on GPU {gpu} of "
        "those that this process sees; stop what else runs there (nvidia-smi), do fewer things at once "
        "(--jobs), or take another (CUDA_VISIBLE_DEVICES) or --device cpu"
    )


def exhausted(error: BaseException) -> str | None:
    """What ran out, in the words of the library, or None if `error` is about something else."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        text = first_line(found, 200)
        full = isinstance(found, MemoryError) or type(found).__name__ == OUT_OF_MEMORY
        if full or getattr(found, "errno", None) == errno.ENOMEM:
            return text
        library = isinstance(found, RuntimeError | OSError | ImportError) or is_panic(found)
        if library and _SIGNS.search(str(found)):
            return text
        found = found.__cause__ or found.__context__
    return None


def is_panic(error: BaseException) -> bool:
    """Whether a Rust library (tokenizers, safetensors) gave up in the middle of a call."""
    return type(error).__name__ == PANIC


@contextmanager
def storage_errors(
    folder: Path,
    needed: int | None = None,
    own: Path | None = None,
    resumes: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Turn errors of the system about files under `own` (None: `folder`) into errors with a remedy.
    `needed` are the bytes of the run, if known; `resumes` says whether the same command would go on."""
    try:
        yield
    except BlrError:
        raise
    except Exception as error:
        code = _number(error, own or folder)
        if code is None:
            raise
        kind, remedy = _WRITING.get(code, _OTHER)
        if code in FULL:
            room = f"about {needed} bytes there" if needed else "more room"
            remedy = f"the run needs {room}: free or enlarge the disk, then {AGAIN}"
        goes_on = ", it resumes" if resumes() and remedy.endswith(AGAIN) else ""
        raise kind(f"{folder}: {_said(code)}; {remedy}{goes_on}") from error


def shortage(error: OSError, place: object) -> CapabilityError | None:
    """The error for a machine that lacks what `error` asked for, None if it says something else."""
    if error.errno not in SHORTAGES:
        return None
    return CapabilityError(f"{place}: {_said(error.errno)}; {SHORTAGES[error.errno]}")


def unforeseen(error: OSError) -> BlrError | None:
    """The error for one of the system's that reached the top; None for one from elsewhere."""
    if error.errno is None:
        return None
    named = isinstance(error.filename, str | bytes)
    place = os.fsdecode(error.filename) if named else "the operating system"
    if found := shortage(error, place):
        return found
    if error.errno in FULL:
        return StorageError(f"{place}: {_said(error.errno)}; free or enlarge the disk, then run again")
    if error.filename is None or error.errno == errno.EIO:
        return StorageError(f"{place}: {_said(error.errno)}; check disk and machine, then run again")
    remedy = "expected a file that can be read; see to its permissions"
    return InputError(f"{place}: {_said(error.errno)}; {remedy}")


def _number(error: Exception, own: Path) -> int | None:
    """The system's number of an error about `own`, also of one that safetensors reports in text."""
    if type(error).__name__ == "SafetensorError":
        told = re.search(r"\(os error (\d+)\)", str(error))
        return int(told[1]) if told else None
    if not isinstance(error, OSError):
        return None
    if not isinstance(error.filename, str | bytes):  # of a call on a file that is open
        return None if isinstance(error, BrokenPipeError) else error.errno
    place, own = os.path.abspath(os.fsdecode(error.filename)), Path(os.path.abspath(own))
    return error.errno if place.startswith(str(own)) or place == str(own.parent) else None


def _said(code: int) -> str:
    return os.strerror(code).lower()


def is_missing(package: str) -> bool:
    """Whether `package` cannot be imported; nothing is."""
    if package in sys.modules:
        return sys.modules[package] is None
    return find_spec(package) is None


def check_packages(what: str, *packages: str, extra: str) -> None:
    """Raise CapabilityError where `packages` that `what` needs are missing; `extra` installs them."""
    if missing := [package for package in packages if is_missing(package)]:
        found = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
        raise CapabilityError(f"{what}: {found}; pip install 'blr-compress[{extra}]'")
