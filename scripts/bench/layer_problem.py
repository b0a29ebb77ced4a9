"""Random layers to time: data, what must come out, how kernels are given them, checked and timed."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import sqrt
from statistics import median
from typing import Any

import torch
from torch import Tensor

from blr.bench.checks import Expected, Precision, WrongResult, computing_in, expect, poisoned, within
from blr.bench.harness import Arm, Checked
from blr.bench.products import reference_of
from blr.bench.results import REST, TIMES, Column, Timed, nested
from blr.bench.shapes import TUNED, LayerShape
from blr.bench.timing import Call, CpuSampler, CudaSampler, Rotation, event_ms
from blr.compressor.base.quoting import named_line
from blr.compressor.structures.specs import KroneckerSpec, Spec
from blr.kernels.common import tables
from blr.kernels.common.available import kernel_device
from blr.kernels.common.layout import relaid, spaced, wide_rank, with_zeros
from blr.kernels.common.orders import order_of
from blr.kernels.layers.kronecker.variants import choose as choose_for_factor

GRAPH_BELOW_MS = 2.0  # a longer call hides what its launches cost
RECOMPILATIONS = 256  # of one function by torch.compile, for as many shapes in one case
SEEDS = {"x": 0, "dense": 1, "structured": 2}
Maker = Callable[[], tuple[Call, Rotation]]  # gives f(*arguments) and its arguments


@dataclass
class LayerRow(Timed):
    """One arm of one layer.

    Attributes:
        case: rows of one case are compared: they have the same layer, n and dtype.
        arm: dense, dense-compile, plain, compile or ours.
        cf: dense over structured parameters. speedup: time of the dense arm over `ms`.
    """

    columns = (
        *(Column("structure", "structure"), Column("rank", "spec"), Column("arm", "arm")),
        *(Column("variant", "variant"), *TIMES, Column("x dense", "speedup", ".4g"), *REST),
    )
    title = "{0.case}"
    case: str
    model: str
    layer: str
    structure: str
    spec: str
    in_features: int
    out_features: int
    cf: float
    n: int
    dtype: str
    arm: str
    variant: str | None = None
    speedup: float | None = None

    @staticmethod
    def head(machine: Mapping[str, object]) -> str:
        clock = "by the host's clock" if machine["name"] == "cpu" else "without the host"
        return f"{machine['name']}: milliseconds a call, {clock}"

    @staticmethod
    def summary(rows: Sequence[LayerRow]) -> dict[str, Any]:
        """Medians over layers: of the speedup over dense by structure, arm and n, and of the time of
        other arms over that of ours on the same structure."""
        speedups, over = defaultdict[Any, list[float]](list), defaultdict[Any, list[float]](list)
        ours = {
            (r.case, r.structure, r.spec): r.ms for r in rows if r.arm == "ours" and r.ms is not None
        }
        for row in rows:
            if row.ms is None or row.structure == "dense":
                continue
            if row.speedup is not None:
                speedups[row.structure, row.arm, str(row.n)].append(row.speedup)
            base = ours.get((row.case, row.structure, row.spec))
            if base is not None and row.arm != "ours":
                over[row.structure, row.arm].append(row.ms / base)
        medians = [
            nested((*key, round(median(v), 4)) for key, v in found.items()) for found in (speedups, over)
        ]
        return {"speedup_over_dense": medians[0], "ours_over": medians[1]}


@dataclass
class KernelTimer:
    """Calls on one device in one precision. `compiling`: some arms use torch.compile."""

    device: torch.device
    precision: Precision
    compiling: bool = False
    l2: int = 0
    flush: Any = field(default=None, repr=False)
    pool: Any = None  # memory that the graphs of a case share

    def __post_init__(self) -> None:
        if self.device.type == "cuda":
            self.l2 = torch.cuda.get_device_properties(self.device).L2_cache_size
            self.flush = torch.empty(2 * self.l2, dtype=torch.uint8, device=self.device)

    @contextmanager
    def case(self) -> Iterator[None]:
        """Inside, the arms of one case are checked and timed; torch gives no advice about TF32 or beta
        layouts, for both are meant."""
        if self.compiling:
            torch.compiler.reset()  # the functions are the same in all cases, the shapes are not
            torch._dynamo.config.recompile_limit = RECOMPILATIONS
        self.pool = None if self.flush is None else torch.cuda.graph_pool_handle()
        with computing_in(self.precision), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
        self.pool = None

    def checked(self, make: Maker, expected: Expected) -> Checked:
        """A call run and compared."""
        (call, rotation), limit, note = make(), self.precision.gate, None
        error = within(expected.error(poisoned(call, rotation.arguments)), limit)
        if self.flush is None:
            return Checked(CpuSampler(call, rotation).sample, error, limit)
        self.flush.zero_()
        if event_ms(lambda: call(*rotation.arguments)) < GRAPH_BELOW_MS:
            try:
                return self._graph(call, rotation, expected, error)
            except (WrongResult, torch.OutOfMemoryError):
                raise
            except Exception as failure:
                note = f"no CUDA graph: {named_line(failure)}"
                torch.cuda.synchronize()
        return Checked(CudaSampler(call, rotation, self.flush).sample, error, limit, note)

    def _graph(self, call: Call, rotation: Rotation, expected: Expected, error: float) -> Checked:
        """By a graph whose replay, over an output filled with NaN, is right too."""
        sampler = CudaSampler(call, rotation, self.flush, self.pool)
        sampler.output.fill_(float("nan"))
        sampler.step()
        limit = self.precision.gate
        error = max(error, within(expected.error(sampler.output), limit))
        sampler.output = None
        return Checked(sampler.sample, error, limit)


@dataclass
class LayerProblem:
    """One layer on one input, neither allocated before it is asked for: a layer that does not fit is an
    arm without memory and not the end of the run.

    Attributes:
        row: of its arms, but for their names. x: gives the input [n, i], the same at every call.
        factors: likewise the factors, or the weight of a dense layer. reference: f(x, *factors).
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

    def arm(self, name: str, make: Maker, variant: str | None = None) -> Arm:
        """An arm of this layer."""
        row = replace(self.row, arm=name, variant=variant)
        return Arm(row, lambda: self.timer.checked(make, self.expected))


