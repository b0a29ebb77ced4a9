"""Products of one token a sequence with weights in few bits on a CPU, by torch's operator for int4.

It reads codes of 4 bits in an order of its own, in which a weight is held a second time; uniform 3 and
2 bits become such codes, too. It computes in bfloat16, a relative error of .0024 (rounding to int4
costs .1). So it is taken in generation alone, where every sequence has one token; whole texts are
computed as they were. Small weights of float32 models are held plain and multiplied in float32.
"""

import sys
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from blr.kernels.common.mode import kernels_mode
from blr.kernels.common.watching import is_unwatched
from blr.kernels.decode.quantized.formats import grid_of

MOST = 64  # sequences: twice as fast as dense weights in float32 still
SMALL = 1 << 16  # weights up to which a product in float32 takes no longer for one sequence
LARGEST = 1 << 15  # outputs of a float32 layer: a head's logits are not to be rounded
ROWS, LEAST_ROWS = 64, 16  # that the operator keeps together, if there are so many; at least
MIDDLE = 8  # the code of its zero
AT_ONCE = 1 << 22  # weights whose codes are made together
FASTEST = ("AVX2", "AVX512")  # where the operator is no plain loop


class CpuWeight(NamedTuple):
    """A weight [rows, columns] as the operator reads it.

    codes: [rows', columns'/2], both padded. scales: [groups, rows', 2], scale and zero, bfloat16.
    """

    codes: Tensor
    scales: Tensor
    group: int
    rows: int

    @property
    def width(self) -> int:
        """Columns, padded to whole groups."""
        return 2 * self.codes.shape[1]


@cache
def has_operator() -> bool:
    """Whether torch has the operator, with instructions of this CPU."""
    known = hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu") and sys.platform != "win32"
    return known and torch.backends.cpu.get_cpu_capability() in FASTEST


def takes_input(x: Tensor, rows: int) -> bool:
    """Whether x [sequences, 1, K] is multiplied so with a weight of `rows`: nobody looks on, and
    BLR_KERNELS is not 'torch'."""
    few = x.dim() == 3 and x.shape[1] == 1 and 0 < x.shape[0] <= MOST and x.device.type == "cpu"
    if not few or not (x.dtype == torch.bfloat16 or (x.dtype == torch.float32 and rows < LARGEST)):
        return False
    return is_unwatched(x) and has_operator() and kernels_mode() != "torch"


def takes_format(bits: int, curved: bool) -> bool:
    """Whether levels of a format are codes of 4 bits."""
    return bits <= 4 and not grid_of(bits, curved).curve


def cpu_weight(levels: Iterable[Tensor], scale: Tensor, bits: int, group: int) -> CpuWeight:
    """What the operator reads of a weight.

    Args:
        levels: int8, some rows [any, columns] at a time, `ROWS` or a multiple but for the last; columns
            are whole groups. scale: [rows, groups]. bits, group: of a format that is taken.
    """
    codes = [_codes(some) for some in levels]
    rows = pad(scale, (0, 0, 0, -len(scale) % LEAST_ROWS)).bfloat16()
    scales = torch.stack((rows, rows * grid_of(bits, False).shift), -1).transpose(0, 1).contiguous()
    return CpuWeight(torch.cat(codes), scales, group, len(scale))


def _codes(levels: Tensor) -> Tensor:
    padded = pad(levels.int() + MIDDLE, (0, 0, 0, -len(levels) % LEAST_ROWS))
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(padded, 1)


def multiply(x: Tensor, weight: CpuWeight | Tensor) -> Tensor:
    """[n, rows] of x [n, columns], in bfloat16 or in the dtype of a plain weight [rows, columns]."""
    if isinstance(weight, Tensor):
        return linear(x.to(weight.dtype), weight)
    if missing := weight.width - x.shape[1]:
        x = pad(x, (0, missing))
    codes, scales, group, rows = weight
    y = torch.ops.aten._weight_int4pack_mm_for_cpu.default(x.bfloat16(), codes, group, scales)
    return y if y.shape[1] == rows else y[:, :rows]
