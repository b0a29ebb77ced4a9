"""Finds the linear layers of a family that has no table in `configs/`, on the meta device."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.pytorch_utils import Conv1D

from blr.compressor.checkpoint.source import Source
from blr.compressor.loading.native import decoded, native_class, native_errors
from blr.compressor.modeling.modeling_blr import module_names
from blr.compressor.recipe.architectures import Family, find_family


def family_of(source: Source) -> Family:
    """The table that lists the model type, else one that is discovered. Raises as `discover_family`."""
    return find_family(source.model_type) or discover_family(source)


def discover_family(source: Source) -> Family:
    """Make a family's table from the model itself: all linear layers of its blocks, the others as heads.

    `blocks` is the one list of blocks of a model that reads text. Raises InputError for a model type or
    architecture that transformers does not know.
    """
    model = meta_model(source)
    inner, outer = linear_layers(model)
    transposed = any(isinstance(module, Conv1D) for module in inner.values())
    stored = {name.rpartition(".")[0] for name in source.entries if name.endswith(".weight")}
    found = module_names(model, sorted(stored))
    modules = {n: n.rpartition(".")[2] for n, module in found.items() if module in inner}
    heads = [n for n, module in found.items() if module in outer]
    alike = [n for n in heads if isinstance(outer[found[n]], Conv1D) == transposed]
    model_type = source.model_type
    blocks = _blocks(model, inner)
    return Family(model_type, (model_type,), modules, tuple(alike), {}, transposed, blocks)


def _blocks(model: Any, inner: Collection[str]) -> str | None:
    """The name of the one list of modules around all layers `inner` that read text; None if there is
    none."""
    if getattr(model, "main_input_name", "") != "input_ids":
        return None
    reads = getattr(model, "get_decoder", None)  # of what sees, too, the language model
    reader = reads() if reads else model
    names = {module: name for name, module in model.named_modules()}
    start = f"{names[reader]}." if names.get(reader) else ""
    lists = {name for name, module in model.named_modules() if type(module) is nn.ModuleList}
    read = [name for name in inner if name.startswith(start)] or inner
    within = [{up for up in _above(name) if up in lists} for name in read]
    shared = set.intersection(*within) if within else set()
    return min(shared, key=len, default=None)


def _above(name: str) -> list[str]:
    """The names of the modules around the module `name`."""
    return [name[: dot.start()] for dot in re.finditer(r"\.", name)]


def linear_layers(model: Any) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """The linear layers of the blocks of `model`, and all others, by name.

    Blocks are members of lists of modules in the base model. Layers for a task stand outside of the base
    model, poolers outside of lists. In a list of heads the members are layers, or classes named a head.
    """
    prefix = f"{model.base_model_prefix}." if model.base_model is not model else ""
    every = dict(model.named_modules(remove_duplicate=False))
    lists = {name for name, m in every.items() if isinstance(m, nn.ModuleList | nn.Sequential)}
    task = {module for name, module in every.items() if not name.startswith(prefix)}
    heads = {name for name, module in every.items() if type(module).__name__.endswith("Head")}
    found: tuple[dict[str, nn.Module], dict[str, nn.Module]] = ({}, {})
    for name, module in model.named_modules():
        if _is_linear(module):
            member = name.rpartition(".")[0]
            holders = set(_above(member))
            outside = module in task or not holders & lists or bool({*holders, member} & heads)
            found[outside][name] = module
    return found


def _is_linear(module: nn.Module) -> bool:
    """Whether a module computes x Wᵀ + bias: some subclasses of `nn.Linear` do not (Llama 4's
    router)."""
    if not isinstance(module, nn.Linear):
        return isinstance(module, Conv1D)
    return type(module).forward is nn.Linear.forward or _multiplies(type(module), module)


_MULTIPLIES: dict[type, bool] = {}  # by class


def _multiplies(kind: type, module: nn.Linear) -> bool:
    if kind not in _MULTIPLIES:
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(2, module.in_features, generator=draw)
        given = {name: torch.randn(p.shape, generator=draw) for name, p in module.named_parameters()}
        try:
            found = torch.func.functional_call(module, given, (x,))
            usual = nn.functional.linear(x, given["weight"], given.get("bias"))
            _MULTIPLIES[kind] = bool(torch.allclose(found, usual, rtol=1e-3, atol=1e-3))
        except Exception:  # whatever it asks for beside x, or gives beside y
            _MULTIPLIES[kind] = False
    return _MULTIPLIES[kind]


def meta_model(source: Source, *, buffers: bool = False) -> Any:
    """The native model of a checkpoint without weights; with `buffers`, those that no checkpoint stores
    are real. Raises InputError for a type that transformers does not know."""
    native = native_class(source)
    config = {key: value for key, value in decoded(source.config).items() if key != "model_type"}
    empty = init_empty_weights(include_buffers=False) if buffers else torch.device("meta")
    with native_errors(source), empty:
        return native(CONFIG_MAPPING[source.model_type].from_dict(config))
