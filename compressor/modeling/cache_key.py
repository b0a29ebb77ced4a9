"""What is made for a model as it stands: a decoder, graphs.

Both know addresses and what modules did when they were made; decoders have copies of some factors, too.
Adapters that are put in or switched, a layer that is replaced, weights that move: they are made anew.
Hooks are not called by them: see `is_watched`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from operator import is_
from typing import Any

from torch import Tensor, nn

CAPTURING = "transformers.utils.output_capturing"
# What layers of peft remember of how they are set, in attributes of their own
ADAPTER = frozenset(("_disable_adapters", "_active_adapter", "merged_adapters", "scaling"))
_making = threading.RLock()  # a second thread waits for what the first makes


class Check:
    """A hook of ours, for passes by transformers: what is made for a model checks the same by itself."""


class Basis:
    """The modules of a model, where its parameters and buffers lie, and what its adapters are set to.

    Args:
        values: the values of parameters and buffers count, too, as far as torch counts their changes.
    """

    def __init__(self, model: nn.Module, values: bool = False) -> None:
        modules = list(model.modules())
        held: list[dict[str, Any]] = []
        for module in modules:
            held += module._modules, module._parameters, module._buffers
        entries = [(found, name, value) for found in held for name, value in found.items()]
        self.holders: list[dict[str, Any]] = [found for found, _, _ in entries]
        self.names = [name for _, name, _ in entries]
        self.values = [value for _, _, value in entries]
        self.tensors = [value for value in self.values if isinstance(value, Tensor)]
        self.versions = [_version(tensor) for tensor in self.tensors] if values else None
        self.places = list(map(_place, self.tensors))
        self.hooks = [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self.own = [m.__dict__ for m in modules[1:]]  # not the model's, which would hold itself
        self.adapters = [own for own in self.own if "merged_adapters" in own]
        self.settings = self._settings()

    def holds(self) -> bool:
        """Whether all of it is there as it was."""
        if not all(map(is_, map(dict.get, self.holders, self.names), self.values)):
            return False
        if list(map(_place, self.tensors)) != self.places or self._settings() != self.settings:
            return False
        return self.versions is None or list(map(_version, self.tensors)) == self.versions

    def _settings(self) -> list[str]:
        """What peft sets its layers to, which is no module, parameter or hook."""
        return [repr([own.get(name) for name in sorted(ADAPTER)]) for own in self.adapters]

    def is_watched(self, model: nn.Module) -> bool:
        """Whether a call of a module of `model`, whose this is, is more than its class's forward: a
        hook, another forward."""
        if "forward" in model.__dict__ or any("forward" in own for own in self.own):
            return True
        found = [hook for hooks in self.hooks if hooks for hook in hooks.values()]
        return not all(map(_is_inert, found))


def _place(tensor: Tensor) -> tuple[int, Any]:
    return tensor.data_ptr(), tensor.dtype


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is_inert(hook: object) -> bool:
    """Whether a hook changes nothing: a check of ours, or what transformers leaves on modules once it
    was asked for hidden states, which acts where they are asked for again."""
    return isinstance(hook, Check) or getattr(hook, "__module__", None) == CAPTURING


@dataclass(frozen=True)
class MadeFor:
    """Something made for a model, and what it rests on. times: it was made, with those before it."""

    basis: Basis
    made: Any
    times: int

    def __reduce__(self) -> Any:
        """None in copies and pickles of the model: their weights lie elsewhere."""
        return type(None), ()


def held_for(model: nn.Module, name: str, make: Callable[[], Any], values: bool = False) -> MadeFor:
    """What `make` gives, kept as `name` beside the model until something changes that it rests on.

    Args:
        values: it rests on copies of some weights.
    """
    with _making:
        found: MadeFor | None = model.__dict__.get(name)
        if found is None or not found.basis.holds():
            times = 1 if found is None else found.times + 1
            model.__dict__[name] = found = None  # its memory is free for the next
            made = make()  # which may put weights elsewhere
            model.__dict__[name] = found = MadeFor(Basis(model, values), made, times)
    return found
