"""Reads from `configs/*.yaml` what is compressible in each model family."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from pydantic import TypeAdapter

from blr.compressor.base.globs import matches, matches_any

# What families of transformers call layers of one block that read the same input
SIBLINGS = (
    {"q_proj", "k_proj", "v_proj"},
    {"query", "key", "value"},
    {"q_lin", "k_lin", "v_lin"},
    {"gate_proj", "up_proj"},
)


@dataclass(frozen=True)
class Group:
    """Linear layers `modules` of a block that read the same input. `residual` is the module whose input
    is the stream that `scale` times their output is added to, if known. `experts`: of a mixture's layers
    those of each expert, which read the tokens that chose it."""

    modules: tuple[str, ...]
    residual: str | None = None
    scale: float = 1.0
    experts: tuple[tuple[str, ...], ...] = ()

    @property
    def inputs(self) -> tuple[tuple[str, ...], ...]:
        """The layers by the input that they read."""
        return self.experts or (self.modules,)

    @property
    def lists(self) -> tuple[str, ...]:
        """The lists of experts' layers: ``experts.up_proj.0`` is in ``experts.up_proj``."""
        return tuple(name.rpartition(".")[0] for name in self.experts[0]) if self.experts else ()

    def within(self, names: Collection[str]) -> Group | None:
        """The part of the group among the modules `names` of a block; None if there is none."""
        modules = tuple(name for name in self.modules if name in names)
        return Group(modules) if modules else None


@dataclass(frozen=True)
class Family:
    """What is known of a model family. `modules` maps globs over names on disk to layer types, `shapes`
    globs over tensors to symbols. `heads` stay dense unless asked for; `transposed` weights are stored
    [in, out]. `blocks` is the list of blocks on disk, and `groups` are the layers of a block in order
    (without them there is no calibration). `attention` maps layer types that hold heads to their side
    ("out" or "in") and number. `prefix` begins module names in a checkpoint with a head. `experts`:
    whether they are compressed."""

    name: str
    model_types: tuple[str, ...]
    modules: dict[str, str]
    heads: tuple[str, ...]
    shapes: dict[str, list[str]]
    transposed: bool = False
    blocks: str | None = None
    groups: tuple[Group, ...] = ()
    attention: dict[str, tuple[str, str]] = field(default_factory=dict)
    prefix: str = ""
    experts: bool = False

    def layer_type(self, module: str, *, include_heads: bool = False) -> str | None:
        """The type of `module`; None if it is not compressible."""
        for glob, kind in self.modules.items():
            if matches(module, glob):
                return kind
        if include_heads and matches_any(module, self.heads):
            return module.rpartition(".")[2]
        return None


def find_family(model_type: str) -> Family | None:
    """The family that lists `model_type`; None if none does."""
    return next((family for family in families() if model_type in family.model_types), None)


@cache
def families() -> tuple[Family, ...]:
    names = sorted(f.name for f in files("blr.configs").iterdir() if f.name.endswith(".yaml"))
    tables = ((name.removesuffix(".yaml"), read_config_table(name)) for name in names)
    found = [{"name": name, **table} for name, table in tables if "model_types" in table]
    return TypeAdapter(tuple[Family, ...]).validate_python(found)


@cache
def short_names() -> dict[str, str]:
    """Short model names and the hub ids that they stand for."""
    return dict(read_config_table("hub.yaml"))


def read_config_table(name: str) -> Any:
    """The contents of a YAML file of `configs/`."""
    from ruamel.yaml import YAML

    return YAML(typ="safe").load(files("blr.configs").joinpath(name).read_text("utf-8"))
