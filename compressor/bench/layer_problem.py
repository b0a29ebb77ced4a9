"""Random layers to time: their data, what must come out, and how kernels are given them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
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
from blr.compressor.planning.roofline import Kernel, kernels
from blr.compressor.structures.laid import laid_rank, laid_shape
from blr.compressor.structures.registry import STRUCTURES
from blr.compressor.structures.specs import KroneckerSpec, Pattern, Spec

SEEDS = {"x": 0, "dense": 1, "structured": 2}


class LayerProblem:
    """One layer on one input. Nothing is allocated before it is asked for, so that a layer which does
    not fit is an arm without memory and not the end of the run.

    Args:
        timer: what its arms are timed by. row: of its arms, but for their names.
        x: gives the input [n, i], or [i, n] with `last`; cached by the caller.
        factors: gives the factors, or the weight of a dense layer.
        reference: f(x, *factors) for x [n, i]. work: of its roofline. last: the batch is the last axis.
    """

    def __init__(
        self,
        timer: KernelTimer,
        row: LayerRow,
        x: Callable[[], Tensor],
        factors: Callable[[], tuple[Tensor, ...]],
        reference: Call,
        work: Sequence[Kernel],
        last: bool = False,
    ) -> None:
        self.timer, self.row, self.last = timer, row, last
        self.x, self.reference = x, reference
        self.factors: Callable[[], tuple[Tensor, ...]] = cache(factors)
        row.floor_ms = timer.floor_ms(work)

    @cached_property
    def expected(self) -> Expected:
        """Some rows of the right output."""
        return expect(self.reference, self.x(), self.factors(), self.last)

    @cached_property
    def rotation(self) -> Rotation:
        """Input and canonical factors."""
        return self.rotate(self.factors())

    def rotate(self, weights: Sequence[Tensor]) -> Rotation:
        """The input and `weights`."""
        return Rotation((self.x(), *weights), self.timer.l2)

    def arm(
        self,
        name: str,
        make: Maker,
        *,
        variant: str | None = None,
        capture: bool = True,
        skip: str | None = None,
        limit: float | None = None,
    ) -> Arm:
        """An arm of this layer. `make` gives the call and its arguments."""
        row = replace(self.row, arm=name, variant=variant)
        return Arm(row, lambda: self.timer.checked(row, make, self.expected, limit, capture), skip)


def layer_problem(
    timer: KernelTimer, layer: Layer, spec: Spec | None, n: int, title: str
) -> LayerProblem:
    """A layer in a structure, dense for None, with random numbers for n tokens."""
    i, o, device, precision = layer.in_features, layer.out_features, timer.device, timer.precision
    name = "dense" if spec is None else spec.structure
    cf = 1.0 if spec is None else i * o / spec.parameters
    said = "" if spec is None else spec.describe()
    row = LayerRow(title, layer.model, layer.name, name, said, i, o, cf, n, precision.name, arm="")

    def factors() -> tuple[Tensor, ...]:
        if spec is None:
            return (gaussian((o, i), i, precision, device, SEEDS["dense"]),)
        return random_factors(spec, precision, device, SEEDS["structured"])

    x = cache(lambda: gaussian((n, i), 1, precision, device, SEEDS["x"]))
    work = [Kernel(n * i + i * o + n * o, n * i * o)] if spec is None else list(kernels(spec, n))
    return LayerProblem(timer, row, x, factors, reference_of(name), work)


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
    from blr.kernels.common.layout import relaid, spaced, with_zeros
    from blr.kernels.common.orders import order_of

    named = dict(zip((*spec.shapes(), *spec.indices()), factors, strict=True))
    orders = [(named[name], order_of(spec.structure, name, len(s))) for name, s in spec.shapes().items()]
    indices, width = [named[name] for name in spec.indices()], laid_rank(spec)
    if width == getattr(spec, "rank", 0):
        return (*(relaid(f, order) for f, order in orders), *indices)
    return tuple(with_zeros(spaced(f, order, width), width) for f, order in orders)


def our_variant(
    spec: Spec, n: int, precision: Precision, device: torch.device, last: bool = False
) -> str:
    """Which variant runs for n tokens: "reference" where no kernels do, else the tables' choice, for
    Kronecker-sparse layers on "auto" (and with `last` always) that of each factor."""
    from blr.kernels.common.available import kernel_device
    from blr.kernels.common.tables import choose

    here = kernel_device(torch.empty(0, dtype=precision.dtype, device=device))
    if not here or not STRUCTURES[spec.structure].tuned:
        return "reference"
    variant, _ = choose(spec.structure, laid_shape(spec), n, precision.dtype, device)
    if isinstance(spec, KroneckerSpec) and (last or variant == "auto"):
        return " ".join(factor_variant(pattern, n, precision, last) for pattern in spec.patterns)
    return str(variant)


def factor_variant(pattern: Pattern, n: int, precision: Precision, last: bool = False) -> str:
    """What the kernels of Kronecker-sparse factors choose by themselves, with the path if any."""
    from blr.kernels.layers.kronecker.choose import Problem as FactorProblem
    from blr.kernels.layers.kronecker.choose import choose

    kind = "half" if precision.dtype is not torch.float32 else "tf32" if precision.tf32 else "fp32"
    variant, config = choose(FactorProblem(*pattern, n, kind, last))
    return f"{variant}:{config['path']}" if "path" in config else variant
