"""`blr bench prefill` on a pico model: every arm is checked before it is timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from blr.bench import prefill
from blr.bench.models import find_model
from blr.bench.options import PrefillOptions
from blr.bench.prefill import GRAPH, RUNTIME, PrefillModels, run_prefill
from blr.compressor.base.errors import CapabilityError, UsageError
from blr.compressor.base.progress import Progress
from blr.compressor.modeling import float8

ARMS = ("dense", "dense-fp8", "lowrank-fp8", "blast-fp8", "monarch-fp8")


def options(**more: object) -> PrefillOptions:
    given = {"models": ("pico",), "arms": ARMS, "tokens": (24,), "rounds": 1, "blocks": 4}
    return PrefillOptions(**{**given, "device": "cpu", "compiling": False, **more})  # type: ignore[arg-type]


def test_arms_are_checked_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "fp8_device", lambda device: True)
    report, code = run_prefill(options(), Progress(quiet=True))
    rows = {row.arm: row for row in report.rows}
    assert code == 0 and all(row.status == "ok" and row.ms for row in rows.values())
    assert all(0.005 < (rows[arm].rel_error or 0) < 0.15 for arm in ARMS[1:])
    assert rows["dense-fp8"].of_dense_fp8 == 1 and rows["dense"].of_dense == 1
    assert report.to_dict()["summary"]["statuses"] == {"ok": len(ARMS)}
    assert "pico, 1 x 24 tokens" in report.text()


def test_a_wrong_arm_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "fp8_device", lambda device: True)
    plain = float8.fp8_product
    monkeypatch.setattr(float8, "fp8_product", lambda *given: 3 * plain(*given))
    report, _ = run_prefill(options(arms=("dense-fp8",)), Progress(quiet=True))
    assert report.rows[0].status == "wrong" and report.rows[0].ms is None


def test_arms_that_there_are_not_are_named() -> None:
    with pytest.raises(UsageError, match="lowrank-int5"):
        run_prefill(options(arms=("lowrank-int5",)), Progress(quiet=True))
    assert set(prefill.SHAPE_ARMS) > set(ARMS)


def test_arms_in_few_bits_are_timed() -> None:
    """Alone, as factors, and with a correction, eager and as an export takes prompts."""
    arms = ("dense-int4", "lowrank-int3", "corrected-int2")
    report, code = run_prefill(options(arms=arms, runtime=True), Progress(quiet=True))
    assert code == 0 and {(r.arm, r.status) for r in report.rows} == {(arm, "ok") for arm in arms}


def run_again(run: Callable[[], Any]) -> Callable[[], Any]:
    """Stands for a capture in a CUDA graph: the same pass on the same buffers."""
    run()
    return run


def fail_to_capture(run: Callable[[], Any]) -> Callable[[], Any]:
    raise RuntimeError("operation not permitted when stream is capturing")


def graphed(monkeypatch: pytest.MonkeyPatch, capture: Callable[..., Any]) -> tuple[PrefillModels, Any]:
    """A pico decoder whose passes `capture` captures, its layers as they are in place of compiled."""
    monkeypatch.setattr(prefill, "captured", capture)
    keep = lambda module, **_: setattr(module, "_compiled_call_impl", module._call_impl)  # noqa: E731
    monkeypatch.setattr(nn.Module, "compile", keep)
    models = PrefillModels(find_model("pico"), torch.device("cpu"), torch.float32, 16, 2.0, 4, 1)
    return models, models.get("dense")


@torch.no_grad()
def test_graphs_answer_the_prompt_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    models, model = graphed(monkeypatch, run_again)
    first = models.inputs(model, 8)
    for x in (first, first.flip(1)):
        torch.testing.assert_close(models.output(model, x, GRAPH), models.output(model, x))


@torch.no_grad()
def test_a_pass_that_cannot_be_captured_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    models, model = graphed(monkeypatch, fail_to_capture)
    for _ in range(2):  # not the second time either, when it is known
        with pytest.raises(RuntimeError, match="cannot be captured"):
            models.output(model, models.inputs(model, 8), GRAPH)


def test_graphs_are_of_a_gpu() -> None:
    with pytest.raises(CapabilityError, match="--graphs on the CPU"):
        run_prefill(options(graphs=True), Progress(quiet=True))


def test_prompts_as_an_export_takes_them() -> None:
    """Compared with the faster way of transformers."""
    report, code = run_prefill(options(arms=("dense", "lowrank"), runtime=True), Progress(quiet=True))
    rows = {(row.arm, row.way): row for row in report.rows}
    assert code == 0 and set(rows) == {(a, w) for a in ("dense", "lowrank") for w in ("", RUNTIME)}
    found, dense = rows["lowrank", RUNTIME], rows["dense", ""]
    assert found.status == "ok" and (found.rel_error or 0) < 0.05
    assert found.ms and dense.ms and found.of_dense == pytest.approx(dense.ms / found.ms)
