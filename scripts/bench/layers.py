"""`blr bench layers`: the layers of published models, dense and in every structure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from blr.bench.checks import find_precision
from blr.bench.harness import Arm, Case, Harness
from blr.bench.layer_problem import (
    KernelTimer,
    LayerProblem,
    LayerRow,
    our_layout,
    our_variant,
    problem_of,
)
from blr.bench.options import LayerOptions
from blr.bench.packed_layers import packed_arms
from blr.bench.products import product_of
from blr.bench.results import BenchReport
from blr.bench.shapes import LayerShape, layer_work
from blr.bench.timing import ARM_SECONDS
from blr.compressor.base.device import pick_device
from blr.compressor.base.errors import UsageError
from blr.compressor.base.progress import Progress
from blr.compressor.structures.specs import Spec

DRAWN = 32  # tokens whose products take a CPU as long as drawing the weights
MOST = 4e11  # products of a call of every arm: minutes of a CPU, which makes eight calls


@dataclass(frozen=True)
class LayerCases:
    """`blr bench layers`.

    Attributes:
        compiled: numbers of tokens at which there are torch.compile arms. bits: of weights in few bits,
            which are timed alone and with a correction of `rank`.
    """

    timer: KernelTimer
    compiled: Collection[int] = ()
    bits: Sequence[int] = ()
    rank: int = 16

    def case(self, layer: LayerShape, specs: Sequence[Spec], n: int) -> Case:
        """The dense arms of a layer for n tokens and those of every spec, timed together."""
        title = f"{layer.title} n={n}"
        arms = partial(self._arms, title, layer, specs, n)
        return Case(title, lambda: list(arms()), compare, self.timer.case)

    def _arms(self, title: str, layer: LayerShape, specs: Sequence[Spec], n: int) -> Iterator[Arm]:
        x: Any = None
        for spec in (None, *specs):
            made = problem_of(self.timer, layer, spec, n, title)
            x = made.x = x or made.x  # one input for all
            yield from self._of(made, spec)
        for bits in self.bits:
            yield from packed_arms(problem_of(self.timer, layer, None, n, title), x, bits, self.rank)

    def _of(self, made: LayerProblem, spec: Spec | None) -> Iterator[Arm]:
        """Of the dense layer for None: plain, by torch.compile, ours."""
        plain, compiled = ("dense", "dense-compile") if spec is None else ("plain", "compile")
        yield made.arm(plain, lambda: (made.reference, made.rotation))
        if made.row.n in self.compiled:  # one compilation a shape: what is fastest, if it pays
            call = partial(torch.compile, made.reference, dynamic=False)
            yield made.arm(compiled, lambda: (call(), made.rotation))
        if spec is not None:
            product = product_of(spec.structure)
            yield made.arm(
                "ours",
                lambda: (product, made.rotate(our_layout(spec, made.factors()))),
                variant=our_variant(spec, made.row.n, self.timer.precision, self.timer.device),
            )


def compare(rows: Sequence[LayerRow]) -> None:
    """Fill in the speedup over the dense arm."""
    dense = next((row.ms for row in rows if row.arm == "dense"), None)
    for row in rows:
        if row.ms is not None and dense is not None:
            row.speedup = dense / row.ms


def run_layers(options: LayerOptions, progress: Progress) -> tuple[BenchReport, int]:
    """Time all that `options` name; the report, and the exit code. Raises UsageError or CapabilityError
    before anything is timed."""
    device = pick_device(options.device)
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device {options.device!r} cannot be timed; use cpu or cuda")
    precision, cuda = find_precision(options.dtype), device.type == "cuda"
    if options.bits and not cuda:
        raise UsageError("--bits needs a GPU: a CPU runs such layers otherwise; see bench decode")
    compiling = cuda if options.compiling is None else options.compiling
    work = layer_work(options, not cuda)
    cases = [(layer, specs, n) for layer, specs in work.specs for n in work.tokens]
    asked = {**asdict(options), "models": work.models, "n": work.tokens}
    report = BenchReport("bench layers", asked, LayerRow)
    harness = Harness(report, progress, device, options.repeats, options.seconds, ARM_SECONDS)
    timer = KernelTimer(device, precision, compiling=compiling)
    if not cuda and options.seconds is None:
        refuse_slow(cases)
    compiled = {min(work.tokens), max(work.tokens)} if compiling else ()
    made = LayerCases(timer, compiled, options.bits, options.rank)
    return report, harness.run([made.case(*case) for case in cases])


def refuse_slow(cases: Sequence[tuple[LayerShape, Sequence[Spec], int]]) -> None:
    """Raise UsageError for what takes a CPU minutes: who types the command as the README has it for a
    GPU does not expect a 7B's layers to take an hour."""
    products = sum(
        (n + DRAWN) * (layer.in_features * layer.out_features + 2 * sum(s.parameters for s in specs))
        for layer, specs, n in cases
    )
    if products > MOST:
        raise UsageError(
            f"{len(cases)} cases on a CPU take minutes; give less to time (smaller --models, fewer "
            "tokens or rows), a GPU, or --seconds N to start no case after N"
        )
