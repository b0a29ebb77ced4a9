"""Tells what the machine lacks from what a checkpoint has wrong, whatever a library calls it."""

from __future__ import annotations

import errno
import re

from blr.compressor.base.errors import BlrError, CapabilityError
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


def raise_exhausted(error: BaseException) -> None:
    """Raise CapabilityError if `error`, or what caused it, is want of memory or threads."""
    if isinstance(error, BlrError):
        return
    said = exhausted(error)
    if said:
        raise CapabilityError(_told(said)) from error


def _told(said: str) -> str:
    if not said.startswith("CUDA out of memory"):
        return (
            f"this machine has too little memory or too few threads ({said}); raise the limit "
            "(ulimit -v, -u, the container's), free some, or take a larger machine"
        )
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
