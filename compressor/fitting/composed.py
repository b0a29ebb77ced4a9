"""Layers that are trained by their dense weights."""

from functools import partial

from torch import Tensor, nn
from torch.nn.functional import linear

from blr.compressor.modeling.layers import StructuredLinear
from blr.compressor.structures.registry import STRUCTURES
from blr.compressor.structures.specs import LowRankSpec


class Sum(nn.Module):
    """``y = x Qᵀ + x Sᵀ + bias``, from two layers without bias."""

    def __init__(self, base: nn.Module, correction: nn.Module) -> None:
        super().__init__()
        self.base, self.correction = base, correction
        self.bias: nn.Parameter | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[..., i] -> [..., o]."""
        y = self.base(x) + self.correction(x)
        return y if self.bias is None else y + self.bias


def compose_layers(model: nn.Module, widest: int | None = None) -> None:
    """Let the structured layers of `model` compute by their dense weights, except those whose inputs
    and outputs together are over `widest`, and low rank. Composing the weight in every pass costs as
    much as r tokens; one product with it is faster than a chain of small ones, and keeps nothing but
    its input for the backward pass."""
    for module in model.modules():
        layer = module.correction if isinstance(module, Sum) else module
        if isinstance(layer, StructuredLinear):
            low_rank = layer is module and layer.spec.structure == LowRankSpec.structure
            width = layer.spec.in_features + layer.spec.out_features
            if not low_rank and (widest is None or width <= widest):
                module.forward = partial(_forward, module)  # type: ignore[method-assign,arg-type]


def dense_weight(layer: nn.Module) -> Tensor:
    """The weight [o, i] of a plain or structured layer, or of a sum of these; differentiable."""
    if isinstance(layer, nn.Linear):
        return layer.weight
    if isinstance(layer, Sum):
        return dense_weight(layer.base) + dense_weight(layer.correction)
    assert isinstance(layer, StructuredLinear)
    held = dict(zip(layer.held, layer.ordered(), strict=True))
    return STRUCTURES[layer.spec.structure].factorizer().reconstruct(held, layer.spec)


def _forward(layer: StructuredLinear | Sum, x: Tensor) -> Tensor:
    return linear(x, dense_weight(layer), layer.bias)
