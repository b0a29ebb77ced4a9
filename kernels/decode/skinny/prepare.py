"""Inputs as skinny products take them: normed, in half precision, in the order of their weights' fields.

V of ``Q + U V`` is among the programs that do so: the correction costs no launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blr.kernels.decode.gemv.launch import launch_options, power_of_two
from blr.kernels.decode.gemv.triton import input_chunk, row_scale

WIDEST = 2048  # inputs that a program writes
LONGEST = 4096  # columns of a row of first factors that a program reads at once


@triton.jit
def source_of(place, K, GROUP: tl.constexpr, LOW: tl.constexpr):
    """The column that is at a place of a block of K columns, or K. LOW: bits of the lowest plane, 16 of
    plain weights. Half h of word j of that plane (i = 2 j + h of H halves) has fields s = 0 …: place
    s·H + i of a group."""
    if LOW == 16:
        return place
    else:
        HALVES: tl.constexpr = GROUP * LOW // 16
        inside = place % GROUP
        half = inside % HALVES
        word = ((half % 2) * (16 // LOW) + inside // HALVES) * (HALVES // 2) + half // 2
        return place - inside + word


@triton.jit
def prepare_kernel(
    x, x_token, gain, y, y_token, v, v_row, z, z_token, K, padded, width, eps, parts, ready, tokens,
    GROUP: tl.constexpr, LOW: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NORM: tl.constexpr,
    FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs up to `ready` write a part of a token's row each; the others have a row of v and a token.

    K, padded: columns of a block as they come and with what fills its last group. width: of a token.
    """
    if PDL:
        gdc_launch_dependents()
    program = tl.program_id(0)
    lane = tl.arange(0, BK)
    if program < ready:
        if PDL:
            gdc_wait()
        x += program // parts * x_token
        place = program % parts * BK + lane
        column = source_of(place % padded, K, GROUP, LOW)
        at = place // padded * K + column
        ok = (column < K) & (at < width)
        value = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
        if NORM:
            value *= row_scale(x, width, eps)
            value *= tl.load(gain + at, mask=ok, other=0.0).to(tl.float32)
        to = y + program // parts * y_token + place
        tl.store(to, value.to(y.dtype.element_ty), mask=place < (width // K) * padded)
    elif FIRST:
        row, token = (program - ready) // tokens, (program - ready) % tokens
        v += row.to(tl.int64) * v_row
        x += token * x_token
        wide = tl.arange(0, BV)
        chunk = tl.load(v + wide, mask=wide < width, other=0.0)
        if PDL:
            gdc_wait()
        sums = tl.zeros([BV], tl.float32)
        square = sums
        for start in range(0, width, BV):
            cols = start + wide
            following = tl.load(v + cols + BV, mask=cols + BV < width, other=0.0)
            value = input_chunk(x, cols, width)
            if NORM:
                square += value * value
                value *= input_chunk(gain, cols, width)
            sums += chunk.to(tl.float32) * value
            chunk = following
        found = tl.sum(sums, 0)
        if NORM:
            found *= tl.rsqrt(tl.sum(square, 0) / width + eps)
        tl.store(z + token * z_token + row, found)


def prepare(
    x: Tensor,
    out: Tensor,
    K: int,
    *,
    low: int = 16,
    group: int = 128,
    gain: Tensor | None = None,
    eps: float = 0.0,
    v: Tensor | None = None,
    z: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Norm, round and order inputs, and multiply the first factors of corrections, by one kernel.

    Args:
        x: [n, B·K]. out: [n, B·K'], K' being K padded to whole groups, in half precision.
        low, group: of the packed weights that are to come; low 16: plain ones, K' = K.
        gain: [B·K] of an RMS norm. v: [r, B·K] with columns of stride 1, into z [n, r] in float32.
    """
    tokens, width = x.shape
    blocks = width // K
    padded = out.shape[1] // blocks
    BK = min(power_of_two(out.shape[1]), WIDEST)
    parts = -(-out.shape[1] // BK)
    options = launch_options(pdl)
    rows = out if v is None else v
    sums = x if z is None else z
    prepare_kernel[(tokens * (parts + (0 if v is None else len(v))),)](
        *(x, x.stride(0), x if gain is None else gain, out, out.stride(0)),
        *(rows, rows.stride(0), sums, sums.stride(0)),
        *(K, padded, width, eps, parts, tokens * parts, tokens),
        GROUP=group,
        LOW=low,
        BK=BK,
        BV=min(power_of_two(width), LONGEST),
        NORM=gain is not None,
        FIRST=v is not None,
        num_warps=8,
        **options,
    )


def prepared(x: Tensor, K: int, low: int, group: int, dtype: torch.dtype) -> Tensor:
    """An empty `out` for `prepare`."""
    padded = K if low == 16 else -(-K // group) * group
    return torch.empty(len(x), x.shape[1] // K * padded, dtype=dtype, device=x.device)
