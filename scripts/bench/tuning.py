"""Every variant of every structure timed on this GPU, and the table written that says which to take.

Arms are timed as benchmarks are (interleaved, cold L2, gated by a float64 reference), the dense
layer among them; `tuning_rules.py` chooses among what came out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from blr.bench.harness import Arm, Case
from blr.bench.layer_problem import (
    KernelTimer,
    LayerProblem,
    LayerRow,
    laid_shape,
    our_layout,
    problem_of,
)
from blr.bench.products import variants_of
from blr.bench.results import WRONG, versions
from blr.bench.shapes import TUNED, LayerShape, specs_for
from blr.bench.tuned_files import table_text, write_table
from blr.bench.tuning_rules import Candidate, Measured, TunedPoint, fastest, merged, rules_of
from blr.compressor.base.device import device_name, pick_device
from blr.compressor.base.errors import CapabilityError
from blr.compressor.recipe.tuned_table import read_table
from blr.compressor.structures.specs import Spec
from blr.kernels.common.available import has_triton, kernel_device
from blr.kernels.common.dispatch import forget
from blr.kernels.common.names import FOLDERS
from blr.kernels.common.tables import DENSE, MOST, REFERENCE

FULL = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)  # tokens that are measured
QUICK = (1, 8, 256, 4096)


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


def tiles(rows: int, cols: int, stages: int = 4, warps: int = 4) -> dict[str, Any]:
    """The same tiles for both products of the kernels for few tokens."""
    one = {"BR": rows, "BK": cols, "STAGES": stages, "num_warps": warps}
    return {"first": one, "second": dict(one)}


def configs_of(structure: str, variant: str, n: int) -> list[dict[str, Any]]:
    """The arguments of a variant that are worth trying for n tokens: tiles for a few, else none."""
    if variant != "narrow" or n == 1:
        return [{}]
    found = [{}, tiles(32, 128), tiles(64, 128)]
    if n <= 16:
        found += [tiles(16, 256), tiles(16, 256, 5, 1)]
    else:
        found += [tiles(64, 64, 5), tiles(128, 64, warps=8)]
    if structure == "svd":  # whose first product has few programs: sums are split
        found += [{**c, "first": {**c["first"], "SPLIT": 4}, "add": "between"} for c in found[1:3]]
    return found


def candidates(structure: str, n: int) -> list[Candidate]:
    """What is timed for n tokens: every variant meant for as many, with its `configs_of`."""
    names = [name for name in variants_of(structure) if n <= MOST.get(name, n) and name != REFERENCE]
    return [Candidate(name, config) for name in names for config in configs_of(structure, name, n)]


@dataclass
class Tuning:
    """One run over layers, structures, dtypes and numbers of tokens.

    Attributes:
        timers: one a precision. points: what was measured so far. refused: arms that gave wrong numbers.
    """

    timers: Sequence[KernelTimer]
    structures: Sequence[str] = TUNED
    tokens: Sequence[int] = FULL
    points: list[TunedPoint] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def cases(self, layers: Sequence[LayerShape]) -> list[Case]:
        """Each layer in each structure, dtype and number of tokens, timed beside the dense layer; what
        comes out right is kept as a point."""
        return [self.kept(*each) for each in self._cases(layers)]

    def kept(self, case: Case, measured: Measured) -> Case:
        """A case of which a point is made once it is timed. `measured`: what tables call it."""
        return replace(case, finish=partial(self._keep, case.title, measured), parts=False)

    def _cases(self, layers: Sequence[LayerShape]) -> Iterator[tuple[Case, Measured]]:
        for timer in self.timers:
            for layer in layers:
                for spec in specs_for(layer, self.structures):
                    for n in self.tokens:
                        yield self.case(timer, layer, spec, n)

    def case(self, timer: KernelTimer, layer: LayerShape, spec: Spec, n: int) -> tuple[Case, Measured]:
        """Every candidate for one layer in one structure, and what tables call it."""
        title = f"{layer.title} {spec.structure} {spec.describe()} {timer.precision.name} n={n}"
        arms = partial(self._arms, timer, layer, spec, n, title)
        folder, dtype = FOLDERS[spec.structure], timer.precision.stored
        measured = folder, laid_shape(spec), dtype, n
        return Case(title, lambda: list(arms()), around=timer.case), measured

    def _keep(self, title: str, measured: Measured, rows: Sequence[LayerRow]) -> None:
        wrong = (row for row in rows if row.status == WRONG)
        self.refused += [f"{title}: {row.arm} is wrong ({row.note})" for row in wrong]
        times = {row.arm: row.ms for row in rows if row.ms is not None}
        self.points.append(TunedPoint(*measured, times))

    def _arms(
        self, timer: KernelTimer, layer: LayerShape, spec: Spec, n: int, title: str
    ) -> Iterator[Arm]:
        dense = problem_of(timer, layer, None, n, title)
        yield dense.arm(DENSE, lambda: (dense.reference, dense.rotation))
        made = problem_of(timer, layer, spec, n, title)
        canonical = made.factors
        made.x, made.factors = dense.x, lambda: our_layout(spec, canonical())
        table = variants_of(spec.structure)
        for candidate in candidates(spec.structure, n):
            yield made.arm(candidate.label, _maker(made, table, candidate))

    def winners(self) -> list[dict[str, Any]]:
        """One entry a point, for people: the winner, its time, and the dense layer's."""
        rows = []
        for point in self.points:
            label, ms = fastest(point) or (None, None)
            measured = {**point.shape._asdict(), "dtype": point.dtype, "n": point.n}
            times = {"variant": label, "ms": ms, "dense_ms": point.times.get(DENSE)}
            rows.append({"structure": point.structure, **measured, **times})
        return rows

    def write(self, path: Path, gpu: str, device: torch.device) -> dict[str, Any]:
        """Write the rules of what was measured to `path`, over what a table there says of the same.

        Returns:
            Facts for the user. Raises RecipeError for a file there that is no table; OutputError,
            StorageError.
        """
        rules = merged(rules_of(self.points, known_candidates(self.tokens)), read_table(path))
        what = ", ".join(f"{name} {version}" for name, version in versions().items() if version)
        write_table(path, table_text(gpu, f"blr tune on {device_name(device)}, {what}", rules))
        forget()
        return {"output": str(path), "gpu": gpu, "rules": len(rules), "cases": len(self.points)}


def _maker(made: LayerProblem, table: Mapping[str, Any], candidate: Candidate) -> Any:
    run, config = table[candidate.variant], dict(candidate.config)
    return lambda: (lambda x, *factors: run(x, *factors, **config), made.rotation)


def known_candidates(tokens: Sequence[int]) -> dict[str, Candidate]:
    """Every candidate that may have been timed, by label."""
    every = (c for s in TUNED for n in tokens for c in candidates(s, n))
    return {candidate.label: candidate for candidate in every}
