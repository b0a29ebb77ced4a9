"""BLAST linear layer, ``y_k = U_k Σ_l S_kl ⊙ (V_lᵀ x_l) + bias_k``: the operator `blr::blast_linear`.

With z_l = x_l V_l and w_k = Σ_l S_kl ⊙ z_l [n, r] the layer is y_k = w_k U_kᵀ. Backward, g_k [n, q]
the gradient of y_k, z and w computed again:

    dw_k = g_k U_k      dz_l = Σ_k S_kl ⊙ dw_k      dx_l = dz_l V_lᵀ
    dU_k = g_kᵀ w_k     dS_kl = Σ_n dw_k ⊙ z_l      dV_l = x_lᵀ dz_l      dbias = Σ_n g
"""

from collections.abc import Mapping

from torch import Tensor

from blr.kernels.common.dispatch import Variant
from blr.kernels.common.registration import Context
from blr.kernels.common.tables import Shape
from blr.kernels.layers.blast.reference import blast_linear as reference
from blr.kernels.layers.blast.reference import cpu_linear as on_cpu
from blr.kernels.layers.structured import StructureOperator, blocks_of


def variants() -> Mapping[str, Variant]:
    """VARIANTS of this structure, imported where kernels run."""
    from blr.kernels.layers.blast.variants import VARIANTS

    return VARIANTS


def _shape(U: Tensor, S: Tensor, V: Tensor) -> Shape:
    blocks, width, rank = V.shape
    return Shape(blocks * width, U.shape[0] * U.shape[1], blocks, rank)  # U may be a part of it


def _backward(ctx: Context, g: Tensor) -> tuple[Tensor | None, ...]:
    x, U, S, V = ctx.saved_tensors
    for_x, for_u, for_s, for_v, for_bias = ctx.needs_input_grad
    x_l, g_k = blocks_of(x, V.shape[0]), blocks_of(g, U.shape[0])
    z = x_l @ V if for_u or for_s else g  # [l, n, r]; g stands for what nothing reads
    dw = g_k @ U if for_x or for_s or for_v else g  # [k, n, r]
    dz = _mix(dw, S.transpose(0, 1)) if for_x or for_v else g  # [l, n, r]
    return (
        (dz @ V.mT).transpose(0, 1).flatten(1) if for_x else None,
        g_k.mT @ _mix(z, S) if for_u else None,
        (dw.permute(2, 0, 1) @ z.permute(2, 1, 0)).permute(1, 2, 0) if for_s else None,
        x_l.mT @ dz if for_v else None,
        g.sum(0) if for_bias else None,
    )


def _mix(z: Tensor, S: Tensor) -> Tensor:
    """``w_k = Σ_l S_kl ⊙ z_l`` of z [l, n, r] and S [k, l, r], one small product a rank."""
    return (z.permute(2, 1, 0) @ S.permute(2, 1, 0)).permute(2, 1, 0)


# `reference.blast_linear` by the fastest known way; fastest with V as `common/orders` has it
blast_linear = StructureOperator(
    "blast", "Tensor U, Tensor S, Tensor V", _shape, variants, reference, _backward, on_cpu
)
