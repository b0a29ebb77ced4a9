"""What becomes of an arm: a time, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from blr.compressor.base.progress import Progress
from blr.compressor.bench import float8
from blr.compressor.bench.ceilings import Ceilings
from blr.compressor.bench.kronecker import PatternBench
from blr.compressor.bench.layers import LayerBench
from blr.compressor.bench.peers import Peer
from blr.compressor.bench.precision import PRECISIONS
from blr.compressor.bench.results import Report, Row
from blr.compressor.bench.runner import Case, Runner
from blr.compressor.bench.shapes import find_layers, specs_for
from blr.compressor.bench.subjects import dense_kernel, our_variant
from blr.compressor.bench.summary import layers_summary, patterns_summary
from blr.compressor.planning.roofline import find_gpu, kernels, layer_time
from blr.compressor.structures.specs import BlastSpec, KroneckerSpec

pytestmark = pytest.mark.fast

FLOAT32 = PRECISIONS["float32"]
LAYER = find_layers(["vit-b"])[0]
CPU = torch.device("cpu")


def runner() -> Runner:
    return Runner(CPU, rounds=3)


def raising(error: Exception) -> Callable[..., Tensor]:
    def call(*arguments: Tensor) -> Tensor:
        raise error

    return call


def peer_row(call: Callable[..., Tensor]) -> tuple[Row, list[Row]]:
    """The row of a peer for svd, and all rows of its case."""
    bench = LayerBench(FLOAT32, runner(), [Peer("other", {"svd": call})])
    report = Report("bench layers", {})
    bench.runner.run_all([bench.case(LAYER, specs_for(LAYER, ["svd"]), 2)], report, Progress(True))
    return next(row for row in report.rows if row.arm == "peer:other"), report.rows


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
    row, rows = peer_row(call)
    assert (row.status, row.note, row.ms, row.speedup) == (status, note, None, None)
    assert all(other.ms > 0 for other in rows if other is not row)


def test_float8_is_timed_where_the_device_multiplies_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the error of float8, which is not that of its input's dtype."""
    monkeypatch.setattr(float8, "fp8_device", lambda device: True)
    for precision, expected in ((PRECISIONS["bfloat16"], ["dense-fp8", "fp8", "fp8"]), (FLOAT32, [])):
        bench, report = LayerBench(precision, runner()), Report("bench layers", {})
        specs = specs_for(LAYER, ["svd", "blast"], blocks=[4])
        bench.runner.run_all([bench.case(LAYER, specs, 2)], report, Progress(True))
        found = [row for row in report.rows if "fp8" in row.arm]
        assert [row.arm for row in found] == expected
        assert all(row.status == "ok" and 0.01 < row.rel_error < 0.1 for row in found)


def test_a_right_arm_has_everything() -> None:
    row, rows = peer_row(lambda x, U, V: x @ V @ U.mT)
    dense = rows[0]
    assert (row.status, dense.arm, dense.speedup) == ("ok", "dense", 1.0)
    assert 0 < row.low <= row.ms <= row.high
    assert row.speedup == dense.ms / row.ms
    assert row.rel_error < FLOAT32.gate
    assert (row.floor_ms, row.joules) == (None, None)
    found = layers_summary(rows)
    assert found["speedup_over_dense"]["svd"]["peer:other"]["2"] == pytest.approx(row.speedup, abs=1e-4)
    assert set(found["ours_over"]["svd"]) == {"plain", "peer:other"}


def test_data_that_do_not_fit_are_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The input itself is too large for the first case: its arms are oom, the next case runs."""
    import blr.compressor.bench.kronecker as module

    made = module.gaussian

    def gaussian(shape: tuple[int, ...], *rest: object) -> Tensor:
        if shape[1] > 64:
            raise torch.OutOfMemoryError
        return made(shape, *rest)

    monkeypatch.setattr(module, "gaussian", gaussian)
    bench = PatternBench(4, False, runner())
    report = Report("bench kernels", {})
    cases = [bench.case(pattern, FLOAT32) for pattern in ((1, 8, 64, 2), (1, 8, 8, 2))]
    bench.runner.run_all(cases, report, Progress(True))
    assert [row.status for row in report.rows[:5]] == ["oom"] * 5
    assert report.rows[-1].status == "ok"
    assert patterns_summary(report.rows)["by_dtype"]["float32"]["patterns"] == 1


def test_hopeless_and_oversized_arms_are_skipped() -> None:
    bench = PatternBench(25088, False, runner())
    hopeless = {arm.row.arm: arm.skip for arm in bench.case((3, 48, 48, 4), FLOAT32).arms()}
    assert hopeless == dict.fromkeys(hopeless) | {"dense": "> 8x the work of bmm"}
    oversized = bench.case((128, 1024, 1024, 64), FLOAT32).arms()
    assert {arm.skip for arm in oversized} == {"more than 2147483647 elements"}
    bench.runner.run(oversized, FLOAT32)
    assert {arm.row.status for arm in oversized} == {"skipped"}


def test_batch_last_arms_are_right_too() -> None:
    bench = PatternBench(5, True, runner())
    report = Report("bench kernels", {})
    bench.runner.run_all([bench.case((2, 48, 16, 3), FLOAT32)], report, Progress(True))
    rows = {row.arm: row for row in report.rows}
    assert all(rows[name].status == "ok" for name in ("ours", "bmm", "einsum", "dense"))
    assert rows["ours"].cf == 6
    assert rows["ours"].variant == "reference"


def test_no_case_starts_after_the_deadline() -> None:
    timed = Runner(CPU, 3, deadline=1.0, clock=lambda: 2.0)
    report = Report("bench layers", {})

    def arms() -> list[object]:
        raise AssertionError("must not start")

    timed.run_all([Case("late", FLOAT32, arms)], report, Progress(True))
    assert report.stopped == "the seconds were spent before late"


def test_floors_are_those_of_the_roofline_in_any_precision() -> None:
    h200 = find_gpu("h200")
    ceilings = Ceilings(h200.copy_tbps, {"bfloat16": h200.bf16_tflops, "float32": 60.0})
    spec = BlastSpec(4096, 4096, 16, 1024)
    work = list(kernels(spec, 1024))
    in_ms = layer_time(spec, 1024, h200, launch=False) * 1e-3
    assert ceilings.floor_ms(work, PRECISIONS["bfloat16"]) == pytest.approx(in_ms)
    dense = ceilings.floor_ms([dense_kernel(4096, 4096, 4096)], FLOAT32)
    assert dense == pytest.approx(2 * 4096**3 / 60e12 * 1e3)
    assert ceilings.floor_ms([dense_kernel(1, 4096, 4096)], FLOAT32) == pytest.approx(
        (4096**2 + 2 * 4096) * 4 / (h200.copy_tbps * 1e12) * 1e3
    )


def test_the_variant_named_is_the_one_dispatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU whose table has one rule; Kronecker-sparse factors choose by themselves."""
    import blr.kernels.common.available as available
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
    assert factors == "fused:decode fused:decode"
