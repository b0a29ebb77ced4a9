"""One launch for all layers of a token: its memory and arguments."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tables import CHUNKS, KINDS, TILE, Step, Stores, make_table

PATIENCE = 4096  # thousands of looks at a counter
RING = 6


@dataclass(frozen=True)
class Attention:
    """keys, values: [layers, Hkv, L, D], of any stride between layers. cos, sin: [L, D] in float32. bias: [layers, (Hq +
    2 Hkv) D] and gains: [layers, 2, D] of queries and keys in float32, or None."""

    keys: Tensor
    values: Tensor
    cos: Tensor
    sin: Tensor
    heads: int
    scale: float
    window: int | None = None
    bias: Tensor | None = None
    gains: Tensor | None = None
    eps: float = 0.0


class Token:
    """x: [hidden] in float32, the residual stream before and after. sums, parts: numbers that steps and attention need.
    gains: [.., hidden] in float32, of the norms. pos, start: [1] int64."""

    def __init__(self, steps: Sequence[Step], x: Tensor, gains: Tensor, attention: Attention, pos: Tensor, start: Tensor, eps: float,
                 sums: int, parts: int, split: int, programs: int, fixed: bool = True):  # fmt: skip
        weights = [product.w for step in steps for product in step.products]
        stores = Stores(weights)
        a, device, heads = attention, x.device, attention.heads
        self.steps, self.programs, self.held = list(steps), programs, weights
        make = lambda *shape, dtype=torch.float32: torch.zeros(*shape, dtype=dtype, device=device)
        self.sums, self.parts = make(sums, dtype=torch.int64 if fixed else torch.float32), make(parts)
        self.counter, self.state = make(64, dtype=torch.int32), make(2 + programs, dtype=torch.int32)
        self.state[0] = PATIENCE
        self.clocks = make(1, dtype=torch.int32)
        self.table = make_table(steps, stores, programs, heads, split).to(device)
        self.copied = [describe(first, stores.rows[k]) for k, first in stores.first.items()]
        self.copied += self.copied[:1] * (KINDS - len(self.copied))
        none = make(1)
        self.tensors = (self.table, x, self.sums, self.parts, gains, none if a.bias is None else a.bias,
                        none if a.gains is None else a.gains, a.keys, a.values, a.cos, a.sin, pos, start, self.counter, self.state)  # fmt: skip
        width = a.keys.shape[3]
        self.sizes = (a.keys.shape[2], a.keys.stride(0), a.window or 1 << 30, heads, a.keys.shape[1])
        self.numbers = (a.scale * math.log2(math.e), eps, a.eps)
        hidden = x.shape[-1]
        self.constants: dict[str, Any] = dict(
            NS=RING, NX=CHUNKS // 16, HIDDEN=hidden, WIDE=1 << (hidden - 1).bit_length(), D=width, SPLIT=split, BK=32,
            BIAS=a.bias is not None, NORMED=a.gains is not None, AHEAD=True, CLOCK=False)  # fmt: skip

    def run(self, kernel, first=0, last=None, before=1, after=2, **options):
        n = len(self.steps)
        return kernel(*self.copied, *self.tensors, self.clocks, first, n if last is None else last, n, self.programs, *self.sizes,
                      before, after, *self.numbers, **{**self.constants, **options})  # fmt: skip


def describe(w: Tensor, rows: int) -> Any:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    K = w.shape[1]
    return TensorDescriptor(w, [rows, 2 * K], [K, 1], [TILE, TILE], gl.NVMMASharedLayout(128, 16, 2))
