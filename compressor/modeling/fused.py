"""Norms, gates, rotations and activations by one kernel each where transformers takes several. These
read and write the widest tensors of a block again (times in scripts/log). The native module computes
under `torch.compile`, on a CPU and, but in training, for gradients and in single precision."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from blr.compressor.modeling.extended import Extension, GatedMlp, extend, same, with_children
from blr.compressor.modeling.layers import StructuredLinear
from blr.compressor.modeling.probes import (
    CLOSE,
    SMALL,
    activation_of,
    computes,
    gate_of,
    norm_of,
    numbers,
)
from blr.compressor.modeling.ranks import RankRequest, ranked
from blr.compressor.modeling.settings import CACHE_NAMES
from blr.compressor.modeling.slices import is_hooked, limit_of
from blr.kernels.common.available import HALF, TRAINED, kernel_device
from blr.kernels.common.transient import tokens_within
from blr.kernels.common.watching import is_unwatched
from blr.kernels.fused.gradient import gated_with_gradient, rotated_with_gradient
from blr.kernels.fused.launch import activated, gated, is_faster, layer_norm, rotated
from blr.kernels.fused.reference import rotate

Rotation = Callable[..., tuple[Tensor, Tensor]]
Forward = Callable[..., object]


def fuse(model: nn.Module) -> None:
    """Let the norms, gates and rotations of `model` be one kernel, in eager mode on a GPU."""
    fuse_norms(model)
    fuse_gates(model)
    fuse_rotary(model)


def fuse_trained(model: nn.Module) -> None:
    """Let attention, gated MLPs and norms of `model` compute by kernels, with gradients or without.
    Modules keep their class and tensors. A norm that computes anything else (1 + weight) stays."""
    for module in model.modules():
        kind: Any = type(module)
        forward = kind.native.forward if isinstance(module, Extension) else kind.forward
        make = module.fused_gate if isinstance(module, FusedGate) else gate_of(module)
        if calls_rotation(forward):
            module.forward = partial(_attend, module, forward)
        elif make is not None:
            module.forward = partial(_trained_gate, module, make)
        elif (norm := norm_of(module)) is not None and norm[0] == "rms":
            module.forward = partial(_trained_norm, module, forward, norm[1])


def is_fused(x: Tensor, weight: Tensor) -> bool:
    """Whether the fused kernel computes a norm of `x` by `weight`."""
    return is_unwatched(x) and x.is_cuda and x.dtype == weight.dtype and x.dtype in HALF


def _is_trained(*tensors: Tensor) -> bool:
    """Whether kernels compute with these, and nobody but autograd looks on."""
    if torch.compiler.is_compiling() or not all(type(t) is Tensor for t in tensors):
        return False
    first = tensors[0]
    alike = all(t.dtype == first.dtype and t.device == first.device for t in tensors)
    watched = torch._C._is_any_autocast_enabled() or torch._C._is_tracing()
    return alike and not watched and first.dtype in TRAINED and kernel_device(first)


class FusedNorm(Extension):
    """Mixin before a root-mean-square norm. fused_eps: what it adds to the mean square."""

    weight: nn.Parameter
    fused_eps: float

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """The native result [..., d], but rounded once where the module rounds twice."""
        if args or kwargs or not is_fused(x, self.weight):
            return super().forward(x, *args, **kwargs)
        return rms_norm(x, self.weight.shape, self.weight, self.fused_eps)


def _trained_norm(
    norm: Any, native: Forward, eps: float, x: Tensor, *args: object, **kwargs: object
) -> object:
    if args or kwargs:  # a gated norm with its gate
        return native(norm, x, *args, **kwargs)
    return rms_norm(x, norm.weight.shape, norm.weight, eps)


class FusedLayerNorm(Extension):
    """Mixin before torch's layer norm of the last axis."""

    weight: nn.Parameter
    bias: nn.Parameter
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        if not is_fused(x, self.weight) or not is_faster(x):
            return super().forward(x)
        return layer_norm(x, self.weight, self.bias, self.eps)


