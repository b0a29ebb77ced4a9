"""Products with packed factors on a GPU: the weights of a layer are never plain."""

from collections.abc import Sequence

from torch import Tensor

from blr.compressor.modeling.modeling_blr import FormulaLinear
from blr.compressor.modeling.stages import packed_factor
from blr.kernels.layers.packed.op import packed_linear


def packed_product(
    layer: FormulaLinear, names: Sequence[str], x: Tensor, bias: Tensor | None
) -> Tensor | None:
    """``x Wᵀ + bias`` [..., o] of x [..., i], in the dtype of x, by one packed factor after the other.

    names: of the factors, in the order in which x meets them. bias: [o] or None. Returns None where
    kernels do not take the factors: on a CPU, of blocks, in float8 or in another dtype than x.
    """
    if not names or layer.entry.get("fp8") or any(layer.held[name].tile for name in names):
        return None
    factors = [packed_factor(layer, name) for name in names]
    if not all(w.takes(x) for w in factors):
        return None
    for w in factors:
        added = bias if w is factors[-1] else None
        x = packed_linear(x, w.packed, w.scale, added, w.bits, w.group, w.curved)
    return x
