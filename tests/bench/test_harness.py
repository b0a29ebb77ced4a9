"""What becomes of an arm: a time, or the reason why there is none."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from blr.bench.checks import PRECISIONS, Precision
from blr.bench.harness import Arm, Case, Checked, Harness
from blr.bench.layer_problem import KernelTimer, LayerRow, our_variant, problem_of
from blr.bench.layers import LayerCases, compare
from blr.bench.results import BenchReport
from blr.bench.shapes import find_layers, specs_for
from blr.compressor.base.progress import Progress
from blr.compressor.structures.specs import BlastSpec, KroneckerSpec

pytestmark = pytest.mark.fast

FLOAT32 = PRECISIONS["float32"]
LAYER = find_layers(["vit-b"])[0]
CPU = torch.device("cpu")


def harness() -> Harness:
    return Harness(BenchReport("bench layers", {}), Progress(True), CPU, rounds=3)


def timer(precision: Precision = FLOAT32) -> KernelTimer:
    return KernelTimer(CPU, precision)


def raising(error: Exception) -> Callable[..., Tensor]:
    def call(*arguments: Tensor) -> Tensor:
        raise error

    return call


def other_row(call: Callable[..., Tensor]) -> tuple[LayerRow, list[LayerRow]]:
    """The row of another implementation of svd, and all rows of its case."""
    (spec,), cases = specs_for(LAYER, ["svd"]), LayerCases(timer())
    usual = cases.case(LAYER, [spec], 2)
    layer = problem_of(cases.timer, LAYER, spec, 2, usual.title)
    arm = layer.arm("other", lambda: (call, layer.rotation))
    rows = harness().run_case(Case(usual.title, lambda: [*usual.arms(), arm], compare, usual.around))
    return rows[-1], rows


@pytest.mark.parametrize(
    ("call", "status", "note"),
    [
        (raising(torch.OutOfMemoryError("CUDA out of memory. Tried")), "oom", "out of memory"),
        (raising(RuntimeError("DefaultCPUAllocator: can't allocate memory")), "oom", "out of memory"),
        (raising(ValueError("no such shape\nsecond line")), "failed", "ValueError: no such shape"),
        (lambda x, U, V: x @ V @ U.mT * 1.01, "wrong", "relative error 0.01"),
        (lambda x, U, V: x @ V, "wrong", "not all written, not finite or of another shape"),
    ],
    ids=["oom", "cpu-oom", "raises", "wrong", "shape"],
)
def test_an_arm_without_a_time_says_why_and_spares_the_others(
    call: Callable[..., Tensor], status: str, note: str
) -> None:
    row, rows = other_row(call)
    assert (row.status, row.note, row.ms, row.speedup) == (status, note, None, None)
    assert all(other.ms > 0 for other in rows if other is not row)


def test_a_right_arm_has_everything() -> None:
    row, rows = other_row(lambda x, U, V: x @ V @ U.mT)
    dense = rows[0]
    assert (row.status, dense.arm, dense.speedup) == ("ok", "dense", 1.0)
    assert 0 < row.low <= row.ms <= row.high
    assert row.speedup == dense.ms / row.ms
    assert row.rel_error < FLOAT32.gate
    found = LayerRow.summary(rows)
    assert found["speedup_over_dense"]["svd"]["other"]["2"] == pytest.approx(row.speedup, abs=1e-4)
    assert set(found["ours_over"]["svd"]) == {"plain", "other"}


def test_data_that_do_not_fit_are_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The input itself is too large for the first case: its arms are oom, the next case runs."""
    import blr.bench.layer_problem as module

    made = module.gaussian

    def gaussian(shape: tuple[int, ...], *rest: object) -> Tensor:
        if shape[0] == 3:
            raise torch.OutOfMemoryError
        return made(shape, *rest)

    monkeypatch.setattr(module, "gaussian", gaussian)
    cases, specs, run = LayerCases(timer()), specs_for(LAYER, ["svd"]), harness()
    assert run.run([cases.case(LAYER, specs, n) for n in (3, 2)]) == 0
    assert [row.status for row in run.report.rows] == ["oom"] * 3 + ["ok"] * 3


def test_an_arm_beyond_its_limit_is_never_sampled() -> None:
    """The harness itself refuses, whatever a check forgets."""
    row = LayerRow("case", "", "", "", "", 1, 1, 1.0, 1, "float32", "careless")
    arm = Arm(row, lambda: Checked(lambda: pytest.fail("was timed"), error=0.2, limit=0.1))
    harness().run_case(Case("case", lambda: [arm]))
    assert (row.status, row.ms, row.rel_error) == ("wrong", None, 0.2)


def test_arms_that_do_not_fit_together_come_in_groups() -> None:
    log: list[str] = []

    def arm(name: str) -> Arm:
        row = LayerRow("case", "", "", "", "", 1, 1, 1.0, 1, "float32", name)

        def check() -> Checked:
            log.append(f"check {name}")
            return Checked(lambda: log.append(name) or 1.0, None)

        return Arm(row, check)

    case = Case("case", lambda: [arm(name) for name in "abc"], together=lambda arms: 2)
    assert [row.arm for row in harness().run_case(case)] == ["a", "b", "c"]
    assert log == ["check a", "check b", *"ab" * 3, "check c", *"c" * 3]


def test_a_finished_case_is_freed_before_the_next_starts() -> None:
    """Models of a case go with it: those of all cases together do not fit into a GPU."""

    class Models:
        """Stands for some."""

    def case(name: str) -> Case:
        models = Models()
        alive.append(weakref.ref(models))

        def arms(models: Models = models) -> list[Arm]:
            counts.append(sum(one() is not None for one in alive))
            return []

        return Case(name, arms)

    alive: list[weakref.ref[Models]] = []
    counts: list[int] = []
    assert harness().run([case(name) for name in "abc"]) == 0
    assert counts == [3, 2, 1]


def test_no_case_starts_after_the_deadline() -> None:
    ticks = iter((0.0, 2.0, 3.0))
    late = Harness(
        BenchReport("bench layers", {}), Progress(True), CPU, 3, 1.0, clock=lambda: next(ticks)
    )
    case = Case("late", lambda: pytest.fail("must not start"))
    assert late.run([case]) == 0
    assert late.report.stopped == "the seconds were spent before late"


def test_the_variant_named_is_the_one_dispatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU whose table has one rule; Kronecker-sparse factors choose by themselves."""
    import blr.bench.layer_problem as available
    import blr.kernels.common.tables as tables

    monkeypatch.setattr(available, "kernel_device", lambda tensor: True)
    monkeypatch.setattr(tables, "gpu_key", lambda device: "fake")
    rule = {"structure": "blast", "blocks": [4, 4], "n": [512, 1024], "variant": "bmm"}
    monkeypatch.setattr(tables, "tuned_rules", lambda gpu: [rule])
    tables._choose.cache_clear()
    bfloat16 = PRECISIONS["bfloat16"]
    try:
        found = [our_variant(BlastSpec(64, 64, 4, 16), n, bfloat16, CPU) for n in (600, 1)]
        chain = KroneckerSpec(64, 64, ((1, 32, 32, 2), (2, 32, 32, 1)))
        factors = our_variant(chain, 1, bfloat16, CPU)
    finally:
        tables._choose.cache_clear()
    assert found == ["bmm", "gemv"]
    assert factors == "decode decode"
