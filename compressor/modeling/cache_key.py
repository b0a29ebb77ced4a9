"""Keeps what is made for a model, a decoder or graphs, and makes it anew when the model changes: both
know addresses of tensors, and what modules did when they were made. They call no hooks: `is_watched`."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

CAPTURING = "transformers.utils.output_capturing"
# What layers of peft remember of how they are set, in attributes of their own
ADAPTER = frozenset(("_disable_adapters", "_active_adapter", "merged_adapters", "scaling"))
_making = threading.RLock()  # a second thread waits for what the first makes


class Check:
    """A hook of ours for passes by transformers. Decoders and graphs check the same by themselves."""


class Basis:
    """The state of a model: its modules, where its tensors lie, and what its adapters are set to.
    values: whether the values of tensors count too, as far as torch counts their changes."""

    def __init__(self, model: nn.Module, values: bool = False) -> None:
        modules = list(model.modules())
        held = [vars(m)[name] for m in modules for name in ("_modules", "_parameters", "_buffers")]
        self.holders = [found for found in held for _ in found]
        self.names = [name for found in held for name in found]
        self.values = [value for found in held for value in found.values()]
        self.tensors = [value for value in self.values if isinstance(value, Tensor)]
        self.versions = [_version(tensor) for tensor in self.tensors] if values else None
        self.places = list(map(_place, self.tensors))
        self.hooks = [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self.own = [m.__dict__ for m in modules[1:]]  # not the model's, which would hold itself
        self.adapters = [own for own in self.own if "merged_adapters" in own]
        self.settings = self._settings()

    def holds(self) -> bool:
        """Whether the model is still in this state."""
        if not all(map(is_, map(dict.get, self.holders, self.names), self.values)):
            return False
        if list(map(_place, self.tensors)) != self.places or self._settings() != self.settings:
            return False
        return self.versions is None or list(map(_version, self.tensors)) == self.versions

    def _settings(self) -> list[str]:
        """What peft sets its layers to, which is no module, parameter or hook."""
        return [repr([own.get(name) for name in sorted(ADAPTER)]) for own in self.adapters]

    def is_watched(self, model: nn.Module) -> bool:
        """Whether calls of some module of `model` do more than its class: a hook, another forward."""
        if "forward" in model.__dict__ or any("forward" in own for own in self.own):
            return True
        found = [hook for hooks in self.hooks if hooks for hook in hooks.values()]
        # transformers leaves hooks once it was asked for hidden states, which act when it is asked again
        return any(
            not isinstance(hook, Check) and getattr(hook, "__module__", None) != CAPTURING
            for hook in found
        )


def _place(tensor: Tensor) -> tuple[int, torch.dtype]:
    return tensor.data_ptr(), tensor.dtype


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@dataclass(frozen=True)
class MadeFor:
    """Something made for a model, the state that it depends on, and how often it has been made."""

    basis: Basis
    made: Any
    times: int

    def __reduce__(self) -> tuple[object, ...]:
        """Become None in copies and pickles of the model, whose weights lie elsewhere."""
        return type(None), ()


def held_for(model: nn.Module, name: str, make: Callable[[], object], values: bool = False) -> MadeFor:
    """The result of `make`, kept as attribute `name` of the model until its state changes. values:
    whether the result depends on the values of weights."""
    with _making:
        found: MadeFor | None = model.__dict__.get(name)
        if found is None or not found.basis.holds():
            times = 1 if found is None else found.times + 1
            model.__dict__[name] = found = None  # its memory is free for the next
            made = make()  # which may put weights elsewhere
            model.__dict__[name] = found = MadeFor(Basis(model, values), made, times)
    return found
