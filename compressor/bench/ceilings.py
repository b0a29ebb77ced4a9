"""What this GPU reaches: copy bandwidth and matrix throughput, and the floors that follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from blr.compressor.bench.precision import Precision, computing_in
from blr.compressor.bench.timing import CudaSampler, Rotation, spread
from blr.compressor.planning.roofline import Kernel

COPIED = 1 << 30  # bytes of the buffer that is copied
SIDES = (4096, 8192)  # of the square matrices that are multiplied: the faster counts
REPEATS = 7


@dataclass(frozen=True)
class Ceilings:
    """Terabytes read and written a second; teraflops by name of precision."""

    copy_tbps: float
    tflops: dict[str, float]

    def floor_ms(self, kernels: Iterable[Kernel], precision: Precision) -> float:
        """The roofline in milliseconds of kernels that run one after the other, launches excluded."""
        rate, element = self.tflops[precision.name], precision.dtype.itemsize
        moved = ((k.moved * element / self.copy_tbps, 2 * k.products / rate) for k in kernels)
        return sum(max(times) for times in moved) * 1e-9


def measure_ceilings(device: torch.device, precisions: Iterable[Precision]) -> Ceilings:
    """Both ceilings of a CUDA device, medians of some repeats on random data."""
    return Ceilings(_copy_tbps(device), {p.name: _tflops(device, p) for p in precisions})


def _copy_tbps(device: torch.device) -> float:
    source = torch.randn(COPIED // 4, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED / _median(lambda: target.copy_(source), target) * 1e-9


def _tflops(device: torch.device, precision: Precision) -> float:
    return max(_product_tflops(device, precision, side) for side in SIDES)


def _product_tflops(device: torch.device, precision: Precision, side: int) -> float:
    left, right = (torch.randn(side, side, device=device).to(precision.dtype) for _ in range(2))
    with computing_in(precision):
        return 2 * side**3 / _median(lambda: left @ right, torch.empty_like(left)) * 1e-9


def _median(call: Callable[[], Tensor], flush: Tensor) -> float:
    """Milliseconds; `flush` is overwritten before each repeat."""
    sampler = CudaSampler(call, Rotation((), 0), flush)
    return spread([sampler.sample() for _ in range(REPEATS)]).ms
