"""The GPU of this machine, as its driver tells it: torch takes seconds to import."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass

LIBRARY = "libnvidia-ml.so.1"
LONGEST = 96  # bytes of a name


@dataclass(frozen=True)
class Card:
    """A GPU by the driver's `name`, as "NVIDIA A100-SXM4-80GB", and the bytes of its `memory`."""

    name: str
    memory: int


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def installed_card() -> Card | None:
    """The first GPU that CUDA_VISIBLE_DEVICES leaves; None where there is none, or no driver."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0].strip()
    if first in ("", "-1"):
        return None
    try:
        driver = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    if driver.nvmlInit_v2():
        return None
    try:
        return _described(driver, first)
    finally:
        driver.nvmlShutdown()


def _described(driver: ctypes.CDLL, which: str) -> Card | None:
    """The GPU of a number or of a UUID."""
    handle, memory = ctypes.c_void_p(), _Memory()
    name = ctypes.create_string_buffer(LONGEST)
    find: Callable[..., int] = driver.nvmlDeviceGetHandleByUUID
    known: int | bytes = which.encode()
    if which.isdecimal():
        find, known = driver.nvmlDeviceGetHandleByIndex_v2, int(which)
    failed = (
        find(known, ctypes.byref(handle))
        or driver.nvmlDeviceGetName(handle, name, LONGEST)
        or driver.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    )
    return None if failed else Card(name.value.decode(errors="replace"), memory.total)
