"""Structured layers whose tensors are stored as the kernels read them. Shipped in every export.

A layer of an export holds ``<factor>_kernel``: the factor with its axes in the order of `layout.py`,
contiguous. The canonical names (``U``, ``S``, ``V``, ``factors``) are views of the stored tensors
without a copy, so that forward passes, kernels and gradients are those of the canonical layers.
"""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor, nn

from blr.compressor.modeling.layers import (
    BlastLinear,
    Factors,
    KroneckerLinear,
    LowRankLinear,
    MonarchLinear,
    PivotedLinear,
    StructuredLinear,
)
from blr.compressor.structures.specs import Spec
from blr.kernels.common.layout import canonical_view, to_physical
from blr.kernels.common.orders import Order, order_of

SUFFIX = "_kernel"


def stored_name(factor: str) -> str:
    """``V`` -> ``V_kernel``, ``factors.0`` -> ``factors_kernel.0``."""
    stem, dot, index = factor.partition(".")
    return f"{stem}{SUFFIX}{dot}{index}"


def orders(spec: Spec) -> dict[str, Order]:
    """Factor to the order of its axes in kernel layout, as ``{"U": (0, 1), "V": (1, 0)}``."""
    return {name: order_of(spec.structure, name, len(shape)) for name, shape in spec.shapes().items()}


def to_kernel_layout(layer: StructuredLinear) -> None:
    """Turn a canonical layer in place into the kernel-layout one of the same values.

    Raises KeyError for a layer that is none of `KERNEL_LAYERS`.
    """
    cls = KERNEL_LAYERS[type(layer)]
    order = orders(layer.spec)
    for stem in dict.fromkeys(name.partition(".")[0] for name in order):
        held = getattr(layer, stem)
        delattr(layer, stem)
        if isinstance(held, nn.ParameterList):
            stored = Factors(_stored(p, order[f"{stem}.{n}"]) for n, p in enumerate(held))
            layer.add_module(stem + SUFFIX, stored)
        else:
            layer.register_parameter(stem + SUFFIX, _stored(held, order[stem]))
    layer.__class__ = cls
    assert isinstance(layer, KernelLayout)
    layer.orders = order


def _stored(factor: nn.Parameter, order: Order) -> nn.Parameter:
    return nn.Parameter(to_physical(factor.detach(), order), requires_grad=factor.requires_grad)


def _canonical(factor: str) -> Any:
    def view(layer: KernelLayout) -> Tensor:
        return canonical_view(getattr(layer, factor + SUFFIX), layer.orders[factor])

    return property(view, doc=f"{factor} in its canonical shape, a view of what is stored.")


class KernelLayout(StructuredLinear):
    """What the layers below share: `orders`, and a layout that is there already."""

    orders: dict[str, Order]

    def relayout_(self) -> Self:
        """Nothing to do, wherever the layer is."""
        return self

    def _keep(self, name: str, factor: Tensor) -> None:
        self.get_parameter(name + SUFFIX).data = factor.permute(self.orders[name])


class KernelLowRankLinear(KernelLayout, LowRankLinear):
    """V_kernel [r, i], or in groups [G, r, columns]."""

    U, V = _canonical("U"), _canonical("V")

    def keep_v(self, stored: Tensor) -> None:
        """As of the canonical layer."""
        self.V_kernel.data = stored


class KernelPivotedLinear(KernelLayout, PivotedLinear):
    """V_kernel [r, i]."""

    U, V = _canonical("U"), _canonical("V")


class KernelMonarchLinear(KernelLayout, MonarchLinear):
    """V_kernel [b, r, p]."""

    U, V = _canonical("U"), _canonical("V")


class KernelBlastLinear(KernelLayout, BlastLinear):
    """V_kernel [b, r, p]."""

    U, S, V = _canonical("U"), _canonical("S"), _canonical("V")


class KernelKroneckerLinear(KernelLayout, KroneckerLinear):
    """factors_kernel.n [a, d, b, c]."""

    factors_kernel: Factors

    def _views(self) -> list[Tensor]:
        stored = enumerate(self.factors_kernel())
        return [canonical_view(tensor, self.orders[f"factors.{n}"]) for n, tensor in stored]

    factors: Any = property(_views, doc="The factors [a, b, c, d], views of what is stored.")

    def ordered(self) -> list[Tensor]:
        return self._views()


KERNEL_LAYERS: dict[type[StructuredLinear], type[KernelLayout]] = {
    LowRankLinear: KernelLowRankLinear,
    PivotedLinear: KernelPivotedLinear,
    MonarchLinear: KernelMonarchLinear,
    BlastLinear: KernelBlastLinear,
    KroneckerLinear: KernelKroneckerLinear,
}
