"""One launch for all layers of a token: its memory and arguments."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from blr.kernels.decode.token.tables import KINDS, TILE, Step, Stores, make_table

PATIENCE = 4096  # thousands of looks at a counter, some seconds


class Shape(NamedTuple):
    """What the kernel is compiled for. WIDE: the power of two that holds HIDDEN. D, SPLIT: width of a
    head and its programs. BIAS, NORMED: of queries and keys."""

    HIDDEN: int
    WIDE: int
    D: int
    SPLIT: int
    BIAS: bool
    NORMED: bool


@dataclass(frozen=True)
class Attention:
    """keys, values: [layers, Hkv, L, D], of any stride between layers. cos, sin: [L, D] in float32.
    bias: [layers, (Hq + 2·Hkv)·D] and gains: [layers, 2, D] of queries and keys in float32, or None."""

    keys: Tensor
    values: Tensor
    cos: Tensor
    sin: Tensor
    heads: int
    scale: float
    bias: Tensor | None = None
    gains: Tensor | None = None
    eps: float = 0.0


class Token:
    """A launch and its memory.

    x: [hidden] in float32, the residual stream before and after. gains: [norms, hidden] in float32; eps:
    of these norms. pos, start: int64, of which the first counts. sums: how many numbers steps need.
    split: programs of a head. steps: of `tables.make_table`, in order. programs: one a multiprocessor.
    Raises ValueError for weights that cannot be shared out.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        x: Tensor,
        gains: Tensor,
        attention: Attention,
        pos: Tensor,
        start: Tensor,
        eps: float,
        sums: int,
        split: int,
        programs: int,
    ) -> None:
        a, (_, kv_heads, context, width) = attention, attention.keys.shape
        self.weights = [product.w for step in steps for product in step.products]  # held
        stores = Stores(self.weights)
        zeros = partial(torch.zeros, device=x.device)
        self.sums = zeros(sums, dtype=torch.int64)
        none = zeros(1)
        self.counter, self.state = (zeros(n, dtype=torch.int32) for n in (64, 2 + programs))
        self.state[0] = PATIENCE
        copied = [describe(first, stores.rows[k]) for k, first in stores.first.items()]
        self.arguments = [
            *(*copied, *copied[:1] * (KINDS - len(copied))),
            *(make_table(steps, stores, programs, a.heads, split).to(x.device), x, self.sums),
            *(zeros(a.heads * split * (width + 2)), gains),
            *(none if t is None else t for t in (a.bias, a.gains)),
            *(a.keys, a.values, a.cos, a.sin, pos, start, self.counter, self.state),
        ]
        self.sizes = len(steps), programs, context, a.keys.stride(0) // 128, a.heads, kv_heads
        self.numbers = a.scale * math.log2(math.e), eps, a.eps
        hidden, given = x.shape[0], (a.bias is not None, a.gains is not None)
        self.shape = Shape(hidden, 1 << (hidden - 1).bit_length(), width, split, *given)

    def launch(self) -> None:
        from blr.kernels.decode.token.triton import token_kernel

        options: dict[str, object] = {"num_warps": 8, "launch_cooperative_grid": True}
        grid = (self.sizes[1],)
        token_kernel[grid](*self.arguments, *self.sizes, *self.numbers, self.shape, **options)

    def take_stall(self) -> int | None:
        """The step before which a program waited in vain; None if none did. After a stall, sets sums and
        counters back for the next launch."""
        codes = self.state[2:].tolist()
        if not any(codes):
            return None
        for tensor in (self.sums, self.counter, self.state):
            tensor.zero_()
        self.state[0] = PATIENCE
        return min(code for code in codes if code) - 1


def describe(w: Tensor, rows: int) -> object:
    """A descriptor of tiles, for so many rows twice as long as those of w from w on."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    apart, layout = w.stride(0), gl.NVMMASharedLayout(128, 16, 2)
    return TensorDescriptor(w, [rows, 2 * apart], [apart, 1], [TILE, TILE], layout)
