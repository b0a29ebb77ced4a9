"""Decides which parameters of a compressed model healing trains, and finds where they lie on disk.

Most lie under their own names. Norms of old checkpoints have other names, and the experts of a layer
are stored one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from blr.compressor.base.errors import UsageError
from blr.compressor.checkpoint.source import Source, open_source
from blr.compressor.exporting.origin import Checkpoint
from blr.compressor.healing.additions import is_addition
from blr.compressor.loading.loader_names import merged_names, renamed
from blr.compressor.loading.native import native_errors, quiet_transformers
from blr.compressor.loading.streamed import empty_model
from blr.compressor.modeling.layers import StructuredLinear
from blr.compressor.modeling.modeling_blr import Numbered, module_names
from blr.compressor.recipe.settings import KINDS

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_has_kinds(checkpoint: Checkpoint, kinds: tuple[str, ...]) -> None:
    """Raise UsageError, from headers, if `checkpoint` has nothing of the `kinds` to train."""
    if "factors" in kinds and checkpoint.specs:
        return
    source = open_source(checkpoint.source.folder)
    with native_errors(source), quiet_transformers():
        model = empty_model(source)
    _check_any(model, kinds, checkpoint.specs)


def choose(
    student: PreTrainedModel,
    kinds: tuple[str, ...],
    packed: Collection[str],
    added: set[str],
    held: Collection[str],
) -> list[str]:
    """The names of the parameters of these `kinds` that are trained; gradients are switched on for
    them. `packed` are factors in few bits, `added` layers with additions, `held` the names that the
    checkpoint can store. Raises UsageError if there are none."""
    named = dict(student.named_parameters())
    plain = [n for n in named if n not in packed and _is_trained(student, n, kinds, added)]
    placed = [name for name in plain if name in held or is_addition(name)]
    found = [*placed, *(packed if "factors" in kinds else ())]
    if not found and not plain:
        _check_any(student, kinds, packed)
    if not found:
        raise UsageError(
            f"--train {','.join(kinds)}: the checkpoint stores {plain[0]} otherwise than the model "
            f"computes with it; leave that kind out"
        )
    for name in found:
        named[name].requires_grad_()
    return found


def kind_of(model: PreTrainedModel, name: str) -> str:
    """Which of `settings.KINDS` the parameter called `name` is."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    if isinstance(module, Numbered):
        return "factors"
    if isinstance(module, StructuredLinear) and leaf != "bias":
        return "factors"
    if "Norm" in type(module).__name__:
        return "norms"
    if leaf == "bias":
        return "biases"
    if isinstance(module, nn.Embedding):
        return "embeddings"
    return "head" if module is model.get_output_embeddings() else "dense"


def _check_any(model: PreTrainedModel, kinds: tuple[str, ...], factored: Collection[str]) -> None:
    """Raise UsageError if `model` has nothing of the `kinds`; `factored`: what has factors."""
    present = {kind_of(model, name) for name, _ in model.named_parameters()}
    present |= {"factors"} if factored else set()
    if not present & {*kinds}:
        raise UsageError(
            f"--train {','.join(kinds)}: the model has none of these; expected some of "
            f"{', '.join(kind for kind in KINDS if kind in present)}"
        )


def _is_trained(student: PreTrainedModel, name: str, kinds: tuple[str, ...], added: set[str]) -> bool:
    """Whether a parameter is trained; of layers with additions only these are."""
    if is_addition(name):
        return True
    kind = kind_of(student, name)
    return kind in kinds and not (kind in ("factors", "dense") and name.rpartition(".")[0] in added)


class StoredNames:
    """Where the parameters of `model` lie on disk: `names` maps names on disk to names in the model,
    `merged` maps parameters to rows of names on disk, `held` has all names that can be stored."""

    def __init__(self, model: PreTrainedModel, stored: Collection[str]) -> None:
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
        """The stored tensors that merged parameters are made of, by name on disk, from the parameters'
        `values`."""
        found: dict[str, Tensor] = {}
        for name in self.merged.keys() & values.keys():
            for rows, parts in zip(values[name], self.merged[name], strict=True):
                heights = [source.entries[part].shape[0] for part in parts]
                found |= dict(zip(parts, rows.split(heights), strict=True))
        return found


def _named(model: PreTrainedModel, stored: Collection[str], known: Collection[str]) -> dict[str, str]:
    """The names in `model` of the tensors `stored`: found by module, or by tensor if only that name is
    `known`."""
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
