"""Blocks are run: one after the other, up to a layer, with hooks, or with something in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from blr.compressor.fitting.batches import Arguments, Batch

StandIn = Callable[[int, Tensor, tuple[Any, ...], dict[str, Any]], Any]


class Reached(Exception):
    """Thrown to stop a forward pass once a module's input is known."""


class Blocks(nn.Module):
    """All blocks in turn, run as one by `run_block`."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)


def run_block(block: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
    """The hidden output [m, w, d] of a loaded block, or of `Blocks`, for `hidden` on its device."""
    if isinstance(block, Blocks):
        for part in block.blocks:
            hidden = run_block(part, hidden, batch)
        return hidden
    positional, named = batch.given(block)
    out = block(hidden, *positional, **named)
    return out if isinstance(out, Tensor) else out[0]


def parted(positional: tuple[Any, ...], named: dict[str, Any]) -> tuple[Tensor, Arguments]:
    """A block's hidden states, and what it is given beside them."""
    if positional:
        return positional[0], (positional[1:], named)
    named = dict(named)
    return named.pop("hidden_states"), ((), named)


@contextmanager
def in_place_of(blocks: nn.ModuleList, run: StandIn) -> Iterator[None]:
    """Meanwhile every block is run by `run`, from its number, its states and all it is called with."""

    def stand_in(number: int) -> Callable[..., Any]:
        def forward(*positional: Any, **named: Any) -> Any:
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
def captured_inputs(block: nn.Module, names: list[str]) -> Iterator[dict[str, Tensor]]:
    """While active, the input of every named submodule is kept under its name when it runs."""
    kept: dict[str, Tensor] = {}
    handles = [
        block.get_submodule(name).register_forward_pre_hook(_keeper(kept, name)) for name in names
    ]
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()


def _keeper(kept: dict[str, Tensor], name: str) -> Callable[..., None]:
    def keep(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        kept[name] = inputs[0]

    return keep


def run_until(block: nn.Module, hidden: Tensor, batch: Batch, last: str) -> None:
    """Run the block until its submodule `last` has received its input."""

    def stop(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        raise Reached

    handle = block.get_submodule(last).register_forward_pre_hook(stop)
    try:
        run_block(block, hidden, batch)
    except Reached:
        pass
    finally:
        handle.remove()
