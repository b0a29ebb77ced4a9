"""Loads and runs a model one block at a time, so that only one block's weights are in memory.

The model is built without weights. `configs/*.yaml` names the blocks, or they are found.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from blr.compressor.base.device import moved
from blr.compressor.base.errors import CapabilityError, InputError
from blr.compressor.base.processes import Processes
from blr.compressor.checkpoint.source import Source
from blr.compressor.fitting import block_discovery as discovery
from blr.compressor.fitting import block_passes as passes
from blr.compressor.fitting.block_passes import NUMBER, Arguments, Batch
from blr.compressor.fitting.experts import StackedExperts, experts_of
from blr.compressor.loading.loader import Parts, merged_names, renamed
from blr.compressor.loading.native import meta_model, quiet_transformers
from blr.compressor.modeling.modeling_blr import module_names, stacks_apart
from blr.compressor.planning.plan import Plan
from blr.compressor.planning.training_sizes import STATES
from blr.compressor.recipe.architectures import Family, Group
from blr.compressor.text.reading import Calibration

NORMS = (  # names of the norm behind the last block
    *("norm", "ln_f", "final_layernorm", "final_layer_norm", "embedding_norm"),
    *("norm_f", "final_norm", "layer_norm", "ln_out"),
)


class BlockModel:
    """A checkpoint whose blocks are loaded one at a time, in float32 on `device`.

    `handing` turns hidden states into what a block returns. `plain`: only a norm and a head follow the
    last block. `sample` is a batch on which groups and residual streams are found; `width` is how many
    tokens are run to find logits otherwise. Raises CapabilityError for a family without blocks.
    """

    def __init__(self, source: Source, family: Family, device: torch.device) -> None:
        if family.blocks is None:
            raise CapabilityError(
                f"{source.folder}: calibration runs text through one list of blocks, which model type "
                f"{source.model_type!r} has not; compress it without --text"
            )
        self.source, self.family, self.device = source, family, device
        self.model = meta_model(source, buffers=True).eval()
        self.names = self._loaded_names()  # name in the model -> stored tensor
        self.path = module_names(self.model, [family.blocks])[family.blocks]
        self.blocks: nn.ModuleList = self.model.get_submodule(self.path)
        self.handing: discovery.Handing = lambda hidden: hidden
        self.sample: Batch | None = None
        self.width = discovery.PROBE
        self.plain = bool(family.groups) or bool(self._behind())
        self._groups: dict[int, list[Group]] = {}
        self.stacks: dict[str, dict[str, list[str]]] = {}  # as of `stacks_apart`

    def __len__(self) -> int:
        return len(self.blocks)

    def load_block(self, index: int) -> nn.Module:
        """A copy of block `index` with its weights."""
        block = self._load(copy.deepcopy(self.blocks[index]), f"{self.path}.{index}.")
        vars(block).pop("forward", None)  # what stands in for it in the model
        for experts, stacks in self.stacks.items():
            if (name := experts.removeprefix(f"{self.path}.{index}.")) != experts:
                block.set_submodule(name, StackedExperts(block.get_submodule(name), stacks))
        setattr(block, NUMBER, index)
        return block

    def part_experts(self, plan: Plan) -> None:
        """Let each layer of an expert that `plan` has be a module of the blocks that are loaded."""
        layers = [planned.layer.module for planned in plan.layers if planned.layer.stack]
        self.stacks = stacks_apart(self.model, layers)
        homes = module_names(self.model, {module.rsplit(".", 2)[0]: None for module in layers})
        for module in layers:
            home, part, number = module.rsplit(".", 2)
            self.names[f"{homes[home]}.{part}.{number}.weight"] = f"{module}.weight"

    def load_rest(self) -> None:
        """Load everything but the blocks into the model."""
        made = self._converted.tensors("") if self._converted else {}
        for name in [name for name, _ in self.model.named_parameters()]:
            if name.startswith(f"{self.path}."):
                continue
            parent, _, leaf = name.rpartition(".")
            found = self._placed(made[name]) if name in made else self._tensor(name)
            value = nn.Parameter(found, requires_grad=False)
            setattr(self.model.get_submodule(parent), leaf, value)
        self.model.tie_weights()
        for module in self.model.children():
            move_buffers(module, self.device)

    def groups(self, block: nn.Module) -> list[Group]:
        """The groups of layers in `block` that read the same input: those of the family's table, else
        those found; with their residual streams once there is a `sample`. Last come those of experts."""
        names, number = {name for name, _ in block.named_modules()}, getattr(block, NUMBER)
        groups = [part for group in self.family.groups if (part := group.within(names))]
        experts = [group for found in experts_of(block).items() for group in expert_groups(*found)]
        if self.sample is None:
            return groups + experts
        if number not in self._groups:
            if self.family.groups:
                found = discovery.with_residuals(block, groups, self.sample)
            else:
                found = discovery.found_groups(block, self._listed(number, names), self.sample)
            self._groups[number] = found
        return self._groups[number] + experts

    def _listed(self, number: int, names: set[str]) -> set[str]:
        """Those of the modules `names` of a block that are layers to compress."""
        stored = {name: self.names.get(f"{self.path}.{number}.{name}.weight", "") for name in names}
        return {name for name, at in stored.items() if at.rpartition(".")[0] in self.family.modules}

    @torch.no_grad()
    def start(self, calibration: Calibration, processes: Processes | None = None) -> list[Batch]:
        """The batches that enter the first block, dealt out to `processes`."""
        batches, place = list[Batch](), None
        if self.sample is None:
            self._learn(calibration.ids[0][:1])
        tokens = calibration.tokens // (1 if processes is None else processes.count)
        for n, (ids, mask) in enumerate(zip(calibration.ids, calibration.masks, strict=True)):
            arguments = {"input_ids": ids.to(self.device)}
            if not bool(mask.all()):
                arguments["attention_mask"] = mask.to(self.device)
            batch = self.batch(arguments, mask.bool())
            size = STATES * tokens * batch.hidden.shape[-1] * batch.hidden.element_size()
            place = place or passes.home(size, self.device)
            owned = processes is None or processes.owns(n)
            kept = batch.hidden.to(place) if owned else torch.empty(0)
            batches.append(replace(batch, hidden=kept, student=kept, idle=calibration.idle))
        return batches

    def _learn(self, ids: Tensor) -> None:
        """Learn from a window of tokens [1, w] what the family's table does not say of its blocks."""
        if not self.family.groups:
            discovery.check_blocks(self, ids)
            self.width = ids.shape[1]
            return
        few = ids[:, : discovery.PROBE].to(self.device)
        self.sample = self.batch({"input_ids": few}, torch.ones(few.shape, dtype=torch.bool))

    def batch(self, arguments: dict[str, Tensor], mask: Tensor) -> Batch:
        """The batch that enters the first block for `arguments`; `mask` [m, w]: real tokens."""
        hidden, given = self._entering(arguments)
        found, kinds = passes.distinct(given)
        least = int(mask.sum(1).argmin())  # transformers may drop the mask of a full window
        by_itself = {name: values[least : least + 1] for name, values in arguments.items()}
        one = self._entering(by_itself)[1] if len(mask) > 1 else given
        alone = tuple(one[kinds.index(kind)] for kind in range(len(found)))
        return Batch(hidden, hidden, found, mask, kinds, alone)

    def run(self, arguments: dict[str, Tensor]) -> Any:
        """What the model returns, without a cache and without transformers' advice."""
        cache = {"use_cache": False} if self.model.can_generate() else {}
        with quiet_transformers():
            return self.model(**arguments, **cache)

    def _entering(self, arguments: dict[str, Tensor]) -> tuple[Tensor, list[Arguments]]:
        """The states that enter the first block, and for every block its other arguments."""
        kept: list[tuple[Tensor, Arguments]] = []

        def passed(
            number: int, entering: Tensor, positional: passes.Positional, named: passes.Named
        ) -> object:
            kept.append(passes.parted(positional, named))
            if len(kept) == len(self.blocks):
                raise passes.Reached
            return self.handing(entering)  # blocks hand their states on as they are

        with passes.in_place_of(self.blocks, passed), suppress(passes.Reached):
            self.run(arguments)
        return kept[0][0], [given for _, given in kept]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., v] of final hidden states [..., d], through the last norm, OPT's projection, the
        head, its scale and its cap."""
        if not self.plain:
            return discovery.logits_behind(self, hidden)
        for part in self._behind():
            hidden = part(hidden)
        found: Tensor = self.model.get_output_embeddings()(hidden)
        config = self.model.config.get_text_config(decoder=True)
        named = ("logit_scale", "logits_scaling", "final_logit_softcapping")
        factor, divisor, cap = (getattr(config, name, None) for name in named)
        if factor or divisor:  # Cohere multiplies, Granite divides
            found = found * ((factor or 1) / (divisor or 1))
        return found if cap is None else cap * torch.tanh(found / cap)

    def _behind(self) -> list[nn.Module]:
        """The last norm and the projection behind it, of those that the model has."""
        beside = self.model.get_submodule(self.path.rpartition(".")[0])
        norm = next((getattr(beside, name) for name in NORMS if hasattr(beside, name)), None)
        return [part for part in (norm, getattr(beside, "project_out", None)) if part is not None]

    @cached_property
    def _converted(self) -> Parts | None:
        """transformers' own conversion of stored tensors, for a model without a table that stores some
        parameters otherwise than it computes with them; None where it is not needed."""
        known = self.names.keys() | self.model.all_tied_weights_keys.keys()
        absent = [n for n, _ in self.model.named_parameters() if n not in known]
        if self.family.groups or all(merged_names(self.model, n, self.names) for n in absent):
            return None
        return Parts(self.source)

    def stored_module(self, name: str) -> str:
        """The name on disk of the module called `name` in the model."""
        return self.names[f"{name}.weight"].rpartition(".")[0]

    def _loaded_names(self) -> dict[str, str]:
        split = {name: name.rpartition(".") for name in self.source.entries}
        modules = module_names(self.model, (owner for owner, _, _ in split.values()))
        found = {f"{modules[owner]}.{leaf}": name for name, (owner, _, leaf) in split.items()}
        return renamed(self.model, self.source.entries) | found

    def _load(self, module: nn.Module, prefix: str) -> nn.Module:
        made = self._converted.tensors(prefix.removesuffix(".")) if self._converted else {}
        state = {n: self._weight(prefix + n, made) for n, _ in module.named_parameters()}
        held = module.state_dict().keys() - state.keys()  # buffers: those of floats that are stored
        stored = {name: self.source.entries.get(self.names.get(prefix + name, "")) for name in held}
        state |= {n: self._tensor(prefix + n) for n, entry in stored.items() if entry and entry.is_float}
        module.load_state_dict(state, strict=False, assign=True)
        return move_buffers(module, self.device).requires_grad_(False)

    def _weight(self, name: str, made: Mapping[str, Tensor]) -> Tensor:
        """A parameter of a block: converted (`made`) or as stored. Raises InputError without one."""
        if name in made:
            return self._placed(made[name])
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
        return self._placed(self.source.load_tensor(self.source.entries[stored]))

    def _placed(self, tensor: Tensor) -> Tensor:
        return moved(tensor, self.device, torch.float32)


def expert_groups(name: str, experts: StackedExperts) -> Iterator[Group]:
    """The groups of the layers of the experts called `name`, one for each stack that is taken apart."""
    for names in experts.parts.values():
        each = tuple(tuple(f"{name}.{part}.{n}" for part in names) for n in range(experts.count))
        yield Group(tuple(chain.from_iterable(each)), experts=each)


def move_buffers(module: nn.Module, device: torch.device) -> nn.Module:
    """Move the buffers of `module` to `device`, except those without values."""
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            if buffer is not None and buffer.device.type != "meta":
                setattr(part, name, buffer.to(device))
    return module
