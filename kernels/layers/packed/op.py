"""Linear layer on a weight in few bits, ``y = x Wᵀ + bias``: the operator `blr::packed_linear`.

Few tokens on Hopper: one kernel (`fused.py`). Else weights become plain numbers for the time of a
call, and again for the backward pass, which gives the gradients of x and of the bias.
"""

from functools import partial, reduce

import torch
from torch import Tensor
from torch.nn.functional import linear

from blr.kernels.common.available import kernel_device
from blr.kernels.common.inlining import called
from blr.kernels.common.registration import ContextOf, apply, autocast, register, rows
from blr.kernels.layers.packed.launch import product, takes

WHOLE = 1 << 27  # weights that are plain at once: an output head of 128256 x 4096 takes four turns


def dequantize(
    packed: Tensor, scale: Tensor, bits: int, K: int, dtype: torch.dtype, group: int, curved: bool
) -> Tensor:
    """Weights [..., R, K] in `dtype` of `packed` [..., R, bytes] and `scale` [..., R, groups]."""
    if kernel_device(packed) and packed.numel() and dtype != torch.float64:
        from blr.kernels.layers.packed.triton import dequantize as run
    else:
        from blr.kernels.decode.quantized.reference import dequantize as run
    return run(packed, scale, bits, K, dtype, group, curved)


def packed_linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    bits: int,
    group: int,
    curved: bool = True,
    u: Tensor | None = None,
    v: Tensor | None = None,
) -> Tensor:
    """The product with a weight [R, K] of `bits` 8, 4, 3 or 2 in groups of `group`; `curved`: which of
    the two grids of 3 bits. With u and v of a correction: ``x (W + u v)ᵀ + bias``.

    Args:
        x: [..., K], any float dtype. packed: [R, bytes]. scale: [R, groups]. bias: [R] or None.
        u: [R, r], v: [r, K], contiguous. They get no gradient.

    Returns:
        [..., R] in the dtype of `x`.
    """
    x, *given = autocast(x, bias, u, v)
    y = apply(_LINEAR, rows(x), packed, scale, *given, bits, group, curved)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])


Maybe = Tensor | None
Inputs = tuple[Tensor, Tensor, Tensor, Maybe, Maybe, Maybe, int, int, bool]
Kept = ContextOf[tuple[int, int, int, bool]]  # more: inputs, bits, group and whether curved


def _forward(
    x: Tensor, packed: Tensor, scale: Tensor, bias: Maybe, u: Maybe, v: Maybe,
    bits: int, group: int, curved: bool,
) -> Tensor:  # fmt: skip
    K, step = x.shape[1], max(WHOLE // max(x.shape[1], 1), 1)
    if x.is_cuda and takes(x, packed, scale, bias, v, bits, group):
        return product(x, packed, scale, bias, u, v, bits, group, curved)
    plain = partial(dequantize, bits=bits, K=K, dtype=x.dtype, group=group, curved=curved)
    if step >= len(packed):
        y = linear(x, plain(packed, scale), bias)
    else:
        parts = zip(packed.split(step), scale.split(step), strict=True)
        y = torch.cat([linear(x, plain(*part)) for part in parts], 1)
        y = y if bias is None else y.add_(bias)
    return y if u is None or v is None else y.addmm_(x @ v.mT, u.mT)


def _fake(x: Tensor, packed: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape[0], packed.shape[0])


def _setup(ctx: Kept, inputs: Inputs, output: Tensor) -> None:
    x, packed, scale, _, u, v, bits, group, curved = inputs
    ctx.more = x.shape[1], bits, group, curved
    ctx.save_for_backward(packed, scale, u, v)


def _backward(ctx: Kept, g: Tensor) -> tuple[Tensor | None, ...]:
    (packed, scale, u, v), (width, bits, group, curved) = ctx.saved_tensors, ctx.more
    for_x, *_, for_bias = ctx.needs_input_grad[:4]
    dx = None
    if for_x:
        step = max(WHOLE // max(width, 1), 1)
        parts = zip(g.split(step, 1), packed.split(step), scale.split(step), strict=True)
        made = (a @ dequantize(q, s, bits, width, g.dtype, group, curved) for a, q, s in parts)
        dx = reduce(torch.add, made)
        dx = dx if u is None else dx.addmm(g @ u, v)
    return dx, None, None, g.sum(0) if for_bias else None, *(None,) * 5


_LINEAR = called(
    register(
        "packed_linear",
        "(Tensor x, Tensor packed, Tensor scale, Tensor? bias, Tensor? u, Tensor? v, int bits, "
        "int group, bool curved) -> Tensor",
        *(_forward, _fake, _setup, _backward, _forward),
    )
)
