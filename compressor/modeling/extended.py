"""Puts mixins before the class of single modules, which keep that class's name, signature and source:
others decide by these what a module is (vLLM's Transformers backend). Copies and pickles work."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, update_wrapper
from types import FunctionType
from typing import Any, TypeVar, cast

from torch import nn

Module = TypeVar("Module", bound=nn.Module)


class Extension(nn.Module):
    """Base of mixins before a module's class: `native` is that class, `mixins` are newest first."""

    native: type[Any]
    mixins: tuple[type[Extension], ...]

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return _empty, (self.native, self.mixins), self.__dict__


class GatedMlp(Extension):
    """Base of mixins before an MLP ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    act_fn: nn.Module


Extended = TypeVar("Extended", bound=Extension)


def extend(module: nn.Module, mixin: type[Extended]) -> Extended:
    """Put `mixin` before the class of `module`, if it is not there already; `module` itself."""
    if not isinstance(module, mixin):
        native: Any = type(module)
        mixins = tuple[type[Extension], ...]()
        if isinstance(module, Extension):
            native, mixins = module.native, module.mixins
        module.__class__ = extended_class(native, (mixin, *mixins))
    return cast(Extended, module)


@cache
def extended_class(native: Any, mixins: tuple[Any, ...]) -> type[nn.Module]:
    """The class `native` behind `mixins`, under its own name."""
    first = mixins[0].forward
    forward = FunctionType(first.__code__, first.__globals__, None, None, first.__closure__)
    body = {"__module__": __name__, "native": native, "mixins": mixins}
    body["forward"] = update_wrapper(forward, native.forward)
    return type(native.__name__, (*mixins, native), body)


def _empty(native: Any, mixins: tuple[type[Extension], ...]) -> nn.Module:
    made = extended_class(native, mixins)
    return made.__new__(made)


def same(x: object) -> object:
    """Stand for a layer whose work is done elsewhere."""
    return x


def with_children(module: Module, children: Mapping[str, object]) -> Module:
    """A shallow copy of `module` with `children` in the place of those of their names."""
    made: Module = object.__new__(type(module))
    made.__dict__.update(module.__dict__, _modules={**module._modules, **children})
    return made
