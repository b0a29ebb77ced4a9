"""In which precision numbers are brought to a device and multiplied there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def tensor_cores(device: torch.device) -> Iterator[None]:
    """On a GPU products of float32 meanwhile take their factors as TF32, several times as fast: exact
    enough for gradients, not for systems that are solved."""
    before = torch.get_float32_matmul_precision()
    try:
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high")
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def moved(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """`tensor` on `device` in a dtype as wide as its own or wider, converted there: asked for both at
    once, torch converts on the CPU, and twice the bytes travel."""
    return tensor.to(device).to(dtype)
