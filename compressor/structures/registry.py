"""The registry of structured families: one entry each, asked by whatever must know them all.

A new structure is its spec, its module here (``fit`` and ``reconstruct``) and an entry below, and its
formula in `modeling/modeling_blr.py`; kernels of its own are in `kernels/layers/<folder>`
(``reference.py``, ``op.py``, ``variants.py``). Importing this loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from blr.compressor.structures.specs import (
    BlastSpec,
    KroneckerSpec,
    LowRankSpec,
    MonarchSpec,
    PivotedSpec,
    Spec,
)
from blr.kernels.common.names import FOLDERS

if TYPE_CHECKING:
    from torch import Tensor

Call = Callable[..., "Tensor"]


@dataclass(frozen=True)
class LayerSizes:
    """What a spec follows from, beside its rank: sizes, blocks, groups of heads and their side."""

    inputs: int
    outputs: int
    blocks: int = 1
    groups: int = 1
    side: str = "out"


def _lowrank(form: LayerSizes, rank: int) -> Spec:
    return LowRankSpec(form.inputs, form.outputs, rank, form.groups, form.side)


def _pivoted(form: LayerSizes, rank: int) -> Spec:
    return PivotedSpec(form.inputs, form.outputs, rank)


def _monarch(form: LayerSizes, rank: int) -> Spec:
    return MonarchSpec(form.inputs, form.outputs, form.blocks, rank // form.blocks)


def _blast(form: LayerSizes, rank: int) -> Spec:
    return BlastSpec(form.inputs, form.outputs, form.blocks, rank)


@dataclass(frozen=True)
class Structure:
    """One structured family.

    `solvers` name its factorizers, the default first. `of_rank` makes the spec of a form and a rank,
    None where a chain of patterns takes the rank's place. `blocks` is the default number of blocks,
    None where it has none; `stepped` says that a rank is a multiple of the blocks, `grouped` that heads
    can be factorized on their own. `linear`: every row of W is one of U times Zᵀ, with Z
    ``right_factor`` of the factorizer, so that U can be solved for whatever the other factors are; of
    `pivots` every row that is none.
    `iterated` says that solvers take rounds, `pivots` that r of the outputs are those of the first
    product, which spares r² parameters, `tuned` that there are kernels to choose from.
    """

    spec: type[Spec]
    solvers: tuple[str, ...]
    of_rank: Callable[[LayerSizes, int], Spec] | None = None
    blocks: int | None = None
    stepped: bool = False
    grouped: bool = False
    linear: bool = False
    iterated: bool = True
    pivots: bool = False
    tuned: bool = True

    @property
    def ranked(self) -> bool:
        """Whether a rank is what a budget is spent on."""
        return self.of_rank is not None

    @property
    def name(self) -> str:
        """As recipes, specs, files and the command line write it."""
        return self.spec.structure

    @property
    def folder(self) -> str:
        """The folder of its kernels, the module of its factorizers, its name in kernel tables."""
        return FOLDERS.get(self.name, self.name)

    def factorizer(self) -> ModuleType:
        """The module with ``fit`` and ``reconstruct`` (imports torch)."""
        return import_module(f"blr.compressor.structures.{self.folder}")

    def reference(self, spec: Spec | None = None) -> Call:
        """The plain torch product f(x, *factors, bias=None), of `spec`'s groups if it has any."""
        module = import_module(f"blr.kernels.layers.{self.folder}.reference")
        if getattr(spec, "groups", 1) > 1:
            grouped = getattr(module, f"grouped_{self.folder}_linear")
            side = getattr(spec, "side", "out")
            return lambda x, *factors, bias=None: grouped(x, *factors, bias, side=side)
        return self._spread(getattr(module, f"{self.folder}_linear"))

    def product(self) -> Call:
        """The entry point of its kernels, f(x, *factors, bias=None)."""
        if not self.tuned:
            return self.reference()
        module = import_module(f"blr.kernels.layers.{self.folder}.op")
        return self._spread(getattr(module, f"{self.folder}_linear"))

    def variants(self) -> tuple[Mapping[str, Call], Mapping[str, list[dict[str, Any]]]]:
        """VARIANTS, taking factors one by one, and CONFIGS: for each variant with arguments worth
        trying the list of them."""
        op = import_module(f"blr.kernels.layers.{self.folder}.op")
        module = import_module(f"blr.kernels.layers.{self.folder}.variants")
        return op.variants(), getattr(module, "CONFIGS", {})

    def _spread(self, product: Callable[..., Tensor]) -> Call:
        """`product` with its factors one by one; that of a chain takes them as a list."""
        if self.ranked:
            return product
        return lambda x, *factors, bias=None: product(x, list(factors), bias)


STRUCTURES: dict[str, Structure] = {
    entry.name: entry
    for entry in (
        Structure(LowRankSpec, ("closed-form",), _lowrank, grouped=True, linear=True, iterated=False),
        Structure(
            PivotedSpec,
            ("closed-form",),
            _pivoted,
            linear=True,
            iterated=False,
            pivots=True,
            tuned=False,
        ),
        Structure(MonarchSpec, ("varpro",), _monarch, blocks=4, stepped=True, linear=True),
        Structure(BlastSpec, ("varpro", "precgd"), _blast, blocks=16, linear=True),
        Structure(KroneckerSpec, ("hierarchical",)),
    )
}
TUNED = tuple(name for name, entry in STRUCTURES.items() if entry.tuned)
