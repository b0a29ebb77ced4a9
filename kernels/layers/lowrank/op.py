"""Low-rank linear layer, ``y = (x V) Uᵀ + bias``: the operator `blr::lowrank_linear`.

Backward, with g the gradient of y [n, o], h = g U and z = x V [n, r] (computed again):

    dx = h Vᵀ        dV = xᵀ h        dU = gᵀ z        dbias = Σ_n g
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from blr.kernels.common.dispatch import Variant
from blr.kernels.common.registration import Context
from blr.kernels.common.tables import Shape
from blr.kernels.layers.lowrank.reference import lowrank_linear as reference
from blr.kernels.layers.structured import StructureOperator


def packed(Vs: Sequence[Tensor]) -> Tensor | None:
    """The stored tensor [Σ r, i] that consecutive `Vs` [i, r_g] are transposed views of, if any."""
    first = Vs[0]
    width, at = first.shape[0], first.storage_offset()
    for V in Vs:
        same = V.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or V.stride() != (1, width) or V.storage_offset() != at or V.dtype != first.dtype:
            return None
        at += V.shape[1] * width
    total = sum(V.shape[1] for V in Vs)
    return first.as_strided((total, width), (width, 1), first.storage_offset())


def variants() -> Mapping[str, Variant]:
    """VARIANTS of this structure, imported where kernels run."""
    from blr.kernels.layers.lowrank.variants import VARIANTS

    return VARIANTS


def _shape(U: Tensor, V: Tensor) -> Shape:
    return Shape(V.shape[0], U.shape[0], 1, U.shape[1])


def _backward(ctx: Context, g: Tensor) -> tuple[Tensor | None, ...]:
    x, U, V = ctx.saved_tensors
    for_x, for_u, for_v, for_bias = ctx.needs_input_grad
    h = g @ U if for_x or for_v else g  # [n, r]; g stands for what nothing reads
    return (
        h @ V.mT if for_x else None,
        g.mT @ (x @ V) if for_u else None,
        x.mT @ h if for_v else None,
        g.sum(0) if for_bias else None,
    )


# `reference.lowrank_linear` by the fastest known way; fastest with V as `common/orders` has it
lowrank_linear = StructureOperator(
    "lowrank", "Tensor U, Tensor V", _shape, variants, reference, _backward
)
