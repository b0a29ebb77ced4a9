"""Runs batches of windows through single blocks, and shows what modules inside of them read and give."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from blr.compressor.planning.training_sizes import KEPT_SHARE

NUMBER = "_number"  # attribute of a loaded block: its number in the model
Positional = tuple[object, ...]
Named = dict[str, object]
Arguments = tuple[Positional, Named]


@dataclass
class Batch:
    """A batch of m windows between two blocks, with the `mask` [m, w] of real tokens.

    `hidden` [m, w, d] are the states of the dense model, `student` those of the compressed one; both
    are empty in processes that do not own the batch. `arguments` are the different sets of arguments
    that blocks get beside their states, and `kinds` has the number of each block's set; `alone` has the
    same sets for one window by itself. The first `idle` positions of a window predict no token of the
    text.
    """

    hidden: Tensor
    student: Tensor
    arguments: tuple[Arguments, ...]
    mask: Tensor
    kinds: tuple[int, ...] = ()
    alone: tuple[Arguments, ...] = ()
    idle: int = 0

    def given(self, block: nn.Module) -> Arguments:
        """The block's arguments beside its states, in fresh containers: a block may write to them."""
        kind = self.kinds[getattr(block, NUMBER)] if len(self.arguments) > 1 else 0
        # transformers' own containers are no dicts
        return tree_map(lambda x: copy.copy(x) if isinstance(x, Mapping) else x, self.arguments[kind])

    def rows(self, values: Tensor) -> Tensor:
        """The rows [n, d] that belong to real tokens, of `values` [m, w, d], [m w, d] or [m, 1, w, d];
        all of an expert's, which are fewer. It does not wait for a GPU."""
        flat = values.flatten(0, -2)
        chosen = len(flat) != self.mask.numel()
        return flat if self._real is None or chosen else flat[self._real.to(flat.device)]

    def predicting(self, values: Tensor) -> Tensor:
        """The rows [n, d] of `values` [m, w, d] that predict a token of the text."""
        return values[:, self.idle :].flatten(0, 1) if self.idle else self.rows(values)

    @cached_property
    def _real(self) -> Tensor | None:
        """The numbers of the real tokens; None if all tokens are real."""
        return None if bool(self.mask.all()) else self.mask.flatten().nonzero()[:, 0]

    @cached_property
    def tokens(self) -> int:
        """How many tokens are real."""
        return int(self.mask.sum())


def distinct(given: list[Arguments]) -> tuple[tuple[Arguments, ...], tuple[int, ...]]:
    """The different ones among the blocks' arguments, and for every block the number of its own."""
    found, kinds = list[Arguments](), list[int]()
    for one in given:
        kinds.append(next((k for k, other in enumerate(found) if same(one, other)), len(found)))
        if kinds[-1] == len(found):
            found.append(one)
    return tuple(found), tuple(kinds)


def same(one: Any, other: Any) -> bool:
    """Whether two arguments are equal, tensors inside of them included."""
    (mine, form), (theirs, other_form) = tree_flatten(one), tree_flatten(other)
    return form == other_form and all(map(_equal, mine, theirs))


def _equal(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or (one.shape == other.shape and torch.equal(one, other))
    alike = type(one) is type(other) and isinstance(one, bool | int | float | str)
    return one is other or (alike and one == other)


def window_rows(batch: Batch, windows: Tensor) -> Batch:
    """A batch of some windows of `batch`: its mask and arguments, without new hidden states."""
    count = len(batch.mask)
    if len(windows) == count:
        return batch

    def cut(value: object, alone: object) -> object:
        if not (isinstance(value, Tensor) and isinstance(alone, Tensor) and value.dim() and alone.dim()):
            return value
        if len(value) != count * len(alone):
            return value  # shared by all windows
        each = value.unflatten(0, (count, len(alone)))
        return each[windows.to(value.device)].flatten(0, 1)

    arguments = tree_map(cut, batch.arguments, batch.alone)
    return replace(batch, arguments=arguments, mask=batch.mask[windows])


def alike(batches: Sequence[Batch]) -> list[bool]:
    """For every batch, whether it differs from the first one only in its hidden states."""
    first = batches[0]
    return [
        bool(batch.mask.all())
        and batch.mask.shape == first.mask.shape
        and same(batch.arguments, first.arguments)
        and batch.kinds == first.kinds
        for batch in batches
    ]


Watch = Callable[[str, Any], None]
StandIn = Callable[[int, Tensor, Positional, Named], object]


class Reached(Exception):
    """Raised to stop a forward pass once it has come far enough."""


def run_block(block: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
    """The output states [m, w, d] of a loaded block, or of a list of them, for the states `hidden`."""
    if isinstance(block, nn.ModuleList):
        for part in block:
            hidden = run_block(part, hidden, batch)
        return hidden
    positional, named = batch.given(block)
    out = block(hidden, *positional, **named)
    return out if isinstance(out, Tensor) else out[0]


def parted(positional: tuple[Any, ...], named: dict[str, Any]) -> tuple[Tensor, Arguments]:
    """Split the arguments of a block into its hidden states and the rest."""
    if positional:
        return positional[0], (positional[1:], named)
    named = dict(named)
    return named.pop("hidden_states"), ((), named)


@contextmanager
def in_place_of(blocks: nn.ModuleList, run: StandIn) -> Iterator[None]:
    """While active, calls of `blocks` go to `run`: the block's number, states and arguments."""

    def stand_in(number: int) -> Callable[..., object]:
        def forward(*positional: object, **named: object) -> object:
            return run(number, parted(positional, named)[0], positional, named)

        return forward

    for number, block in enumerate(blocks):
        block.forward = stand_in(number)
    try:
        yield
    finally:
        for block in blocks:
            vars(block).pop("forward", None)


@contextmanager
def watched(
    modules: Mapping[str, nn.Module], enter: Watch | None = None, leave: Watch | None = None
) -> Iterator[None]:
    """While active, whenever one of `modules` runs, `enter` gets its name and first positional input,
    and `leave` its name and output."""

    def before(name: str, module: nn.Module, inputs: tuple[object, ...]) -> None:
        if enter is not None and inputs:
            enter(name, inputs[0])

    def behind(name: str, module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        if leave is not None:
            leave(name, output)

    handles = [m.register_forward_pre_hook(partial(before, n)) for n, m in modules.items()]
    handles += [m.register_forward_hook(partial(behind, n)) for n, m in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def captured_inputs(block: nn.Module, names: Iterable[str]) -> Iterator[dict[str, Tensor]]:
    """While active, the last input of every named submodule is kept under its name."""
    kept: dict[str, Tensor] = {}
    with watched({name: block.get_submodule(name) for name in names}, kept.__setitem__):
        yield kept


def run_until(block: nn.Module, hidden: Tensor, batch: Batch, last: str) -> Arguments:
    """Run the block until its submodule `last` is called; all that it is called with."""
    found: list[Arguments] = []

    def stop(module: nn.Module, positional: Positional, named: Named) -> None:
        found.append((positional, named))
        raise Reached

    handle = block.get_submodule(last).register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with suppress(Reached):
            run_block(block, hidden, batch)
    finally:
        handle.remove()
    return found[0]


def home(size: int, device: torch.device) -> torch.device:
    """The device that keeps a tensor of `size` bytes: `device` if that is a small part of its free
    memory, torch's own cache included, else the CPU."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if size <= KEPT_SHARE * (torch.cuda.mem_get_info(device)[0] + cached):
            return device
    return torch.device("cpu")
