"""Devices to compute on and dtypes to compute in: names are checked, and the GPU of this machine is
found, without torch, which takes seconds to import."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from blr.compressor.base.errors import CapabilityError, UsageError
from blr.compressor.base.quoting import first_line

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# What weights are stored and computed in, by torch's names
Dtype = Literal["bfloat16", "float16", "float32"]
DTYPES: tuple[str, ...] = get_args(Dtype)
Computed = Literal["bfloat16", "float16", "float32", "float64"]  # what a model can be loaded in
COMPUTED: tuple[str, ...] = get_args(Computed)
CODES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # safetensors' names
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_KNOWN = re.compile(r"auto|(cpu|cuda|mps|xpu)(:\d{1,3})?", re.ASCII)
LIBRARY = "libnvidia-ml.so.1"
LONGEST = 96  # bytes of a name


def check_device(name: str) -> str:
    """`name` if it is a device that computes, unlike `meta`. Raises UsageError."""
    if not _KNOWN.fullmatch(name):
        raise UsageError(f"device {name!r}: expected auto, cpu, cuda or cuda:N")
    return name


def pick_device(name: str) -> torch.device:
    """The device called `name`; `auto` takes a GPU if there is one. A named GPU becomes current, since
    Triton launches there. Raises UsageError for a wrong name, CapabilityError for an absent device."""
    import torch

    check_device(name)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)
    except (RuntimeError, AssertionError) as error:
        reason = first_line(error)
        raise CapabilityError(f"device {name!r} cannot be used ({reason}); try --device cpu") from None
    return device


def device_name(device: torch.device) -> str:
    """What the driver calls a GPU."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


def working_dtype(device: torch.device) -> torch.dtype:
    """float64 where it is cheap enough to be the default: on CPU and data-center GPUs."""
    import torch

    return torch.float32 if device.type == "mps" else torch.float64


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
    handle, memory = ctypes.c_void_p(), _Memory()
    name = ctypes.create_string_buffer(LONGEST)
    try:
        if first.isdecimal():
            failed = driver.nvmlDeviceGetHandleByIndex_v2(int(first), ctypes.byref(handle))
        else:
            failed = driver.nvmlDeviceGetHandleByUUID(first.encode(), ctypes.byref(handle))
        failed = failed or driver.nvmlDeviceGetName(handle, name, LONGEST)
        failed = failed or driver.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        return None if failed else Card(name.value.decode(errors="replace"), memory.total)
    finally:
        driver.nvmlShutdown()


@contextmanager
def tensor_cores(device: torch.device) -> Iterator[None]:
    """Compute float32 products in TF32 on a GPU: exact enough for gradients, not to solve."""
    import torch

    before = torch.get_float32_matmul_precision()
    try:
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high")
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def moved(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """`tensor` on `device` in a wider dtype, converted there so that fewer bytes travel."""
    return tensor.to(device).to(dtype)
