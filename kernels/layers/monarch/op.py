"""Monarch linear layer, ``y_k = Σ_l U_kl V_klᵀ x_l + bias_k``: the operator `blr::monarch_linear`.

With z_l = x_l V_l [n, b·r'] and w_k = (z_1k … z_bk) [n, b·r'] the layer is y_k = w_k U_kᵀ. Backward,
g_k [n, q] the gradient of y_k, z and w computed again:

    dw_k = g_k U_k       dz_l = (dw_1l … dw_bl)       dx_l = dz_l V_lᵀ
    dU_k = g_kᵀ w_k      dV_l = x_lᵀ dz_l             dbias = Σ_n g
"""

from collections.abc import Mapping

from torch import Tensor

from blr.kernels.common.dispatch import Variant
from blr.kernels.common.registration import Context
from blr.kernels.common.tables import Shape
from blr.kernels.layers.monarch.reference import monarch_linear as reference
from blr.kernels.layers.structured import StructureOperator, blocks_of


def variants() -> Mapping[str, Variant]:
    """VARIANTS of this structure, imported where kernels run."""
    from blr.kernels.layers.monarch.variants import VARIANTS

    return VARIANTS


def _shape(U: Tensor, V: Tensor) -> Shape:
    blocks, width, rank = V.shape
    return Shape(blocks * width, U.shape[0] * U.shape[1], blocks, rank)


def _backward(ctx: Context, g: Tensor) -> tuple[Tensor | None, ...]:
    x, U, V = ctx.saved_tensors
    for_x, for_u, for_v, for_bias = ctx.needs_input_grad
    x_l = blocks_of(x, V.shape[0])
    g_k = blocks_of(g, V.shape[0])
    dz = _exchange(g_k @ U) if for_x or for_v else g  # which nothing reads
    return (
        _rows(dz @ V.mT) if for_x else None,
        g_k.mT @ _exchange(x_l @ V) if for_u else None,
        x_l.mT @ dz if for_v else None,
        g.sum(0) if for_bias else None,
    )


def _rows(y: Tensor) -> Tensor:
    """[b, n, q] as [n, b·q]."""
    return y.transpose(0, 1).flatten(1)


def _exchange(z: Tensor) -> Tensor:
    """[l, n, (k, s)] as [k, n, (l, s)]; its own inverse."""
    return z.unflatten(2, (z.shape[0], -1)).transpose(0, 2).flatten(2)


# `reference.monarch_linear` by the fastest known way; fastest with V as `common/orders` has it
monarch_linear = StructureOperator(
    "monarch", "Tensor U, Tensor V", _shape, variants, reference, _backward
)
