"""`blr tune`: times every variant of every structure on this GPU and turns winners into rules.

Arms are timed as benchmarks are (interleaved, cold L2, gated by a float64 reference), the dense
layer among them. Rules of exact shapes come first; rules for all other shapes follow, naming for
each number of tokens the variant that loses least over the shapes that were measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import inf, log
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

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
from blr.compressor.errors import CapabilityError
from blr.compressor.machine.device import pick_device
from blr.compressor.planning.roofline import kernels
from blr.compressor.progress import Progress
from blr.compressor.structures.laid import laid_shape
from blr.compressor.structures.registry import STRUCTURES, TUNED
from blr.compressor.structures.specs import Spec
from blr.compressor.tune_float8 import Product, float8_candidates, float8_cases, layer_cases
from blr.compressor.tuned_table import read_table, table_text, write_table
from blr.kernels.common.available import has_triton, kernel_device
from blr.kernels.common.dispatch import Variant, forget
from blr.kernels.common.tables import (
    BUCKETS,
    DENSE,
    MOST,
    PLAIN,
    PRODUCT,
    REFERENCE,
    Shape,
    heuristic,
)

FULL = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)  # tokens that are measured
QUICK = (1, 8, 256, 4096)
FLOAT8 = PRODUCT  # beside the structures
MARGIN = 1.02  # a time within this of the best is as good: noise, and rules that hold for longer
OURS = 1.03  # times as fast as the plain form a kernel of ours must be to be chosen in its place


@dataclass(frozen=True)
class Candidate:
    """A variant with its arguments."""

    variant: str
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """As "gemv" or 'mix {"BN": 64}'."""
        return self.variant + (f" {json.dumps(self.config)}" if self.config else "")


DENSE_CANDIDATE = Candidate(DENSE)


@dataclass(frozen=True)
class Point:
    """What was measured of one layer at one number of tokens: label to milliseconds."""

    structure: str
    shape: Shape
    dtype: str
    n: int
    times: Mapping[str, float]


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


def device_name(device: torch.device) -> str:
    """What the driver calls a GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


def variants_of(structure: str) -> tuple[Mapping[str, Variant], Mapping[str, list[dict[str, Any]]]]:
    """`Structure.variants` by name."""
    return STRUCTURES[structure].variants()


def candidates(structure: str, n: int) -> list[Candidate]:
    """What is timed for n tokens: every variant with every configuration it lists."""
    table, configs = variants_of(structure)
    names = [name for name in table if name != REFERENCE and n <= MOST.get(name, n)]
    return [Candidate(name, config) for name in names for config in configs.get(name, [{}])]


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


def rules_of(points: Sequence[Point], known: Mapping[str, Candidate]) -> list[dict[str, Any]]:
    """Rules that choose what was fastest.

    Args:
        points: everything measured. known: candidates by label.
    """
    rules: list[dict[str, Any]] = []
    groups: dict[tuple[str, Shape, str], list[Point]] = {}
    for point in points:
        groups.setdefault((point.structure, point.shape, point.dtype), []).append(point)
    for (structure, shape, dtype), measured in groups.items():
        where = {"structure": structure, "dtype": dtype, **_exactly(shape)}
        measured.sort(key=lambda point: point.n)
        rules += _dense_rules(measured, where)
        rules += _variant_rules(measured, where, known)
    for structure, dtype in dict.fromkeys((p.structure, p.dtype) for p in points):
        same = [p for p in points if (p.structure, p.dtype) == (structure, dtype)]
        rules += _general_rules(same, {"structure": structure, "dtype": dtype}, known)
    return rules


def fastest(point: Point) -> tuple[str, float] | None:
    """Label and time of the fastest structured candidate; None if none came out right."""
    times = {label: ms for label, ms in point.times.items() if label != DENSE}
    return min(times.items(), key=lambda item: item[1]) if times else None


def _exactly(shape: Shape) -> dict[str, list[int]]:
    return {name: [size, size] for name, size in shape._asdict().items()}