def fuse_norms(model: nn.Module) -> None:
    """Let the norms ``x / rms(x) * weight`` and the layer norms of `model` be one kernel."""
    for module in model.modules():
        if type(module) is nn.LayerNorm:
            if module.weight is not None and len(module.normalized_shape) == 1:
                extend(module, FusedLayerNorm)
        elif (found := norm_of(module)) is not None and found[0] == "rms":
            extend(module, FusedNorm).fused_eps = found[1]


class FusedGate(GatedMlp):
    """Mixin before a gated MLP. fused_gate: the gate's name in `kernels.fused.reference.GATES`."""

    fused_gate: str

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(_gated(self, x)) if is_fused(x, x) else super().forward(x)


def _gated(mlp: FusedGate, x: Tensor) -> Tensor:
    """What `down_proj` reads. The outputs of gate and up are freed before it runs."""
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    if is_fused(gate, up) and type(up) is Tensor and gate.shape == up.shape:
        return gated(gate, up, mlp.fused_gate)
    return mlp.act_fn(gate) * up


def _trained_gate(mlp: Any, make: str, x: Tensor) -> object:
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    if _is_trained(gate, up) and gate.shape == up.shape:
        return mlp.down_proj(gated_with_gradient(gate, up, make))
    return mlp.down_proj(mlp.act_fn(gate) * up)


def fuse_gates(model: nn.Module) -> None:
    """Let the gated MLPs of `model` apply their gate by one kernel."""
    for module in model.modules():
        if (found := gate_of(module)) is not None:
            extend(module, FusedGate).fused_gate = found


ROTATION = "apply_rotary_pos_emb"  # what the models of transformers call it
RENAMING = "transformers.utils.deprecation"  # its functions wrap a `forward` since 5.24


class FusedRotary(Extension):
    """Mixin before a class of attention whose `forward` calls `ROTATION`."""

    def forward(self, *args: object, **kwargs: object) -> object:
        native: Any = super().forward
        inner = behind_renaming(native.__func__)
        watched = torch.is_grad_enabled() or torch.compiler.is_compiling()
        if watched or is_renamed(inner, kwargs):
            return native(*args, **kwargs)
        return rotating(inner, _fused)(self, *args, **kwargs)


def _attend(attention: object, native: Callable[..., object], *args: object, **kwargs: object) -> object:
    inner = behind_renaming(native)
    if torch.compiler.is_compiling() or is_renamed(inner, kwargs):
        return native(attention, *args, **kwargs)
    return rotating(inner, _trained)(attention, *args, **kwargs)


def fuse_rotary(model: nn.Module) -> None:
    """Let the attention of `model` rotate by one kernel, if it does so as `reference.rotate`."""
    for module in model.modules():
        if calls_rotation(type(module).forward):
            extend(module, FusedRotary)


def calls_rotation(forward: Callable[..., object]) -> bool:
    """Whether the `forward` of a class rotates by `ROTATION`, and that computes `reference.rotate`."""
    inner = behind_renaming(forward)
    names = getattr(getattr(inner, "__code__", None), "co_names", ())
    return ROTATION in names and _rotates(inner.__globals__.get(ROTATION))


def behind_renaming(function: Any) -> Any:
    """The function that `function` wraps to take old names of its arguments; else `function` itself."""
    while getattr(function, "__globals__", {}).get("__name__") == RENAMING:
        function = function.__wrapped__
    return function


def is_renamed(inner: FunctionType, kwargs: Mapping[str, object]) -> bool:
    """Whether a cache is given by a name that `inner` does not know."""
    return any(name in kwargs and name not in inner.__code__.co_varnames for name in CACHE_NAMES)


@cache
def rotating(forward: Forward, change: Callable[[Rotation], Rotation]) -> Callable[..., object]:
    """`forward` with ``change(rotation)`` in the place of the rotation that its file defines."""
    native = getattr(forward, "__globals__", {}).get(ROTATION)
    if native is None:
        return forward  # another mixin, which calls the module's own
    names = {**forward.__globals__, ROTATION: change(native)}
    made = FunctionType(forward.__code__, names, forward.__name__, None, forward.__closure__)
    made.__kwdefaults__, made.__defaults__ = forward.__kwdefaults__, forward.__defaults__
    return made


