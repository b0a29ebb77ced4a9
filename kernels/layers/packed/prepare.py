"""What the fused product (`fused.py`) takes beside weights: inputs in the order of the weights' fields,
V x of a correction, and counters at zero, by one launch."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from blr.kernels.common.launching import launch
from blr.kernels.decode.quantized.formats import PLANES

PART = 1024  # columns that a program of `prepare_kernel` puts in order
STEP = 128  # columns of a step of V x
PROGRAMS = 528  # of V x at most, in MOST parts
MOST = 16


@triton.jit
def source_of(place, GROUP: tl.constexpr, WORDS: tl.constexpr, COLUMNS: tl.constexpr):
    """Give the column of x for each `place` in the order that `prepare` makes."""
    step, inside = place // COLUMNS, place % COLUMNS
    word = inside % 16
    if WORDS >= 16:
        group = step // (WORDS // 16)
        word += step % (WORDS // 16) * 16
    else:
        group = step * (16 // WORDS) + word // WORDS
        word = word % WORDS
    return group * GROUP + inside // 16 * WORDS + word


@triton.jit
def prepare_kernel(
    x, x_token, out, out_token, v, v_row, z, counter, tokens, K, ranks, width, parts, ordering, counters,
    GROUP: tl.constexpr, WORDS: tl.constexpr, COLUMNS: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
    RANKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Three kinds of programs: `ordering` ones put BC columns of a token into another order; those of
    V x have 16 tokens and every `parts`-th step of BK columns; the last one clears counters."""
    if PDL:
        gdc_launch_dependents()
    program = tl.program_id(0)
    across = tl.cdiv(width, BC)
    products = tl.cdiv(tokens, 16) * parts
    if program < ordering:
        place = program % across * BC + tl.arange(0, BC)
        column = source_of(place, GROUP, WORDS, COLUMNS)
        token = (program // across).to(tl.int64)
        found = tl.load(x + token * x_token + column, mask=column < K, other=0.0)
        tl.store(out + token * out_token + place, found, mask=place < width)
    elif program < ordering + products:
        part = (program - ordering) % parts
        token = (program - ordering) // parts * 16 + tl.arange(0, 16)
        rank = tl.arange(0, RANKS)
        lane = tl.arange(0, BK)
        there, held = (token < tokens)[:, None], (rank < ranks)[None, :]
        at_x = x + token[:, None].to(tl.int64) * x_token + lane[None, :]
        at_v = v + rank[None, :].to(tl.int64) * v_row + lane[:, None]
        sums = tl.zeros([16, RANKS], tl.float32)
        for start in range(part * BK, K, parts * BK):
            a = tl.load(at_x + start, mask=there & (start + lane < K)[None, :], other=0.0)
            b = tl.load(at_v + start, mask=held & (start + lane < K)[:, None], other=0.0)
            sums = tl.dot(a, b, sums)
        at = z + (part * tokens + token[:, None]) * ranks + rank[None, :]
        tl.store(at, sums, mask=there & held)
    else:
        for start in range(0, counters, 1024):
            at = start + tl.arange(0, 1024)
            tl.store(counter + at, tl.zeros([1024], tl.int32), mask=at < counters)


class Prepared(NamedTuple):
    """What a product needs beside weights.

    x: [n, columns] in the order of the weights' fields. z: [parts, n, ranks] float32, V x in parts, or
    None. counter: int32 zeros or None. launched: whether a kernel made any of these.
    """

    x: Tensor
    z: Tensor | None
    counter: Tensor | None
    launched: bool


def prepare(
    x: Tensor, bits: int, group: int, v: Tensor | None = None, counters: int = 0, pdl: bool = False,
    ordered: bool = True,
) -> Prepared:  # fmt: skip
    """x [n, K] as `fused.product_kernel` meets its columns, padded to whole steps, and with it V x and
    counters, by one launch at most.

    Args:
        v: [ranks, K] of a correction, in the dtype of x, rows of stride 1, at most 64 of them.
        pdl: whether the kernel after it may begin while this one runs, and waits for it by itself.
        ordered: False leaves x as it is.
    """
    low = PLANES[bits][0]
    words, columns = group * low // 32, 16 * 32 // low
    (tokens, K), ranks = x.shape, 0 if v is None else len(v)
    steps = -(-(-(-K // group) * words) // 16)
    same = words == 16 and K % group == 0 and x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0
    same = same or not ordered
    if same and not ranks and not counters:
        return Prepared(x, None, None, False)
    out = x if same else torch.empty(tokens, steps * columns, dtype=x.dtype, device=x.device)
    blocks = -(-tokens // 16)
    parts = min(max(PROGRAMS // blocks, 1), -(-K // (4 * STEP)), MOST)
    z = torch.empty(parts, tokens, ranks, dtype=torch.float32, device=x.device) if ranks else None
    counter = torch.empty(counters, dtype=torch.int32, device=x.device) if counters else None
    ordering = 0 if same else tokens * -(-steps * columns // PART)
    launch(
        prepare_kernel,
        (ordering + (blocks * parts if ranks else 0) + (1 if counters else 0),),
        (
            *(x, x.stride(0), out, out.stride(0)),
            *(x if v is None else v, 0 if v is None else v.stride(0)),
            *(x if z is None else z, x if counter is None else counter, tokens, K, ranks),
            *(steps * columns, parts if ranks else 0, ordering, counters),
        ),
        {
            **{"GROUP": group, "WORDS": words, "COLUMNS": columns, "BC": PART, "BK": STEP},
            **{"RANKS": whole_ranks(max(ranks, 1)), "PDL": pdl},
        },
        num_warps=4,
    )
    return Prepared(out, z, counter, True)


def whole_ranks(ranks: int) -> int:
    """`ranks` as a power of two that the tensor cores take, or 0."""
    return max(1 << (ranks - 1).bit_length(), 16) if ranks else 0
