"""What a layer with float8 weights launches, by structure.

Between two products z is stored in float8, too. Its scale need not be measured: ``|z_j| <= ‖x‖ ‖v_j‖``,
so ``448 z / (‖x‖ C)`` with C the longest of the v_j never leaves the range, and the exponents of e4m3
hold what lies up to four orders of magnitude below as finely as what is large. A row of z is scaled
before any of it is known, and the second product is a plain one: no scales inside its sum.
"""

import torch
from torch import Tensor

from blr.kernels.fp8.launch import mix, product
from blr.kernels.fp8.reference import E4M3, LINE, Rows, Scales


def dense(
    x: Rows, weight: Tensor, scale: Tensor, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """``y = x Wᵀ + bias``, [n, o]. weight: float8 [o, i], scale: float32 [o]."""
    y = torch.empty(len(x.q), len(weight), dtype=dtype, device=weight.device)
    bias = None if bias is None else bias[None]
    product(x.q[None], weight[None], x.scale, scale[None], y[None], bias)
    return y


def lowrank(
    x: Rows, U: Tensor, V: Tensor, scales: Scales, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """``y = (x V) Uᵀ + bias``, [n, o], by our products. U: float8 [1, o, r], V: float8 [1, r, i]."""
    assert scales.first is not None
    z = inner(x, V, scales.first)
    y = torch.empty(len(x.q), U.shape[1], dtype=dtype, device=U.device)
    bias = None if bias is None else bias[None]
    product(z[None], U, x.norm, scales.second, y[None], bias)
    return y


def inner(x: Rows, V: Tensor, first: Tensor) -> Tensor:
    """z [n, r] of low rank, between its products. V: float8 [1, r, i], first: float32 [1, r]."""
    z = _rows(1, len(x.q), V.shape[1], x.q)
    product(x.q[None], V, x.unit_norm, first, z)
    return z[0]


def monarch(
    x: Rows, U: Tensor, V: Tensor, scales: Scales, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """``y_k = Σ_l U_kl V_klᵀ x_l + bias_k``. U: float8 [b, q, r], V: float8 [b, r, p]."""
    blocks, middle, p = V.shape
    n, part = len(x.q), middle // blocks
    z = _rows(blocks, n, middle, x.q)  # [k, n, (l, r')]
    assert scales.first is not None
    stored = z.unflatten(2, (blocks, part)).permute(2, 1, 0, 3)  # [l, n, k, r']
    parts = x.q.view(n, blocks, p).transpose(0, 1)
    product(parts, V, x.unit_norm, scales.first, stored, part=part)
    return _second(x, z, U, scales, dtype, bias)


def blast(
    x: Rows, U: Tensor, V: Tensor, scales: Scales, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """``y_k = U_k Σ_l S_kl ⊙ (V_lᵀ x_l) + bias_k``. U: float8 [b, q, r], V: float8 [b, r, p]."""
    blocks, rank, p = V.shape
    n = len(x.q)
    assert scales.first is not None and scales.mix is not None
    parts, w = x.q.view(n, blocks, p).transpose(0, 1), _rows(blocks, n, rank, x.q)
    z = torch.empty(blocks, n, rank, dtype=dtype, device=U.device)
    product(parts, V, x.unit_norm, scales.first, z)
    mix(z, scales.mix, w)
    return _second(x, w, U, scales, dtype, bias)


def _second(
    x: Rows, z: Tensor, U: Tensor, scales: Scales, dtype: torch.dtype, bias: Tensor | None
) -> Tensor:
    blocks, q, _ = U.shape
    y = torch.empty(len(x.q), blocks, q, dtype=dtype, device=U.device)
    bias = None if bias is None else bias.view(blocks, q)
    product(z, U, x.norm, scales.second, y.transpose(0, 1), bias)
    return y.view(len(x.q), blocks * q)


def _rows(blocks: int, n: int, width: int, like: Tensor) -> Tensor:
    """Memory for float8 [blocks, n, width] whose rows the bulk copy engine can read."""
    room = -(-width // LINE) * LINE
    return torch.empty(blocks, n, room, dtype=E4M3, device=like.device)[:, :, :width]


LAYERS = {"lowrank": lowrank, "monarch": monarch, "blast": blast}