def _fused(native: Rotation) -> Rotation:
    def rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: object, **kwargs: object) -> Any:
        fused = type(k) is Tensor and is_fused(q, k) and is_fused(cos, q) and _is_whole(q, cos)
        if args or kwargs or not fused:
            return native(q, k, cos, sin, *args, **kwargs)
        return rotated(q, k, cos, sin)

    return rotation


def _trained(native: Rotation) -> Rotation:
    def rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: object, **kwargs: object) -> Any:
        fixed = isinstance(cos, Tensor) and not (cos.requires_grad or sin.requires_grad)
        fused = fixed and _is_trained(q, k, cos, sin) and _is_whole(q, cos)
        if args or kwargs or not fused:
            return native(q, k, cos, sin, *args, **kwargs)
        return rotated_with_gradient(q, k, cos, sin)

    return rotation


def _is_whole(q: Tensor, cos: Tensor) -> bool:
    """Whether all features of heads are rotated; GLM, GPT-NeoX, Phi and others rotate a part."""
    return cos.dim() == 3 and cos.shape[-1] == q.shape[-1]


@cache
@torch.no_grad()
def _rotates(function: Rotation) -> bool:
    """Whether a function of queries, keys, cosines and sines is the one that we have a kernel for."""
    q, k, cos, sin = numbers(2, 3, 5, SMALL), numbers(2, 1, 5, SMALL), *numbers(2, 2, 5, SMALL)
    try:
        found = function(q, k, cos, sin)
    except Exception:  # it is called in another way
        return False
    wanted = rotate(q, cos, sin), rotate(k, cos, sin)
    return len(found) == 2 and all(
        x.shape == y.shape and torch.allclose(x, y, rtol=CLOSE, atol=CLOSE)
        for x, y in zip(found, wanted, strict=True)
    )


class FusedActivation(Extension):
    """Mixin before a module that applies an activation to the outputs of a low-rank layer. fused_layer,
    fused_activation: names of both. fused_kind: what kernels call the activation."""

    fused_layer: str
    fused_activation: str
    fused_kind: str

    def forward(self, *args: object, **kwargs: object) -> object:
        """The native result; within `BLR_TRANSIENT` the layer and its activation are one kernel."""
        x = args[0] if len(args) == 1 else None
        layers = ranked(self, self.fused_layer)
        if not layers or not isinstance(x, Tensor) or limit_of(x) is None or is_hooked(self):
            return super().forward(*args, **kwargs)
        if x.shape[:-1].numel() < tokens_within(0, 1):  # less than a slice
            return super().forward(*args, **kwargs)
        fused = partial(_activated, layers[0], self.fused_kind)
        copy = with_children(self, {self.fused_layer: fused, self.fused_activation: same})
        return super(FusedActivation, copy).forward(*args, **kwargs)


def fuse_activations(model: nn.Module) -> None:
    """Fuse each low-rank layer that widens with the activation behind it, in one kernel."""
    for module in model.modules():
        named = dict(module.named_children())
        wide = [name for name, layer in named.items() if _widens(layer)]
        acts = {name: found[0] for name, child in named.items() if (found := activation_of(child))}
        if len(wide) == len(acts) == 1 and _applies(module, wide[0], *acts):
            made = extend(module, FusedActivation)
            made.fused_layer, [(made.fused_activation, made.fused_kind)] = wide[0], acts.items()


def _widens(layer: Any) -> bool:
    ranked = getattr(layer, "has_ranks", False) and layer.spec.groups == 1
    return ranked and 2 * layer.out_features >= 3 * layer.in_features


def _applies(module: nn.Module, layer: str, activation: str) -> bool:
    """Whether a module activates all outputs of its layer; tried on a few numbers."""
    weight, x, act = numbers(SMALL, SMALL), numbers(1, 3, SMALL), module.get_submodule(activation)
    parts = {**dict.fromkeys(module._modules, same), layer: lambda x: x @ weight, activation: act}
    return computes(with_children(module, parts).forward, x, act(x @ weight))


def _activated(layer: StructuredLinear, activation: str, x: Tensor) -> Tensor:
    ranks, product = layer(RankRequest(x))
    return activated(ranks, product.U, product.bias, activation)
