"""Attention that rotates queries and keys by one kernel.

The rotation of transformers is ten kernels, most of them over features that do not lie together: a
seventh of a long prompt's time in a compressed model in eager mode (scripts/log). It is a function of
the model's own file, so `forward` is called with another one in its place, by one model alone. Under
`torch.compile`, for gradients, on a CPU and in single precision the native function computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from blr.compressor.modeling.cache_names import NAMES
from blr.compressor.modeling.extended import Extension, extend
from blr.compressor.modeling.fused_norm import is_fused
from blr.compressor.modeling.probes import CLOSE, SMALL, numbers
from blr.kernels.fused.rotary.launch import rotated
from blr.kernels.fused.rotary.reference import rotate

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