def _dense_rules(measured: Sequence[Point], where: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Where the dense layer beats every structured candidate."""
    winners = []
    for point in measured:
        best = fastest(point)
        dense = point.times.get(DENSE)
        winners.append(best is not None and dense is not None and dense * MARGIN < best[1])
    for low, high, wins in _ranges([p.n for p in measured], winners):
        if wins:
            yield {**where, "n": [low, high], "variant": DENSE}


def _variant_rules(
    measured: Sequence[Point], where: dict[str, Any], known: Mapping[str, Candidate]
) -> Iterator[dict[str, Any]]:
    winners: list[str | None] = []
    for point in measured:
        before = winners[-1] if winners else None
        winners.append(_winner(point, before))
    for low, high, label in _ranges([p.n for p in measured], winners):
        if label is not None:
            yield _rule(where, low, high, known[label])


def _winner(point: Point, before: str | None) -> str | None:
    """The fastest candidate; in its place one that is as good: a plain form above all, so that noise
    never chooses ours, then what won at fewer tokens, so that there are fewer rules, or the rule of
    thumb."""
    best = fastest(point)
    if best is None:
        return None
    if plain := _as_good(point, PLAIN[point.structure], OURS * best[1]):
        return plain
    thumb = heuristic(point.structure, point.n, getattr(torch, point.dtype))[0]
    usual = [label for label in (before, thumb) if label is not None]
    good = [label for label in usual if point.times.get(label, inf) <= MARGIN * best[1]]
    return good[0] if good else best[0]


def _as_good(point: Point, labels: Sequence[str], limit: float) -> str | None:
    """The fastest of `labels`, if it takes at most `limit` milliseconds."""
    times = {label: point.times[label] for label in labels if label in point.times}
    found = min(times, key=times.__getitem__) if times else None
    return found if found is not None and times[found] <= limit else None


def _general_rules(
    points: Sequence[Point], where: dict[str, Any], known: Mapping[str, Candidate]
) -> Iterator[dict[str, Any]]:
    """For shapes that were not measured: no arguments, which belong to a shape."""
    tokens = sorted({point.n for point in points})
    winners = [_least_loss([p for p in points if p.n == n], known) for n in tokens]
    for low, high, label in _ranges(tokens, winners):
        if label:
            yield _rule(where, low, high, known[label])


def _least_loss(points: Sequence[Point], known: Mapping[str, Candidate]) -> str | None:
    """The candidate without arguments that loses least, by the geometric mean over the shapes that
    any candidate ran; it must have run all of those. A plain form where ours is no better."""
    free = [label for label, candidate in known.items() if not candidate.config and label != DENSE]
    best = [(point.times, found[1]) for point in points if (found := fastest(point))]
    losses = {
        label: fmean(log(times[label] / ms) for times, ms in best)
        for label in free
        if best and all(label in times for times, _ in best)
    }
    if not losses:
        return None
    least = min(losses.values())
    plain = [
        label for label in PLAIN[points[0].structure] if losses.get(label, inf) <= least + log(OURS)
    ]
    return min(plain or losses, key=losses.__getitem__)


def _rule(where: dict[str, Any], low: int, high: int, chosen: Candidate) -> dict[str, Any]:
    config = {"config": dict(chosen.config)} if chosen.config else {}
    return {**where, "n": [low, high], "variant": chosen.variant, **config}


def _ranges(tokens: Sequence[int], winners: Sequence[Any]) -> Iterator[tuple[int, int, Any]]:
    """Neighbouring measurements with one winner as one range of buckets. Each measurement speaks for
    the buckets above the one before it, the last one for all that follow."""
    low = BUCKETS[0]
    for position, (n, winner) in enumerate(zip(tokens, winners, strict=True)):
        last = position + 1 == len(tokens)
        if last or winners[position + 1] != winner:
            high = BUCKETS[-1] if last else n
            yield low, high, winner
            low = 2 * n


def winners_table(points: Sequence[Point]) -> list[dict[str, Any]]:
    """One entry a point, for people: the winner, its time, and the dense layer's."""
    rows = []
    for point in points:
        best = fastest(point)
        rows.append(
            {
                **{"structure": point.structure, **point.shape._asdict(), "dtype": point.dtype},
                **{"n": point.n, "variant": best[0] if best else None},
                **{"ms": best[1] if best else None, "dense_ms": point.times.get(DENSE)},
            }
        )
    return rows


def merged(rules: Sequence[dict[str, Any]], old: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`rules` and those of an older table about what `rules` say nothing of, exact shapes first."""
    said = {_about(rule) for rule in rules}
    every = [*rules, *(rule for rule in old if _about(rule) not in said)]
    return sorted(every, key=lambda rule: "inputs" not in rule)


def _about(rule: Mapping[str, Any]) -> str:
    kept = {key: value for key, value in rule.items() if key not in ("n", "variant", "config")}
    return json.dumps(kept, sort_keys=True)


def known_candidates(tokens: Sequence[int]) -> dict[str, Candidate]:
    """Every candidate that may have been timed, by label."""
    every = (c for s in TUNED for n in tokens for c in candidates(s, n))
    float8 = {label: Candidate(*chosen) for label, chosen in float8_candidates().items()}
    return {DENSE: DENSE_CANDIDATE, **{candidate.label: candidate for candidate in every}, **float8}
