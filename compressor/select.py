"""The compressible layers of a checkpoint and which of them a recipe selects, from headers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from blr.compressor.checkpoint.header import TensorEntry
from blr.compressor.checkpoint.shapes import evaluate
from blr.compressor.checkpoint.source import Source
from blr.compressor.errors import InputError, UsageError
from blr.compressor.families import Family, find_family
from blr.compressor.recipe import Recipe

Shape = tuple[int, int]  # (out_features, in_features)


@dataclass(frozen=True)
class Layer:
    """A compressible linear layer: its name on disk, reported type and stored weight.

    `head_side` says whether its outputs or inputs are `heads` attention heads side by side.
    """

    module: str
    type: str
    entry: TensorEntry
    transposed: bool  # stored [in, out]
    heads: int = 1
    head_side: str = "out"

    @property
    def shape(self) -> Shape:
        """(out_features, in_features)."""
        rows, columns = self.entry.shape
        return (columns, rows) if self.transposed else (rows, columns)


def find_layers(source: Source, recipe: Recipe, notes: list[str]) -> list[Layer]:
    """Every compressible layer of `source`, in the order of its tensors.

    Raises InputError when there are none, or all are stored as integers or in 8 bits.
    """
    family = find_family(source.config["model_type"])
    if family is None:
        from blr.compressor.modeling.discover import discover_family

        family = discover_family(source)
        notes.append(
            f"model type {source.config['model_type']!r} has no table in configs/: "
            f"compressing the {len(family.modules)} linear layers found in the model"
        )
    heads = bool(recipe.include)
    found = (_layer(source, entry, family, heads) for entry in source.entries.values())
    layers = [layer for layer in found if layer is not None]
    if not layers:
        raise InputError(
            f"{source.folder}: found no linear layer of a {source.model_type!r} model; "
            "take config.json and weights from the same model"
        )
    if kept := [layer.entry for layer in layers if not layer.entry.is_float]:
        notes.append(_untouched(kept))
        if len(kept) == len(layers):
            raise InputError(
                f"{source.folder}: {notes[-1]}; take a checkpoint of floating-point weights"
            )
    return [layer for layer in layers if layer.entry.is_float]


def _untouched(entries: list[TensorEntry]) -> str:
    dtypes = ", ".join(sorted({entry.dtype for entry in entries}))
    return (
        f"{len(entries)} weights stored as {dtypes} are copied untouched, not compressed, "
        f"from {entries[0].name} on"
    )


def _layer(source: Source, entry: TensorEntry, family: Family, heads: bool) -> Layer | None:
    module, _, kind = entry.name.rpartition(".")
    if kind != "weight" or len(entry.shape) != 2:
        return None
    layer_type = family.layer_type(module, include_heads=heads)
    if layer_type is None:
        return None
    side, symbol = family.attention.get(layer_type, ("out", "1"))
    layer = Layer(module, layer_type, entry, family.transposed, evaluate(source, symbol) or 1, side)
    split = layer.shape[0 if side == "out" else 1]
    return layer if split % layer.heads == 0 else Layer(module, layer_type, entry, family.transposed)


def select(layers: Sequence[Layer], recipe: Recipe) -> list[Layer]:
    """The layers that `include` matches (all if empty) and `exclude` does not.

    Raises UsageError when that leaves none, or when a glob of the recipe or one of its rules
    matches nothing.
    """
    names = [layer.module for layer in layers]
    for glob in (*recipe.include, *recipe.exclude, *(rule.match for rule in recipe.rules)):
        if not any(fnmatchcase(name, glob) for name in names):
            example = f", for example {names[0]!r}" if names else ""
            raise UsageError(
                f"the glob {glob!r} matches no compressible layer: globs match module names{example}"
            )
    chosen = [
        layer
        for layer in layers
        if (not recipe.include or _matches(layer.module, recipe.include))
        and not _matches(layer.module, recipe.exclude)
    ]
    if not chosen:
        raise UsageError("no layer is left to compress: loosen --include or --exclude")
    return chosen


def _matches(name: str, globs: list[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)