def problem_of(
    timer: KernelTimer, layer: LayerShape, spec: Spec | None, n: int, title: str
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
    """Factors whose product keeps the size of its input, as of `spec`."""
    return tuple(
        gaussian(shape, summed(name, shape), precision, device, seed + n)
        for n, (name, shape) in enumerate(spec.shapes().items())
    )


def summed(name: str, shape: Sequence[int]) -> int:
    """How many products each output of a factor sums."""
    if name.startswith("factors."):
        return shape[2]
    return {"U": shape[-1], "S": shape[0], "V": shape[-2]}[name]


def our_layout(spec: Spec, factors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The factors as layers on a GPU give them to kernels: in their order in memory, shapes canonical
    but for zeros behind ranks."""
    pairs = zip(factors, spec.shapes().items(), strict=True)
    orders, width = [(f, order_of(name, len(s))) for f, (name, s) in pairs], laid_rank(spec)
    if width == getattr(spec, "rank", 0):
        return tuple(relaid(f, order) for f, order in orders)
    return tuple(with_zeros(spaced(f, order, width), width) for f, order in orders)


def our_variant(spec: Spec, n: int, precision: Precision, device: torch.device) -> str:
    """Which variant runs for n tokens: "reference" where no kernels do, else the tables' choice, for
    Kronecker-sparse layers on "auto" that of each factor."""
    here = kernel_device(torch.empty(0, dtype=precision.dtype, device=device))
    if not here or spec.structure not in TUNED:
        return "reference"
    variant, _ = tables.choose(spec.structure, laid_shape(spec), n, precision.dtype, device)
    if isinstance(spec, KroneckerSpec) and variant == "auto":
        given = n, precision.dtype, precision.tf32
        return " ".join(choose_for_factor(pattern, *given) for pattern in spec.patterns)
    return str(variant)


def laid_rank(spec: Spec) -> int:
    """The rank with the zeros behind it, as kernels see it; 0 where there is no rank."""
    rank = int(getattr(spec, "rank", 0))
    whole = spec.structure in ("svd", "blast") and getattr(spec, "groups", 1) == 1
    return wide_rank(rank) if whole else rank


def laid_shape(spec: Spec) -> tables.Shape:
    """The sizes by which a table is asked. The blocks of a Kronecker-sparse layer are its factors."""
    blocks = len(getattr(spec, "patterns", ())) or getattr(spec, "blocks", 1)
    return tables.Shape(spec.in_features, spec.out_features, blocks, laid_rank(spec))
