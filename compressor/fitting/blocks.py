"""Runs a model one block at a time: only one block's weights are resident.

The model is built without weights; what lies before its first block (embeddings, position tables)
is loaded and run once, then each block is loaded, used and dropped. Works for any architecture
whose blocks are called with hidden states first, which `configs/*.yaml` names.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from blr.compressor.architectures import Family, Group
from blr.compressor.checkpoint.source import Source
from blr.compressor.errors import CapabilityError, InputError
from blr.compressor.fitting.storage import home
from blr.compressor.loading.discover import meta_model
from blr.compressor.loading.experts import merged_names, renamed
from blr.compressor.modeling.classes import module_name, module_names
from blr.compressor.parallel.processes import Processes
from blr.compressor.text.reading import Calibration

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # positional and named ones


@dataclass
class Batch:
    """Hidden states [m, w, d] on their way through the blocks, with the other arguments of blocks
    and the mask [m, w] of real tokens. `hidden` comes from the dense prefix, `student` from the
    compressed one. Both stay on the device that `start` put them on, and are empty in processes that
    do not own the batch. Blocks differ in what they are given where some attend to a window alone or
    rotate otherwise: `kinds` says which of `arguments` is whose (one is all blocks')."""

    hidden: Tensor
    student: Tensor
    arguments: tuple[Arguments, ...]
    mask: Tensor
    kinds: tuple[int, ...] = ()

    def given(self, block: nn.Module) -> Arguments:
        """What `block` gets beside its hidden states."""
        return self.arguments[self.kinds[getattr(block, NUMBER)] if len(self.arguments) > 1 else 0]

    def rows(self, values: Tensor) -> Tensor:
        """Those [n, d] of real tokens of `values` [m, w, d], or [m w, d] and [m, 1, w, d] as some
        modules take them; waits for no GPU."""
        flat = values.flatten(0, -2)
        return flat if self._real is None else flat[self._real.to(flat.device)]

    @cached_property
    def _real(self) -> Tensor | None:
        """Numbers of the real tokens; None if all are."""
        return None if bool(self.mask.all()) else self.mask.flatten().nonzero()[:, 0]

    @cached_property
    def tokens(self) -> int:
        """Real ones."""
        return int(self.mask.sum())


NUMBER = "_number"  # attribute of a loaded block: its place in the model
NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm", "embedding_norm")  # the last one's name
STATES = 3  # kinds of states of all batches that are kept: dense, student, what a block should give


class _Reached(Exception):
    """Thrown to stop a forward pass once a module's input is known."""


class BlockModel:
    """A checkpoint whose blocks are loaded one at a time in float32 on `device`.

    Raises CapabilityError for a family that `configs/` gives no blocks for.
    """

    def __init__(self, source: Source, family: Family | None, device: torch.device) -> None:
        if family is None or family.blocks is None:
            raise CapabilityError(
                f"{source.folder}: calibration needs the blocks of model type {source.model_type!r} in "
                "configs/; compress it without --calibration"
            )
        self.source, self.family, self.device = source, family, device
        self.model = meta_model(source, buffers=True).eval()
        self.names = self._loaded_names()  # name in the model -> stored tensor
        self.path = module_name(self.model, family.blocks)
        self.blocks: nn.ModuleList = self.model.get_submodule(self.path)

    def __len__(self) -> int:
        return len(self.blocks)

    def load_block(self, index: int) -> nn.Module:
        """Block `index` with its weights, a copy of its own."""
        block = self._load(copy.deepcopy(self.blocks[index]), f"{self.path}.{index}.")
        setattr(block, NUMBER, index)
        return block

    def load_rest(self) -> None:
        """Load everything but the blocks into the model."""
        for name in [name for name, _ in self.model.named_parameters()]:
            if name.startswith(f"{self.path}."):
                continue
            parent, _, leaf = name.rpartition(".")
            value = nn.Parameter(self._tensor(name), requires_grad=False)
            setattr(self.model.get_submodule(parent), leaf, value)
        self.model.tie_weights()
        for module in self.model.children():
            move_buffers(module, self.device)

    def groups(self, block: nn.Module) -> list[Group]:
        """The family's groups that are in `block`, by what of them it has."""
        names = {name for name, _ in block.named_modules()}
        return [part for group in self.family.groups if (part := group.within(names))]

    @torch.no_grad()
    def start(self, calibration: Calibration, processes: Processes | None = None) -> list[Batch]:
        """The hidden states that enter the first block; batches are dealt out to `processes`."""
        batches, place = list[Batch](), None
        tokens = calibration.tokens // (1 if processes is None else processes.count)
        for n, (ids, mask) in enumerate(zip(calibration.ids, calibration.masks, strict=True)):
            arguments: dict[str, Any] = {"input_ids": ids.to(self.device)}
            if not bool(mask.all()):
                arguments["attention_mask"] = mask.to(self.device)
            hidden, given, kinds = self._entering(arguments)
            size = STATES * tokens * hidden.shape[-1] * hidden.element_size()
            place = place or home(size, self.device)
            kept = hidden.to(place) if processes is None or processes.owns(n) else torch.empty(0)
            batches.append(Batch(kept, kept, given, mask.bool(), kinds))
        return batches

    def _entering(self, arguments: Any) -> tuple[Tensor, tuple[Arguments, ...], tuple[int, ...]]:
        """The states that enter the first block, and the arguments of blocks and their kinds."""
        kept: list[tuple[Tensor, Arguments]] = []

        def catch(module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
            kept.append(_parted(positional, named))
            if len(kept) == len(self.blocks):
                raise _Reached

        handles = [b.register_forward_pre_hook(catch, with_kwargs=True) for b in self.blocks]
        try:
            with _passed_by(self.blocks):
                self.model(**arguments, **_without_cache(self.model))
        except _Reached:
            pass
        finally:
            for handle in handles:
                handle.remove()
        found, kinds = _distinct([given for _, given in kept])
        return kept[0][0], found, kinds

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., v] of final hidden states [..., d]: last norm, head, its scale and its cap."""
        found: Tensor = self.model.get_output_embeddings()(self._normed(hidden))
        config = self.model.config.get_text_config(decoder=True)
        named = ("logit_scale", "logits_scaling", "final_logit_softcapping")
        factor, divisor, cap = (getattr(config, name, None) for name in named)
        if factor or divisor:  # Cohere multiplies, Granite divides
            found = found * ((factor or 1) / (divisor or 1))
        return found if cap is None else cap * torch.tanh(found / cap)

    def _normed(self, hidden: Tensor) -> Tensor:
        """What lies beside the blocks and behind them: the last norm, and OPT's projection."""
        beside = self.model.get_submodule(self.path.rpartition(".")[0])
        norm = next(getattr(beside, name) for name in NORMS if hasattr(beside, name))
        hidden = hidden if norm is None else norm(hidden)
        project = getattr(beside, "project_out", None)
        return hidden if project is None else project(hidden)

    def stored_module(self, name: str) -> str:
        """Name on disk of the module called `name` in the model."""
        return self.names[f"{name}.weight"].rpartition(".")[0]

    def _loaded_names(self) -> dict[str, str]:
        split = {name: name.rpartition(".") for name in self.source.entries}
        modules = module_names(self.model, (owner for owner, _, _ in split.values()))
        found = {f"{modules[owner]}.{leaf}": name for name, (owner, _, leaf) in split.items()}
        return renamed(self.model, self.source.entries) | found

    def _load(self, module: nn.Module, prefix: str) -> nn.Module:
        state = {name: self._weight(prefix + name) for name, _ in module.named_parameters()}
        module.load_state_dict(state, strict=False, assign=True)
        return move_buffers(module, self.device).requires_grad_(False)

    def _weight(self, name: str) -> Tensor:
        """A parameter of a block. Raises InputError if the checkpoint has it not."""
        if name in self.names or name in self.model.all_tied_weights_keys:
            return self._tensor(name)
        merged = merged_names(self.model, name, self.names)
        if not merged:
            found = f"{self.source.folder}: found no tensor for {name}"
            raise InputError(f"{found}; expected the whole model; copy the checkpoint again")
        return torch.stack([torch.cat([self._tensor(each) for each in parts]) for parts in merged])

    def _tensor(self, name: str) -> Tensor:
        stored = self.names.get(name)
        if stored is None:  # tied to a tensor that is stored
            stored = self.names.get(self.model.all_tied_weights_keys.get(name, ""))
        if stored is None:
            return torch.zeros(self.model.get_parameter(name).shape, device=self.device)
        tensor = self.source.load_tensor(self.source.entries[stored])
        return tensor.to(self.device, torch.float32)


def move_buffers(module: nn.Module, device: torch.device) -> nn.Module:
    """Move what is not on the meta device."""
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            if buffer is not None and buffer.device.type != "meta":
                setattr(part, name, buffer.to(device))
    return module


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
    return out[0] if isinstance(out, tuple) else out


def _parted(positional: tuple[Any, ...], named: dict[str, Any]) -> tuple[Tensor, Arguments]:
    """A block's hidden states, and what it is given beside them."""
    if positional:
        return positional[0], (positional[1:], named)
    named = dict(named)
    return named.pop("hidden_states"), ((), named)


@contextmanager
def _passed_by(blocks: nn.ModuleList) -> Iterator[None]:
    """Blocks hand their hidden states on as they are: only what each is given is asked for."""
    for block in blocks:
        block.forward = lambda *positional, **named: _parted(positional, named)[0]
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def _distinct(given: list[Arguments]) -> tuple[tuple[Arguments, ...], tuple[int, ...]]:
    """The arguments that differ, and which of them every block's are."""
    found, kinds = list[Arguments](), list[int]()
    for one in given:
        kinds.append(next((k for k, other in enumerate(found) if same(one, other)), len(found)))
        if kinds[-1] == len(found):
            found.append(one)
    return tuple(found), tuple(kinds)


def same(one: Any, other: Any) -> bool:
    """Whether two arguments are the same numbers, tensors inside of them included."""
    if one is other:
        return True
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.shape == other.shape and bool(torch.equal(one, other))
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return isinstance(one, bool | int | float | str) and one == other


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
        raise _Reached

    handle = block.get_submodule(last).register_forward_pre_hook(stop)
    try:
        run_block(block, hidden, batch)
    except _Reached:
        pass
    finally:
        handle.remove()


def _without_cache(model: Any) -> dict[str, Any]:
    return {"use_cache": False} if model.can_generate() else {}
