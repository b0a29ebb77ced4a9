"""Learns by running a model's blocks what its table in `configs/` does not say.

For every family: to which residual stream a layer's output is added. For a family without a table also
what a block returns beside its states, and which of its layers read the same tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from blr.compressor.base.errors import CapabilityError
from blr.compressor.base.quoting import named_line
from blr.compressor.fitting.block_passes import (
    Batch,
    Named,
    Positional,
    Reached,
    in_place_of,
    run_block,
    watched,
)
from blr.compressor.recipe.architectures import Group

if TYPE_CHECKING:
    from blr.compressor.fitting.blocks import BlockModel

PROBE = 32  # tokens of the text that is run
TOLERANCE = 1e-3  # largest difference of equal states, relative to their norm
SUM = 1e-6  # the same where a tensor is to be the sum of two others
FAILURES = (  # what a model may raise when its blocks are replaced
    *(ArithmeticError, AttributeError, LookupError),
    *(NotImplementedError, RuntimeError, TypeError, ValueError),
)

Handing = Callable[[Tensor], object]  # turns hidden states into what a block returns


def check_blocks(model: BlockModel, ids: Tensor) -> None:
    """Check on tokens `ids` [1, w] that running the blocks of `model` one by one gives the states
    and logits of the model. Learn what they return. Raises CapabilityError if not."""
    try:
        with torch.no_grad():
            _check(model, {"input_ids": ids[:, :PROBE].to(model.device)})
    except torch.OutOfMemoryError:
        raise
    except FAILURES as error:
        _refuse(model, f"cannot be run one by one ({named_line(error)})")


def _check(model: BlockModel, arguments: dict[str, Tensor]) -> None:
    model.handing = _handing(model, arguments)
    every = torch.ones(arguments["input_ids"].shape, dtype=torch.bool)
    model.sample = batch = model.batch(arguments, every)
    if batch.hidden.dim() != 3 or batch.hidden.shape[:2] != every.shape:
        _refuse(model, f"have states of shape {list(batch.hidden.shape)}, not one a token")
    state, count = batch.hidden, 0

    def run(number: int, entering: Tensor, positional: Positional, named: Named) -> object:
        nonlocal state, count
        if number != count or not _alike(state, entering):
            _refuse(model, f"are given something else than their own states (block {number})")
        block = model.load_block(number)
        model.groups(block)  # which it keeps
        state, count = run_block(block, state, batch), count + 1
        return block(*positional, **named)

    with in_place_of(model.blocks, run):
        whole = model.run(arguments)
    if count != len(model):
        _refuse(model, f"are {len(model)}, but {count} are run")
    if model.model.can_generate():
        model.plain = model.plain and _alike(model.logits(state), whole.logits)
        if not _alike(model.logits(state), whole.logits):
            _refuse(model, "are followed by what their states alone do not tell")


def logits_behind(model: BlockModel, hidden: Tensor) -> Tensor:
    """Logits [..., v] of final states [..., d]: the model runs with these as its last block's output."""
    last, rows = len(model) - 1, hidden if hidden.dim() == 3 else hidden[None]

    def run(part: Tensor) -> Tensor:
        def passed(number: int, entering: Tensor, positional: object, named: object) -> object:
            return model.handing(part if number == last else entering)

        ids = torch.zeros(part.shape[:2], dtype=torch.long, device=part.device)
        with in_place_of(model.blocks, passed):
            return model.run({"input_ids": ids}).logits

    found = torch.cat([run(part) for part in rows.split(model.width, 1)], 1)
    return found.view(*hidden.shape[:-1], -1)


def _handing(model: BlockModel, arguments: dict[str, Tensor]) -> Handing:
    """Learn from one run of the first block how to turn hidden states into what a block returns."""
    given: list[Any] = []

    def run(number: int, entering: Tensor, positional: Positional, named: Named) -> object:
        given.append(model.load_block(number)(*positional, **named))
        raise Reached

    with in_place_of(model.blocks, run), suppress(Reached):
        model.run(arguments)
    if not given:
        _refuse(model, "are not run")
    if isinstance(given[0], Tensor):
        return lambda hidden: hidden
    kind, rest = type(given[0]), given[0][1:]
    return lambda hidden: kind((hidden, *rest))


