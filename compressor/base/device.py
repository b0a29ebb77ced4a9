"""Devices to compute on: their names are checked without torch."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from blr.compressor.base.errors import CapabilityError, UsageError
from blr.compressor.base.quoting import first_line

if TYPE_CHECKING:
    import torch

_KNOWN = re.compile(r"auto|(cpu|cuda|mps|xpu)(:\d{1,3})?", re.ASCII)


def check_device(name: str) -> str:
    """`name` if a device that computes can be called so. Raises UsageError: `meta`, say, holds no
    numbers."""
    if not _KNOWN.fullmatch(name):
        raise UsageError(f"device {name!r}: expected auto, cpu, cuda or cuda:N")
    return name


def pick_device(name: str) -> torch.device:
    """`auto` takes the GPU if there is one. A GPU that is named becomes the current one: Triton launches
    there, wherever the tensors are.

    Raises UsageError for a name that is no device's, CapabilityError for a device that is absent.
    """
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


def float_dtype(name: str) -> torch.dtype:
    """ "bfloat16" -> torch.bfloat16. Raises UsageError for what kernels do not compute in."""
    import torch

    if name not in ("float32", "float16", "bfloat16"):
        raise UsageError(f"dtype {name!r}: expected float32, float16 or bfloat16")
    return getattr(torch, name)


def working_dtype(device: torch.device) -> torch.dtype:
    """float64 where it is cheap enough to be the default: on CPU and data-center GPUs."""
    import torch

    return torch.float32 if device.type == "mps" else torch.float64
