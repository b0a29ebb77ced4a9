"""What compressed models do in one kernel where transformers takes several: norms, gates, rotations and
activations. The other kernels read and write the widest tensors of a block again (times in scripts/log).

Under `torch.compile`, for gradients, on a CPU and in single precision the native module computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from blr.compressor.modeling.cache_names import NAMES
from blr.compressor.modeling.extended import Extension, extend, with_children
from blr.compressor.modeling.probes import (
    CLOSE,
    SMALL,
    activation_of,
    computes,
    gate_of,
    norm_of,
    numbers,
)
from blr.compressor.modeling.ranks import RankRequest, have_ranks
from blr.compressor.modeling.slices import is_hooked, limit_of
from blr.kernels.common.available import HALF
from blr.kernels.common.registration import is_unwatched
from blr.kernels.common.transient import tokens_within
from blr.kernels.fused.activated.launch import activated
from blr.kernels.fused.gated.launch import gated
from blr.kernels.fused.normed.launch import is_faster, layer_norm
from blr.kernels.fused.rotary.launch import rotated
from blr.kernels.fused.rotary.reference import rotate


class FusedNorm(Extension):
    """Mixin before a norm of transformers with `weight`. fused_eps: its eps."""

    fused_eps: float

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As of the module, [..., d]; products are rounded once, the module's twice."""
        if args or kwargs or not is_fused(x, self.weight):
            return super().forward(x, *args, **kwargs)  # type: ignore[misc]
        return rms_norm(x, self.weight.shape, self.weight, self.fused_eps)


class FusedLayerNorm(Extension):
    """Mixin before a layer norm with `weight` and `bias`."""

    def forward(self: Any, x: Tensor) -> Any:
        """As of the module, [..., d]."""
        if not is_fused(x, self.weight) or not is_faster(x):
            return super().forward(x)  # type: ignore[misc]
        return layer_norm(x, self.weight, self.bias, self.eps)


def fuse_norms(model: nn.Module) -> None:
    """Let the norms of `model` that are `x / rms(x) * weight`, and torch's layer norms of the last axis,
    be one kernel."""
    for module in model.modules():
        if type(module) is nn.LayerNorm:
            if module.weight is not None and len(module.normalized_shape) == 1:
                extend(module, FusedLayerNorm)
        elif (found := norm_of(module)) is not None and found[0] == "rms":
            extend(module, FusedNorm)
            module.fused_eps = found[1]  # type: ignore[assignment]


def is_fused(x: Tensor, weight: Tensor) -> bool:
    """Whether a norm of `x` is the fused kernel."""
    return is_unwatched(x) and x.is_cuda and x.dtype == weight.dtype and x.dtype in HALF


class FusedGate(Extension):
    """Mixin before an MLP ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``. fused_gate: its name in
    `kernels.fused.gated.reference.GATES`."""

    fused_gate: str

    def forward(self: Any, x: Tensor) -> Any:
        """As of the module, [..., d]."""
        if not is_fused(x, x):
            return super().forward(x)  # type: ignore[misc]
        return self.down_proj(_product(self, x))


def _product(mlp: Any, x: Tensor) -> Any:
    """What `down_proj` reads; gate and up are gone when it does."""
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    if is_fused(gate, up) and type(up) is Tensor and gate.shape == up.shape:
        return gated(gate, up, mlp.fused_gate)
    return mlp.act_fn(gate) * up


def fuse_gates(model: nn.Module) -> None:
    """Let the gated MLPs of `model` that compute as above do so by one kernel."""
    for module in model.modules():
        if (found := gate_of(module)) is not None:
            extend(module, FusedGate)
            module.fused_gate = found  # type: ignore[assignment]


ROTATION = "apply_rotary_pos_emb"  # what the models of transformers call it
RENAMING = "transformers.utils.deprecation"  # whose functions stand before a `forward` since 5.24


