"""Low-rank layers whose activation is computed with them, where intermediates are bounded.

Apart, the activation reads and writes all of what the layer wrote, and takes as long as the product with
U (scripts/log).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from blr.compressor.modeling.extended import Extension, extend, with_children
from blr.compressor.modeling.probes import SMALL, activation_of, computes, numbers
from blr.compressor.modeling.ranks import RankRequest, have_ranks
from blr.compressor.modeling.slices import is_hooked, limit_of
from blr.kernels.common.transient import tokens_within
from blr.kernels.fused.activated.launch import activated


class FusedActivation(Extension):
    """Mixin before a module of a low-rank layer and the activation of its outputs.

    fused_layer, fused_activation: names of both. fused_kind: what kernels call the latter.
    """

    fused_layer: str
    fused_activation: str
    fused_kind: str

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As of the module."""
        compute: Any = super().forward  # type: ignore[misc]
        bounded = len(args) == 1 and limit_of(args[0]) is not None
        if not bounded or args[0].shape[:-1].numel() < tokens_within(0, 1):  # less than a slice
            return compute(*args, **kwargs)
        if is_hooked(self) or not have_ranks(self, self.fused_layer):
            return compute(*args, **kwargs)
        fused = partial(_fused, getattr(self, self.fused_layer), self.fused_kind)
        layers = {self.fused_layer: fused, self.fused_activation: _same}
        return compute.__func__(with_children(self, layers), *args, **kwargs)


def fuse_activations(model: nn.Module) -> None:
    """Let the modules of `model` that apply an activation to what one low-rank layer widens do so by
    one kernel."""
    for module in model.modules():
        named = dict(module.named_children())
        wide = [name for name, layer in named.items() if _widens(layer)]
        acts = [name for name, child in named.items() if activation_of(child) is not None]
        if len(wide) == len(acts) == 1 and _applies(module, wide[0], acts[0]):
            extend(module, FusedActivation)
            found: Any = module
            found.fused_layer, found.fused_activation = wide[0], acts[0]
            found.fused_kind, _ = activation_of(named[acts[0]]) or ("", 0.0)


def _widens(layer: Any) -> bool:
    ranked = getattr(layer, "has_ranks", False) and layer.spec.groups == 1
    return ranked and 2 * layer.out_features >= 3 * layer.in_features


def _applies(module: Any, layer: str, activation: str) -> bool:
    """Whether a module applies its activation to all that its layer gives: asked of it on a few numbers,
    without its other layers."""
    weight, x = numbers(SMALL, SMALL), numbers(1, 3, SMALL)
    act = module._modules[activation]
    parts = {**dict.fromkeys(module._modules, _same), layer: lambda x: x @ weight, activation: act}
    return computes(with_children(module, parts).forward, x, act(x @ weight))


def _fused(layer: Any, activation: str, x: Tensor) -> Tensor:
    ranks, product = layer(RankRequest(x))
    return activated(ranks, product.U, product.bias, activation)


def _same(x: Tensor) -> Tensor:
    return x