def _alike(mine: Tensor, wanted: object, tolerance: float = TOLERANCE) -> bool:
    if not isinstance(wanted, Tensor) or mine.shape != wanted.shape:
        return False
    return bool((mine - wanted).norm() <= tolerance * wanted.norm())


def _refuse(model: BlockModel, found: str) -> None:
    raise CapabilityError(
        f"{model.source.folder}: calibration runs a model block after block; those of model type "
        f"{model.source.model_type!r} {found}; compress it without --text"
    )


def found_groups(block: nn.Module, names: set[str], batch: Batch) -> list[Group]:
    """Find which of the layers `names` of a loaded block read the same tensor, in order of execution,
    and their residual streams. Leaves out layers that run more than once, read something else than the
    tokens of `batch`, or have no gradient."""
    with torch.enable_grad():
        seen = _Seen(block, names, batch)
        seen.output.sum().backward()
    times, found = Counter(name for name, _, _ in seen.layers), dict[int, list[str]]()
    m, w = batch.mask.shape
    for name, at, output in seen.layers:
        given = seen.inputs[at][1]
        of_tokens = given.shape[:-1] in ((m, w), (m * w,), (m, 1, w))
        if times[name] == 1 and of_tokens and output.grad is not None:
            found.setdefault(id(given), []).append(name)
    return [seen.group(tuple(names)) for names in found.values()]


@torch.no_grad()
def with_residuals(block: nn.Module, groups: list[Group], batch: Batch) -> list[Group]:
    """Add to each of `groups` the residual stream that its output is added to, where one is found."""
    seen = _Seen(block, {group.modules[0] for group in groups}, batch)
    return [seen.group(group.modules) for group in groups]


class _Seen:
    """What one run of a block shows: the `inputs` of its modules in order; for each of its `layers` the
    number of its input, and its output; the block's `output`. Tensors are kept: ids stay unique."""

    def __init__(self, block: nn.Module, names: set[str], batch: Batch) -> None:
        self.inputs: list[tuple[str, Tensor]] = []
        self.layers: list[tuple[str, int, Tensor]] = []
        modules = {name: module for name, module in block.named_modules() if name}
        layers = {name: modules[name] for name in names}
        state = batch.hidden.detach().requires_grad_(torch.is_grad_enabled())
        with watched(modules, self._enter), watched(layers, leave=self._leave):
            self.output = run_block(block, state, batch)

    def _enter(self, name: str, given: object) -> None:
        if isinstance(given, Tensor):
            self.inputs.append((name, given))

    def _leave(self, name: str, output: Tensor) -> None:
        if not self.inputs or self.inputs[-1][0] != name:
            return  # it was called by names, as no hook here sees
        if output.requires_grad:
            output.retain_grad()
        self.layers.append((name, len(self.inputs) - 1, output))

    def group(self, names: tuple[str, ...]) -> Group:
        """The group of the layers `names`, which read one input. A layer by itself gets the stream x
        that its output y is added to, if x + s y is read later or returned by the block."""
        layer = next((layer for layer in self.layers if layer[0] == names[0]), None)
        if layer is None or len(names) > 1:
            return Group(names)
        _, at, output = layer
        later = [*(given for _, given in self.inputs[at + 1 :]), self.output]
        sums = [z for z in later if z.shape == output.shape]
        streams = [(name, x) for name, x in self.inputs[:at] if x.shape == output.shape]
        scales = ((name, _scale(x, output, z)) for name, x in streams for z in sums)
        found = next(((name, scale) for name, scale in scales if scale), (None, 1.0))
        return Group(names, *found)


@torch.no_grad()
def _scale(x: Tensor, y: Tensor, z: Tensor) -> float | None:
    """The number s with z = x + s y; None if there is none but 0."""
    if _alike(x + y, z, SUM):
        return 1.0
    found = float(((z - x) * y).sum() / y.square().sum().clamp_min(1e-30))
    return found if abs(found) > SUM and _alike(x + found * y, z, SUM) else None
