"""Where the parameters of a compressed model lie on disk: mostly under their own names, but norms of old
checkpoints under others, and the experts of a layer one by one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from blr.compressor.checkpoint.source import Source
from blr.compressor.loading.experts import merged_names, renamed
from blr.compressor.modeling.modeling_blr import module_names


class Places:
    """The tensors of a checkpoint by the parameters of `model` that they are loaded into.

    Attributes:
        names: name on disk to what the model calls it.
        merged: parameter to names on disk: for every row of it those that are one upon another there.
        held: the parameters that can be stored, by all their names.
    """

    def __init__(self, model: Any, stored: Collection[str]) -> None:
        every = dict(model.named_parameters(remove_duplicate=False))
        self.names = _named(model, stored, every.keys())
        loaded = {name: old for old, name in self.names.items()}
        self.merged: dict[str, list[list[str]]] = {}
        for name in every.keys() - loaded.keys():
            if parts := merged_names(model, name, loaded):
                self.merged[name] = [[loaded[each] for each in row] for row in parts]
        placed = {id(p) for name, p in every.items() if name in loaded or name in self.merged}
        self.held = {name for name, parameter in every.items() if id(parameter) in placed}

    def parted(self, values: Mapping[str, Tensor], source: Source) -> dict[str, Tensor]:
        """What is stored of the `values` of merged parameters, by name on disk."""
        found: dict[str, Tensor] = {}
        for name in self.merged.keys() & values.keys():
            for rows, parts in zip(values[name], self.merged[name], strict=True):
                heights = [source.entries[part].shape[0] for part in parts]
                found |= dict(zip(parts, rows.split(heights), strict=True))
        return found


def _named(model: Any, stored: Collection[str], known: Collection[str]) -> dict[str, str]:
    """What `model` calls the tensors `stored`: by its name for the module, or by that for the tensor
    where only this one is among the `known`."""
    modules = module_names(model, {name.rpartition(".")[0] for name in stored})
    whole = {old: new for new, old in renamed(model, stored).items()}
    prefix, found = f"{model.base_model_prefix}.", {}
    for name in stored:
        owner, _, leaf = name.rpartition(".")
        found[name] = f"{modules[owner]}.{leaf}"
        if found[name] not in known and name in whole:
            candidates = (whole[name], whole[name].removeprefix(prefix), prefix + whole[name])
            found[name] = next((each for each in candidates if each in known), whole[name])
    return found
