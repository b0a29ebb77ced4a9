"""Decides which parameters of a compressed model healing trains, and finds where they lie on disk.

Beside frozen weights W low-rank additions ``B A`` may be trained, and merged into W at the end (LoRA,
arXiv 2106.09685). Only layers whose structure can hold the sum exactly get them: dense weights, and low
rank and BLAST with r' more columns. Layers of other structures are trained themselves.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from blr.compressor.base.errors import CapabilityError, UsageError
from blr.compressor.checkpoint.source import Source, open_source
from blr.compressor.exporting.origin import Checkpoint
from blr.compressor.loading.loader import empty_model, merged_names, renamed
from blr.compressor.loading.native import native_errors, quiet_transformers
from blr.compressor.modeling.layers import StructuredLinear
from blr.compressor.modeling.modeling_blr import Numbered, module_names
from blr.compressor.recipe.settings import KINDS
from blr.compressor.structures.linalg import balance
from blr.compressor.structures.specs import BlastSpec, LowRankSpec, Spec

LEFT, RIGHT = "added_B", "added_A"


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


def _extends(spec: Spec) -> bool:
    """Whether the weight of a layer plus a low-rank product has the same structure."""
    known = (LowRankSpec.structure, BlastSpec.structure)
    return spec.structure in known and getattr(spec, "groups", 1) == 1


def growth(specs: Collection[Spec], rank: int) -> list[str]:
    """A note on layers that additions of `rank` make larger than dense ones; empty if there are none."""
    grown = [raised(spec, rank) for spec in specs if _extends(spec)]
    large = sum(spec.parameters > spec.dense_parameters for spec in grown)
    if not large:
        return []
    return [
        f"additions of rank {rank} make {large} of {len(specs)} layers larger than dense ones; take a "
        "lower --lora where size counts"
    ]


def check_takes_additions(student: Checkpoint, rank: int) -> None:
    """Raise CapabilityError for layers in few bits, UsageError for a `rank` above every layer's."""
    sizes = [min(spec.in_features, spec.out_features) for spec in student.specs.values()]
    if rank > max(sizes, default=rank):
        raise UsageError(
            f"--lora {rank}: expected at most {max(sizes)}, the largest rank of a layer; lower it"
        )
    if packed := sum(spec.quantized for spec in student.specs.values()):
        raise CapabilityError(
            f"{student.source.folder}: {packed} layers are stored in few bits, expected factors as they "
            "are for --lora; heal without it, which trains what is packed"
        )


def attach(model: PreTrainedModel, rank: int, seed: int) -> set[str]:
    """Give additions of `rank` to every linear layer of `model` that can hold them, except the head.
    They change nothing until `add_products`. Returns the layers' names."""
    generator, head = torch.Generator().manual_seed(seed), model.get_output_embeddings()
    found = set()
    for name, layer in model.named_modules():
        structured = isinstance(layer, StructuredLinear) and _extends(layer.spec)
        if layer is head or not (structured or type(layer) is nn.Linear):
            continue
        A = torch.randn(rank, layer.in_features, generator=generator) / layer.in_features**0.5
        layer.register_parameter(RIGHT, nn.Parameter(A.to(model.device)))
        zeros = torch.zeros(layer.out_features, rank, device=model.device)
        layer.register_parameter(LEFT, nn.Parameter(zeros))
        found.add(name)
    return found


def add_products(model: PreTrainedModel, names: set[str]) -> None:
    """Let the layers called `names` add their additions to what they compute."""
    for name in names:
        layer = model.get_submodule(name)
        layer.forward = partial(_forward, layer, layer.forward)


def _forward(layer: Any, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return forward(x) + linear(linear(x, layer.added_A), layer.added_B)


def is_addition(name: str) -> bool:
    """Whether the parameter called `name` belongs to an addition."""
    return name.rpartition(".")[2] in (LEFT, RIGHT)


def product_of(masters: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor] | None:
    """B [o, r'] and A [r', i] of a layer, balanced, float64, on the CPU; None without or if zero."""
    left, right = (masters.get(f"{name}.{part}") for part in (LEFT, RIGHT))
    if left is None or right is None or not bool(left.any()):
        return None
    B, A = left.detach().double().cpu(), right.detach().double().cpu()
    B, rows = balance(B, A.mT)
    return B, rows.mT


def extended(factor: Tensor, spec: Spec, name: str, B: Tensor, A: Tensor) -> Tensor:
    """The factor `name` with the r' columns that add ``B A`` to the layer's weight, float64."""
    rank, blocks = A.shape[0], getattr(spec, "blocks", None)
    if name == "S":
        added = B.new_ones(len(factor), len(factor), rank)
    else:
        added = {"U": B, "V": A.mT}[name]
        added = added.unflatten(0, (blocks, -1)) if blocks else added
    return torch.cat((factor.double(), added), -1)


def raised(spec: Spec, rank: int) -> Spec:
    """The spec of a layer whose rank is larger by `rank`."""
    assert isinstance(spec, LowRankSpec | BlastSpec)
    return replace(spec, rank=spec.rank + rank)
