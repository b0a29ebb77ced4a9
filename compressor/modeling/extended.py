"""Modules that get methods of ours without losing their class.

A mixin is put before the class of one module, under that class's name; what is copied or pickled is
told by the native class, which pickle finds, and the mixins. `inspect` finds the signature and the
source of the native `forward`, by which others decide what a module is: vLLM's Transformers backend
looks for attention there.
"""

from __future__ import annotations

from functools import cache, update_wrapper
from types import FunctionType
from typing import Any

from torch import nn


class Extension:
    """Base of mixins before a module's class."""

    native: type[Any]
    mixins: tuple[type[Any], ...]

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return _empty, (self.native, self.mixins), self.__dict__


def extend(module: nn.Module, mixin: type[Any]) -> None:
    """Put `mixin` before the class of `module`, if it is not there already."""
    found: Any = type(module)
    if not issubclass(found, mixin):
        native, mixins = getattr(found, "native", found), getattr(found, "mixins", ())
        module.__class__ = extended_class(native, (mixin, *mixins))


@cache
def extended_class(native: Any, mixins: tuple[Any, ...]) -> Any:
    """`native` behind `mixins`, under its name."""
    body = {"__module__": __name__, "native": native, "mixins": mixins}
    first = mixins[0].forward
    forward = FunctionType(first.__code__, first.__globals__, None, None, first.__closure__)
    body["forward"] = update_wrapper(forward, native.forward)
    return type(native.__name__, (*mixins, native), body)


def _empty(native: object, mixins: tuple[Any, ...]) -> object:
    made: Any = extended_class(native, mixins)
    return made.__new__(made)


def with_children(module: nn.Module, children: dict[str, Any]) -> Any:
    """What has everything of `module`, with `children` in the place of those of their names."""
    made: Any = object.__new__(type(module))
    made.__dict__.update(module.__dict__, _modules={**module._modules, **children})
    return made
