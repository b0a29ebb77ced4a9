"""The registry of structures, with one entry each. Importing it loads no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from blr.compressor.structures.specs import BlastSpec, KroneckerSpec, LowRankSpec, MonarchSpec, Spec
from blr.kernels.common.names import FOLDERS


@dataclass(frozen=True)
class LayerSizes:
    """Everything but the rank that a spec is made from: sizes, blocks, groups of heads and their
    side."""

    inputs: int
    outputs: int
    blocks: int = 1
    groups: int = 1
    side: str = "out"


def _lowrank(form: LayerSizes, rank: int) -> Spec:
    return LowRankSpec(form.inputs, form.outputs, rank, form.groups, form.side)


def _monarch(form: LayerSizes, rank: int) -> Spec:
    return MonarchSpec(form.inputs, form.outputs, form.blocks, rank // form.blocks)


def _blast(form: LayerSizes, rank: int) -> Spec:
    return BlastSpec(form.inputs, form.outputs, form.blocks, rank)


@dataclass(frozen=True)
class Structure:
    """The entry of one structure.

    solvers: names of its factorizers, the default first. of_rank: makes the spec of given sizes and
    rank; None where a chain of patterns takes the rank's place. blocks: the default number of blocks,
    None where there are none. stepped: whether a rank must be a multiple of the blocks. grouped: whether
    heads can be factorized on their own. linear: whether every row of W is a row of U times Zᵀ, with Z
    the factorizer's ``right_factor``, so that U can be solved for given the others. iterated: whether
    solvers take rounds.
    """

    spec: type[Spec]
    solvers: tuple[str, ...]
    of_rank: Callable[[LayerSizes, int], Spec] | None = None
    blocks: int | None = None
    stepped: bool = False
    grouped: bool = False
    linear: bool = False
    iterated: bool = True

    @property
    def ranked(self) -> bool:
        """Whether a rank is what a budget is spent on."""
        return self.of_rank is not None

    @property
    def name(self) -> str:
        """Its name in recipes, specs, files and on the command line."""
        return self.spec.structure

    def factorizer(self) -> ModuleType:
        """The module with ``fit`` and ``reconstruct`` (imports torch), called as the kernels' folder."""
        return import_module(f"blr.compressor.structures.{FOLDERS.get(self.name, self.name)}")


STRUCTURES: dict[str, Structure] = {
    entry.name: entry
    for entry in (
        Structure(LowRankSpec, ("closed-form",), _lowrank, grouped=True, linear=True, iterated=False),
        Structure(MonarchSpec, ("varpro",), _monarch, blocks=4, stepped=True, linear=True),
        Structure(BlastSpec, ("varpro", "precgd"), _blast, blocks=16, linear=True),
        Structure(KroneckerSpec, ("hierarchical",)),
    )
}