class FusedRotary(Extension):
    """Mixin before a class of attention whose `forward` calls `ROTATION`."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As of the module."""
        native: Any = super().forward  # type: ignore[misc]
        inner = behind_renaming(native.__func__)
        watched = torch.is_grad_enabled() or torch.compiler.is_compiling()
        if watched or is_renamed(inner, kwargs):
            return native(*args, **kwargs)
        return rotating(inner, _fused)(self, *args, **kwargs)


def fuse_rotary(model: nn.Module) -> None:
    """Let the attention of `model` rotate by one kernel, if it does so as `reference.rotate`."""
    for module in model.modules():
        if calls_rotation(type(module).forward):
            extend(module, FusedRotary)


def calls_rotation(forward: Any) -> bool:
    """Whether the `forward` of a class calls what is `reference.rotate` by the name `ROTATION`."""
    inner = behind_renaming(forward)
    names = getattr(getattr(inner, "__code__", None), "co_names", ())
    return ROTATION in names and _rotates(inner.__globals__.get(ROTATION))


def behind_renaming(function: Any) -> Any:
    """What a function calls that only takes old names of its arguments, too; else itself."""
    while getattr(function, "__globals__", {}).get("__name__") == RENAMING:
        function = function.__wrapped__
    return function


def is_renamed(inner: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a cache is given by a name that `inner` does not know."""
    return any(name in kwargs and name not in inner.__code__.co_varnames for name in NAMES)


@cache
def rotating(forward: Any, makes: Callable[[Any], Any]) -> Any:
    """`forward` with what `makes` makes of the rotation of its file in place of that."""
    native = getattr(forward, "__globals__", {}).get(ROTATION)
    if native is None:
        return forward  # another mixin, which calls the module's own
    names = {**forward.__globals__, ROTATION: makes(native)}
    made = FunctionType(forward.__code__, names, forward.__name__, None, forward.__closure__)
    made.__kwdefaults__, made.__defaults__ = forward.__kwdefaults__, forward.__defaults__
    return made


def _fused(native: Any) -> Any:
    def rotation(q: Any, k: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        fused = type(k) is Tensor and is_fused(q, k) and is_fused(cos, q) and is_whole(q, cos)
        if args or kwargs or not fused:
            return native(q, k, cos, sin, *args, **kwargs)
        return rotated(q, k, cos, sin)

    return rotation


def is_whole(q: Tensor, cos: Tensor) -> bool:
    """Whether all features of heads are rotated; of GLM, GPT-NeoX, Phi and others a part is."""
    return cos.dim() == 3 and cos.shape[-1] == q.shape[-1]


@cache
@torch.no_grad()
def _rotates(function: Callable[..., Any] | None) -> bool:
    """Whether a function of queries, keys, cosines and sines is the one we have a kernel for."""
    q, k, cos, sin = numbers(2, 3, 5, SMALL), numbers(2, 1, 5, SMALL), *numbers(2, 2, 5, SMALL)
    try:
        found = function(q, k, cos, sin)  # type: ignore[misc]
    except Exception:  # it is called in another way
        return False
    wanted = rotate(q, cos, sin), rotate(k, cos, sin)
    return len(found) == 2 and all(
        x.shape == y.shape and torch.allclose(x, y, rtol=CLOSE, atol=CLOSE)
        for x, y in zip(found, wanted, strict=True)
    )


def fuse(model: nn.Module) -> None:
    """Let the norms, gates and rotations of `model` be one kernel each, in eager mode on a GPU."""
    fuse_norms(model)
    fuse_gates(model)
    fuse_rotary(model)


class FusedActivation(Extension):
    """Mixin before a module of a low-rank layer and the activation of its outputs. fused_layer,
    fused_activation: names of both. fused_kind: what kernels call the latter."""

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
        fused = partial(_activated, getattr(self, self.fused_layer), self.fused_kind)
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


def _activated(layer: Any, activation: str, x: Tensor) -> Tensor:
    ranks, product = layer(RankRequest(x))
    return activated(ranks, product.U, product.bias, activation)


def _same(x: Tensor) -> Tensor:
    return x
