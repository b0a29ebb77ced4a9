"""Every variant of every structure timed on this GPU, and the table written that says which to take.

Arms are timed as benchmarks are (interleaved, cold L2, gated by a float64 reference), the dense
layer among them; `rules.py` chooses among what came out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from blr.compressor.base.device import device_name, pick_device
from blr.compressor.base.errors import CapabilityError
from blr.compressor.base.progress import Progress
from blr.compressor.bench.layers import SEEDS
from blr.compressor.bench.precision import Precision
from blr.compressor.bench.results import WRONG, versions
from blr.compressor.bench.runner import Arm, Case, Runner
from blr.compressor.bench.shapes import Layer, specs_for
from blr.compressor.bench.stopping import stoppable
from blr.compressor.bench.subjects import (
    Subject,
    dense_kernel,
    gaussian,
    our_layout,
    random_factors,
    reference_of,
)
from blr.compressor.planning.roofline import kernels
from blr.compressor.recipe.tuned_table import read_table, table_text, write_table
from blr.compressor.structures.laid import laid_shape
from blr.compressor.structures.registry import STRUCTURES, TUNED
from blr.compressor.structures.specs import Spec
from blr.compressor.tune.float8 import Product, float8_candidates, float8_cases, layer_cases
from blr.compressor.tune.rules import Candidate, Point, merged, rules_of
from blr.kernels.common.available import has_triton, kernel_device
from blr.kernels.common.dispatch import Variant, forget
from blr.kernels.common.tables import DENSE, MOST, PRODUCT, REFERENCE

FULL = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)  # tokens that are measured
QUICK = (1, 8, 256, 4096)
FLOAT8 = PRODUCT  # beside the structures


def tuning_device(name: str) -> torch.device:
    """The GPU to tune, "auto" for the first. Raises CapabilityError where no kernels run."""
    device = pick_device(name)
    if device.type != "cuda":
        raise CapabilityError("tune: found no GPU, expected one that CUDA sees; run it on the GPU")
    if not has_triton():
        raise CapabilityError("tune: found no triton, expected it beside torch; install it")
    if not kernel_device(torch.empty(0, device=device)):
        raise CapabilityError(
            f"tune: kernels do not run on {device_name(device)}; expected an NVIDIA GPU of compute "
            "capability 8 or later, and BLR_KERNELS other than torch"
        )
    return device


def variants_of(structure: str) -> tuple[Mapping[str, Variant], Mapping[str, list[dict[str, Any]]]]:
    """`Structure.variants` by name."""
    return STRUCTURES[structure].variants()


def candidates(structure: str, n: int) -> list[Candidate]:
    """What is timed for n tokens: every variant meant for as many, with each configuration it lists."""
    table, configs = variants_of(structure)
    names = [name for name in table if n <= MOST.get(name, n)]
    meant = [name for name in names if name != REFERENCE]
    return [Candidate(name, config) for name in meant for config in configs.get(name, [{}])]


@dataclass
class Tuning:
    """One run over layers, structures, dtypes and numbers of tokens.

    Attributes:
        points: what was measured so far. refused: arms that gave wrong numbers.
    """

    runner: Runner
    precisions: Sequence[Precision]
    structures: Sequence[str] = TUNED
    tokens: Sequence[int] = FULL
    points: list[Point] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def cases(self, layers: Sequence[Layer]) -> Iterator[tuple[Case, Spec | Product, int]]:
        """Each layer in each structure, dtype and number of tokens, timed beside the dense layer."""
        plain = [name for name in self.structures if name != FLOAT8]
        for precision in self.precisions:
            for layer in layers:
                for spec in specs_for(layer, plain):
                    for n in self.tokens:
                        yield self._case(layer, spec, n, precision), spec, n
            if FLOAT8 in self.structures and precision.stored == "bfloat16":
                yield from float8_cases(layers, self.tokens, precision, self.runner)
                yield from layer_cases(layers, self.tokens, precision, self.runner)

    def run(self, case: Case, spec: Spec | Product, n: int) -> None:
        """Time one case and keep what came out right."""
        arms = case.arms()
        self.runner.run(arms, case.precision)
        times = {arm.row.arm: arm.row.ms for arm in arms if arm.row.ms is not None}
        wrong = (arm.row for arm in arms if arm.row.status == WRONG)
        self.refused += [f"{case.title}: {row.arm} is wrong ({row.note})" for row in wrong]
        del arms
        self.runner.release()
        if isinstance(spec, Product):
            structure, shape = spec
        else:
            structure, shape = STRUCTURES[spec.structure].folder, laid_shape(spec)
        self.points.append(Point(structure, shape, case.precision.stored, n, times))

    def _case(self, layer: Layer, spec: Spec, n: int, precision: Precision) -> Case:
        title = f"{layer.title} {spec.structure} {spec.describe()} {precision.name} n={n}"
        return Case(title, precision, lambda: list(self._arms(title, layer, spec, n, precision)))

    def _arms(self, title: str, layer: Layer, spec: Spec, n: int, precision: Precision) -> Iterator[Arm]:
        device = self.runner.device
        i, o = layer.in_features, layer.out_features
        x = cache(lambda: gaussian((n, i), 1, precision, device, SEEDS["x"]))

        def factors() -> tuple[Tensor, ...]:
            return our_layout(spec, random_factors(spec, precision, device, SEEDS["structured"]))

        def weight() -> tuple[Tensor, ...]:
            return (gaussian((o, i), i, precision, device, SEEDS["dense"]),)

        rest = {"model": layer.model, "layer": layer.name, "spec": spec.describe(), "cf": 1.0}
        rest |= {"in_features": i, "out_features": o, "n": n, "dtype": precision.name, "case": title}
        l2, call = self.runner.l2, reference_of("dense")
        fields = {**rest, "structure": "dense"}
        dense = Subject(fields, x, weight, call, [dense_kernel(n, i, o)], l2)
        yield dense.arm(DENSE, lambda: (call, dense.rotation))
        fields = {**rest, "structure": spec.structure}
        reference = reference_of(spec.structure)
        subject = Subject(fields, x, factors, reference, list(kernels(spec, n)), l2)
        table, _ = variants_of(spec.structure)
        for candidate in candidates(spec.structure, n):
            yield subject.arm(candidate.label, self._maker(subject, table, candidate))

    @staticmethod
    def _maker(subject: Subject, table: Mapping[str, Any], candidate: Candidate) -> Any:
        run, config = table[candidate.variant], dict(candidate.config)
        return lambda: (lambda x, *factors: run(x, *factors, **config), subject.rotation)


def measure(
    tuning: Tuning, layers: Sequence[Layer], seconds: float | None, progress: Progress
) -> str | None:
    """Run all cases, none of them started after `seconds`.

    Returns:
        Why it ended early, if it did. Raises Stopped on a stopping signal.
    """
    deadline = perf_counter() + (float("inf") if seconds is None else seconds)
    cases = list(tuning.cases(layers))
    with stoppable(), progress.layers(len(cases), "timing") as starting:
        for done, (case, spec, n) in enumerate(cases):
            if perf_counter() > deadline:
                return f"the seconds were spent after {done} of {len(cases)} cases"
            starting(case.title)
            tuning.run(case, spec, n)
    return None


def write_rules(tuning: Tuning, path: Path, gpu: str, device: torch.device) -> dict[str, Any]:
    """Write the rules of what was measured to `path`, over what a table there says of the same.

    Returns:
        Facts for the user. Raises RecipeError for a file there that is no table; OutputError,
        StorageError.
    """
    known = known_candidates(tuning.tokens)
    rules = merged(rules_of(tuning.points, known), read_table(path))
    found = versions()
    what = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    source = f"blr tune on {device_name(device)}, {what}"
    write_table(path, table_text(gpu, source, rules))
    forget()
    return {"output": str(path), "gpu": gpu, "rules": len(rules), "cases": len(tuning.points)}


def known_candidates(tokens: Sequence[int]) -> dict[str, Candidate]:
    """Every candidate that may have been timed, by label."""
    every = (c for s in TUNED for n in tokens for c in candidates(s, n))
    float8 = {label: Candidate(*chosen) for label, chosen in float8_candidates().items()}
    return {DENSE: Candidate(DENSE), **{candidate.label: candidate for candidate in every}, **float8}
