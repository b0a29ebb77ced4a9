"""Random layers to time: their data, what must come out, and how kernels are given them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import sqrt

import torch
from torch import Tensor

from blr.compressor.bench.checks import Expected, Precision, expect
from blr.compressor.bench.harness import Arm
from blr.compressor.bench.kernel_timer import KernelTimer, Maker
from blr.compressor.bench.results import LayerRow
from blr.compressor.bench.shapes import Layer
from blr.compressor.bench.timing import Call, Rotation
from blr.compressor.structures.laid import laid_rank, laid_shape
from blr.compressor.structures.registry import STRUCTURES
from blr.compressor.structures.specs import KroneckerSpec, Pattern, Spec
from blr.kernels.common import tables
from blr.kernels.common.available import kernel_device
from blr.kernels.common.layout import relaid, spaced, with_zeros
from blr.kernels.common.orders import order_of
from blr.kernels.layers.kronecker.choose import Problem as FactorProblem
from blr.kernels.layers.kronecker.choose import choose as choose_for_factor

SEEDS = {"x": 0, "dense": 1, "structured": 2}


@dataclass
class LayerProblem:
    """One layer on one input. Nothing is allocated before it is asked for, so that a layer which does
    not fit is an arm without memory and not the end of the run.

    Attributes:
        timer: what its arms are timed by. row: of its arms, but for their names.
        x: gives the input [n, i], the same at every call. factors: likewise the factors, or the weight
            of a dense layer. reference: f(x, *factors).
    """

    timer: KernelTimer
    row: LayerRow
    x: Callable[[], Tensor]
    factors: Callable[[], tuple[Tensor, ...]]
    reference: Call

    @cached_property
    def expected(self) -> Expected:
        """Some rows of the right output."""
        return expect(self.reference, self.x(), self.factors())

    @cached_property
    def rotation(self) -> Rotation:
        """Input and canonical factors."""
        return self.rotate(self.factors())

    def rotate(self, weights: Sequence[Tensor]) -> Rotation:
        """The input and `weights`."""
        return Rotation((self.x(), *weights), self.timer.l2)

    def arm(self, name: str, make: Maker, variant: str | None = None, limit: float | None = None) -> Arm:
        """An arm of this layer. `make` gives the call and its arguments."""
        row = replace(self.row, arm=name, variant=variant)
        return Arm(row, lambda: self.timer.checked(make, self.expected, limit))


def layer_problem(
    timer: KernelTimer, layer: Layer, spec: Spec | None, n: int, title: str
) -> LayerProblem:
    """A layer in a structure, dense for None, with random numbers for n tokens."""
    i, o, device, precision = layer.in_features, layer.out_features, timer.device, timer.precision
    name, said, cf = "dense", "", 1.0
    if spec is not None:
        name, said, cf = spec.structure, spec.describe(), i * o / spec.parameters
    row = LayerRow(title, layer.model, layer.name, name, said, i, o, cf, n, precision.name, arm="")

    def factors() -> tuple[Tensor, ...]:
        if spec is None:
            return (gaussian((o, i), i, precision, device, SEEDS["dense"]),)
        return random_factors(spec, precision, device, SEEDS["structured"])

    x = lambda: gaussian((n, i), 1, precision, device, SEEDS["x"])  # noqa: E731
    return LayerProblem(timer, row, cache(x), cache(factors), reference_of(name))


def gaussian(
    shape: Sequence[int], terms: float, precision: Precision, device: torch.device, seed: int
) -> Tensor:
    """Normal numbers of variance 1/terms, so that a sum over `terms` products keeps the size."""
    random = torch.Generator(device).manual_seed(seed)
    made = torch.randn(tuple(shape), generator=random, device=device, dtype=precision.dtype)
    return made if terms == 1 else made.div_(sqrt(terms))


def random_factors(
    spec: Spec, precision: Precision, device: torch.device, seed: int
) -> tuple[Tensor, ...]:
    """Factors whose product keeps the size of its input, and indices of any order, as of `spec`."""
    factors = [
        gaussian(shape, _terms(name, shape), precision, device, seed + n)
        for n, (name, shape) in enumerate(spec.shapes().items())
    ]
    return (*factors, *(random_order(count, device) for (count,) in spec.indices().values()))


def random_order(count: int, device: torch.device) -> Tensor:
    """[count] int32, each number below `count` once."""
    random = torch.Generator().manual_seed(count)
    return torch.randperm(count, generator=random, dtype=torch.int32).to(device)


def _terms(name: str, shape: Sequence[int]) -> int:
    """How many products each output of a factor sums."""
    if name.startswith("factors."):
        return shape[2]
    return {"U": shape[-1], "S": shape[0], "V": shape[-2]}[name]


def dense_linear(x: Tensor, weight: Tensor) -> Tensor:
    """The dense layer: cuBLAS on a GPU."""
    return torch.nn.functional.linear(x, weight)


def reference_of(structure: str) -> Call:
    """The plain torch layer of a structure, or of "dense", as f(x, *factors)."""
    return dense_linear if structure == "dense" else STRUCTURES[structure].reference()


def our_layout(spec: Spec, factors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The factors as layers on a GPU give them to kernels: in their order in memory, shapes canonical
    but for zeros behind ranks; indices as they are."""
    named = dict(zip((*spec.shapes(), *spec.indices()), factors, strict=True))
    orders = [(named[name], order_of(spec.structure, name, len(s))) for name, s in spec.shapes().items()]
    indices, width = [named[name] for name in spec.indices()], laid_rank(spec)
    if width == getattr(spec, "rank", 0):
        return (*(relaid(f, order) for f, order in orders), *indices)
    return tuple(with_zeros(spaced(f, order, width), width) for f, order in orders)


def our_variant(spec: Spec, n: int, precision: Precision, device: torch.device) -> str:
    """Which variant runs for n tokens: "reference" where no kernels do, else the tables' choice, for
    Kronecker-sparse layers on "auto" that of each factor."""
    here = kernel_device(torch.empty(0, dtype=precision.dtype, device=device))
    if not here or not STRUCTURES[spec.structure].tuned:
        return "reference"
    variant, _ = tables.choose(spec.structure, laid_shape(spec), n, precision.dtype, device)
    if isinstance(spec, KroneckerSpec) and variant == "auto":
        return " ".join(factor_variant(pattern, n, precision) for pattern in spec.patterns)
    return str(variant)


def factor_variant(pattern: Pattern, n: int, precision: Precision) -> str:
    """What the kernels of Kronecker-sparse factors choose by themselves, with the path if any."""
    kind = "half" if precision.dtype is not torch.float32 else "tf32" if precision.tf32 else "fp32"
    variant, config = choose_for_factor(FactorProblem(*pattern, n, kind))
    return f"{variant}:{config['path']}" if "path" in config else variant
