"""Feed-forward layers of low rank without their wide middle in memory: FlashSVD's FFN, V1 and V2.

Source: "FlashSVD: Memory-Efficient Inference with Streaming for Low-Rank Models", section 3 and
algorithms 2 and 3. With ``h = x V₁`` of rank r₁ and the middle ``y = φ(h U₁ᵀ + b₁)`` of width F:

    V1    h and s = y V₂ are in memory (vendor's products before and after), y never is: a program
          owns tokens and ranks of s and goes over F, making a tile of y and multiplying it at once.
          Ranks of s beyond a tile make y again: ⌈r₂ / BLOCK_R⌉ times in all.
    V2    nothing is in memory but x and the output: a program owns few tokens, all ranks of h and s
          stay on the chip, so nothing is made twice; all factors are read once for so few tokens.

Gated layers have two first factors, ``y = φ(gate) ⊙ up``. No table picks them: chunks of tokens over
the vendor's products (`modeling/slices.py`) bound the same memory and make nothing twice.
`scripts/bench/ffn.py` says when each wins.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from blr.kernels.decode.gemv.reference import ACTIVATIONS

try:
    import triton
    import triton.language as tl

    from blr.kernels.decode.gemm.launch import dot_precision
    from blr.kernels.decode.gemv.triton import activate
except ImportError as error:
    raise ImportError("FlashSVD's kernels need triton: install it or use the reference") from error


class Factors(NamedTuple):
    """A low-rank layer: U [o, r], V [i, r], bias [o] or None."""

    U: Tensor
    V: Tensor
    bias: Tensor | None = None


def reference(
    x: Tensor, up: Factors, down: Factors, activation: str, gate: Factors | None = None
) -> Tensor:
    """[n, i] to [n, o] with everything in memory: ``down(φ(up(x)))`` or ``down(φ(gate(x)) ⊙ up(x))``.

    Args:
        activation: of `gemv.reference.ACTIVATIONS`.
    """

    def layer(f: Factors, x: Tensor) -> Tensor:
        return linear(x @ f.V, f.U, f.bias)

    act = ACTIVATIONS[activation]
    return layer(down, act(layer(up, x)) if gate is None else act(layer(gate, x)) * layer(up, x))


@triton.jit
def middle(
    h, u, bias, f, in_f, width, rank, n, in_n, k,
    BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr, BIAS: tl.constexpr,
    PRECISION: tl.constexpr
):  # fmt: skip
    """A tile [n, f] of ``h uᵀ + bias`` in float32."""
    y = tl.zeros([BLOCK_N, BLOCK_F], tl.float32)
    for start in range(0, rank, BLOCK_K):
        in_k = start + k < rank
        rows = tl.load(h + n[:, None] * rank + start + k, mask=in_n[:, None] & in_k, other=0.0)
        tile = tl.load(u + f[:, None] * rank + start + k, mask=in_f[:, None] & in_k, other=0.0)
        y = tl.dot(rows, tl.trans(tile), y, input_precision=PRECISION)
    if BIAS:
        y += tl.load(bias + f, mask=in_f, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit
def streamed_kernel(
    h, gate_h, u, gate_u, bias, gate_bias, v, s, tokens, width, rank, gate_rank, out_rank,
    BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    BIAS: tl.constexpr, GATE_BIAS: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr,
    PRECISION: tl.constexpr
):  # fmt: skip
    """s[n, r] = Σ_f φ(h uᵀ + bias)[n, f] v[f, r]; all matrices with contiguous rows."""
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    in_n, in_r = n < tokens, r < out_rank
    lane = tl.arange(0, BLOCK_F)
    k = tl.arange(0, BLOCK_K)
    sums = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    for start in range(0, width, BLOCK_F):
        f = start + lane
        in_f = f < width
        y = middle(h, u, bias, f, in_f, width, rank, n, in_n, k,
                   BLOCK_N, BLOCK_F, BLOCK_K, BIAS, PRECISION)  # fmt: skip
        if GATED:
            y *= activate(middle(gate_h, gate_u, gate_bias, f, in_f, width, gate_rank, n, in_n, k,
                                 BLOCK_N, BLOCK_F, BLOCK_K, GATE_BIAS, PRECISION), ACT)  # fmt: skip
        else:
            y = activate(y, ACT)
        tile = tl.load(v + f[:, None] * out_rank + r, mask=in_f[:, None] & in_r, other=0.0)
        sums = tl.dot(y.to(tile.dtype), tile, sums, input_precision=PRECISION)
    at = s + n[:, None] * out_rank + r
    tl.store(at, sums.to(s.dtype.element_ty), mask=in_n[:, None] & in_r)


def streamed(
    x: Tensor, up: Factors, down: Factors, activation: str, gate: Factors | None = None, **config: int
) -> Tensor:
    """V1: `reference`, with x V₁ and the down layer's ranks in memory.

    Args:
        config: BLOCK_N (tokens), BLOCK_F (of the middle), BLOCK_K (ranks of h), BLOCK_R (ranks of s).
    """
    n, (width, rank), out_rank = x.shape[0], up.U.shape, down.V.shape[1]
    h, other = x @ up.V, gate or up
    gate_h = h if gate is None else x @ gate.V
    s = torch.empty(n, out_rank, dtype=x.dtype, device=x.device)
    given: dict[str, int] = {"BLOCK_N": 64, "BLOCK_F": 64, "BLOCK_K": 64, "num_warps": 8}
    given |= {"BLOCK_R": min(max(triton.next_power_of_2(out_rank), 16), 256), "num_stages": 2} | config
    grid = (triton.cdiv(n, given["BLOCK_N"]), triton.cdiv(out_rank, given["BLOCK_R"]))
    u, gate_u, v = (t.contiguous() for t in (up.U, other.U, down.V))
    biases = (x if f.bias is None else f.bias for f in (up, other))  # absent ones are never read
    if n:
        streamed_kernel[grid](
            *(h, gate_h, u, gate_u, *biases, v, s, n, width, rank, other.U.shape[1], out_rank),
            **{"BIAS": up.bias is not None, "GATE_BIAS": other.bias is not None},
            **{"GATED": gate is not None, "ACT": activation, **given},
            PRECISION=dot_precision(),
        )
    return linear(s, down.U, down.bias)


@triton.jit
def project(
    x, v, n, in_n, k, rank, inputs,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, RANK: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """x v [n, RANK] of all ranks in the dtype of x."""
    d = tl.arange(0, BLOCK_D)
    h = tl.zeros([BLOCK_N, RANK], tl.float32)
    for start in range(0, inputs, BLOCK_D):
        in_d = start + d < inputs
        rows = tl.load(x + n[:, None] * inputs + start + d, mask=in_n[:, None] & in_d, other=0.0)
        at = v + (start + d)[:, None] * rank + k
        tile = tl.load(at, mask=in_d[:, None] & (k < rank), other=0.0)
        h = tl.dot(rows, tile, h, input_precision=PRECISION)
    return h.to(x.dtype.element_ty)


@triton.jit
def of_ranks(h, u, bias, f, in_f, k, rank, BIAS: tl.constexpr, PRECISION: tl.constexpr):
    """``h uᵀ + bias`` [n, f] in float32 of all ranks."""
    tile = tl.load(u + f[:, None] * rank + k, mask=in_f[:, None] & (k < rank), other=0.0)
    y = tl.dot(h, tl.trans(tile), input_precision=PRECISION)
    if BIAS:
        y += tl.load(bias + f, mask=in_f, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit
def fused_kernel(
    x, v, u, bias, gate_v, gate_u, gate_bias, down_v, down_u, down_bias, out,
    tokens, inputs, width, outputs, rank, gate_rank, out_rank,
    BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr, RANK: tl.constexpr,
    OUT_RANK: tl.constexpr, BIAS: tl.constexpr, GATE_BIAS: tl.constexpr, DOWN_BIAS: tl.constexpr,
    GATED: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """The whole layer of BLOCK_N tokens; RANK and OUT_RANK cover all ranks."""
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    in_n = n < tokens
    k = tl.arange(0, RANK)
    r = tl.arange(0, OUT_RANK)
    lane = tl.arange(0, BLOCK_F)
    h = project(x, v, n, in_n, k, rank, inputs, BLOCK_N, BLOCK_D, RANK, PRECISION)
    gate_h = h
    if GATED:
        gate_h = project(x, gate_v, n, in_n, k, gate_rank, inputs, BLOCK_N, BLOCK_D, RANK, PRECISION)
    sums = tl.zeros([BLOCK_N, OUT_RANK], tl.float32)
    for start in range(0, width, BLOCK_F):
        f = start + lane
        in_f = f < width
        y = of_ranks(h, u, bias, f, in_f, k, rank, BIAS, PRECISION)
        if GATED:
            g = of_ranks(gate_h, gate_u, gate_bias, f, in_f, k, gate_rank, GATE_BIAS, PRECISION)
            y *= activate(g, ACT)
        else:
            y = activate(y, ACT)
        at = down_v + f[:, None] * out_rank + r
        tile = tl.load(at, mask=in_f[:, None] & (r < out_rank), other=0.0)
        sums = tl.dot(y.to(tile.dtype), tile, sums, input_precision=PRECISION)
    s = sums.to(out.dtype.element_ty)
    for start in range(0, outputs, BLOCK_F):
        o = start + lane
        in_o = o < outputs
        y = of_ranks(s, down_u, down_bias, o, in_o, r, out_rank, DOWN_BIAS, PRECISION)
        tl.store(out + n[:, None] * outputs + o, y.to(out.dtype.element_ty), mask=in_n[:, None] & in_o)


def fused(
    x: Tensor, up: Factors, down: Factors, activation: str, gate: Factors | None = None, **config: int
) -> Tensor:
    """V2: `reference` as one kernel, with nothing in memory beside x and the result.

    Args:
        config: BLOCK_N (tokens), BLOCK_F (of the middle and the outputs), BLOCK_D (of the inputs).
    """
    (n, inputs), (width, rank), (outputs, out_rank) = x.shape, up.U.shape, down.U.shape
    other = gate or up
    out = torch.empty(n, outputs, dtype=x.dtype, device=x.device)
    ranks = max(rank, other.U.shape[1])
    sizes = {"RANK": max(triton.next_power_of_2(ranks), 16)}
    sizes |= {"OUT_RANK": max(triton.next_power_of_2(out_rank), 16)}
    tokens = 64 if max(sizes.values()) <= 256 else 32  # what registers hold of all ranks
    given: dict[str, int] = {"BLOCK_N": tokens, "BLOCK_F": 32, "BLOCK_D": 32, "num_warps": 8}
    given |= {"num_stages": 1} | config
    tensors: list[Any] = []
    for f in (up, other, down):
        tensors += [f.V.contiguous(), f.U.contiguous(), x if f.bias is None else f.bias]
    flags = {"BIAS": up.bias is not None, "GATE_BIAS": other.bias is not None}
    flags |= {"DOWN_BIAS": down.bias is not None, "GATED": gate is not None}
    if n:
        fused_kernel[(triton.cdiv(n, given["BLOCK_N"]),)](
            *(x.contiguous(), *tensors, out, n, inputs, width, outputs),
            *(rank, other.U.shape[1], out_rank),
            **{**sizes, **flags, "ACT": activation, **given},
            PRECISION=dot_precision(),
        )
    return out


FORMS = {"v1": streamed, "v2": fused}
