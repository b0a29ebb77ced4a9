"""Calibrated compression: exact where it can be, better than uncalibrated, resumable, monotone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrating import calibration, drift, native, run
from pico import save_pico, save_rank_deficient
from running import Run
from safetensors.torch import load_file, save_file
from torch import Tensor

from blr.compressor.base.errors import NumericsError
from blr.compressor.fitting import sequential
from blr.compressor.fitting.trainer import Adam
from blr.compressor.planning.training_sizes import reads_sensitivities


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "bert", "gemma2", "phi3", "distilbert"])
def test_full_rank_changes_nothing(name: str, tmp_path: Path) -> None:
    found = run(save_pico(name, tmp_path / name), tmp_path / "journal", method="svd", rank=32)
    assert len(found.results) == len(found.plan.layers)
    assert drift(found) < 1e-2


@pytest.mark.parametrize("failing", [None, "eigvalsh", "eigh", "qr", "cholesky_ex"])
def test_singular_statistics_behind_gelu(
    failing: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPT-2 with dead and repeated units; on a GPU the library's decompositions diverge on it."""
    folder = save_rank_deficient(tmp_path / "model")
    if failing:
        call = getattr(torch.linalg, failing)
        monkeypatch.setattr(torch.linalg, failing, OnceInTwo(call))
    found = run(folder, tmp_path / "journal", method="svd", cf=1.5)
    assert len(found.results) == len(found.plan.layers) == 8
    curves = found.sensitivity.curves
    assert all(bool(torch.isfinite(curve).all()) for curve in curves.values())
    falling = curves["transformer.h.0.mlp.c_proj"]
    assert int((falling > 1e-5 * falling[0]).sum()) == 8  # of 32: the test's own premise
    assert drift(found) < 0.5


def test_factors_beyond_their_dtype_name_the_layer(tmp_path: Path) -> None:
    folder = save_pico("llama", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.o_proj.weight"] *= 1e14
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(NumericsError, match=r"0\.self_attn\.o_proj: factor . is not finite in"):
        run(folder, tmp_path / "journal", method="svd", cf=1.5, dtype="float16")


class OnceInTwo:
    """A decomposition that stops converging every other time, as cuSOLVER says it."""

    def __init__(self, call: Any) -> None:
        self.call, self.calls = call, 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls % 2:
            raise torch.linalg.LinAlgError("cusolver error: CUSOLVER_STATUS_EXECUTION_FAILED")
        return self.call(*arguments, **options)


@pytest.mark.parametrize("method", ["svd", "monarch", "blast", "ks"])
def test_sequential_fits_lose_less_than_independent_ones(method: str, tmp_path: Path) -> None:
    folder = save_pico("llama", tmp_path / "model")
    settings = {"method": method, "cf": 2.0, "rounds": 5, "blocks": None if method == "ks" else 4}
    sequentially = run(folder, tmp_path / "one", **settings)
    independent = run(folder, tmp_path / "two", sequential=False, **settings)
    assert drift(sequentially) < drift(independent)
    assert all(0 <= record["weighted_error"] < 1 for _, record in sequentially.results.values())


def test_a_refit_never_raises_the_error_it_minimizes(tmp_path: Path) -> None:
    folder = save_pico("llama", tmp_path / "model")
    found = run(folder, tmp_path / "journal", epochs=2, method="blast", blocks=4, rounds=2)
    for _, record in found.results.values():
        before, after = record["refit"]
        assert after <= before


@pytest.mark.parametrize("quantize", [None, "int4"])
def test_steps_of_a_refit_have_their_own_gradients(
    quantize: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing of the steps before: where nothing moves, a batch's are those of the epoch before."""
    seen: list[list[Tensor]] = []

    def stay(self: Adam, gradients: Sequence[Tensor], factor: float) -> None:
        seen.append([gradient.clone() for gradient in gradients])
        self.steps = [step + 1 for step in self.steps]

    monkeypatch.setattr(Adam, "move", stay)
    settings = {"method": "svd", "cf": 1.5, "quantize": quantize}
    run(save_pico("llama", tmp_path / "model"), tmp_path / "journal", epochs=2, **settings)
    assert len(seen) % 2 == 0 and seen
    sums = [round(float(sum(g.abs().sum() for g in step)), 6) for step in seen]
    each = len(sums) // 4  # of both blocks, both epochs
    for block in (sums[: 2 * each], sums[2 * each :]):
        assert sorted(block[:each]) == pytest.approx(sorted(block[each:]), rel=1e-3)


def test_a_resumed_run_computes_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_pico("llama", tmp_path / "model")
    first = run(folder, tmp_path / "journal", epochs=1, method="svd", cf=2.0)
    for name in ("fit_together", "Refitting"):
        monkeypatch.setattr(sequential, name, lambda *_: pytest.fail("computed again"))
    second = run(folder, tmp_path / "journal", epochs=1, method="svd", cf=2.0)
    for module, (factors, record) in first.results.items():
        assert second.results[module] == (factors, record)
    assert all(a.student.equal(b.student) for a, b in zip(first.batches, second.batches, strict=True))


@pytest.mark.parametrize(
    "settings", [{"method": "dense", "quantize": "int4"}, {"method": "dense", "quantize": "int3"}]
)
def test_rounding_alone_is_the_same_without_sensitivities(
    settings: dict[str, str], tmp_path: Path
) -> None:
    """So that a run without a refit need not measure them, and does not."""
    folder = save_pico("llama", tmp_path / "model")
    found = run(folder, tmp_path / "one", **settings)
    specs = [planned.spec for planned in found.planned.values()]
    assert not reads_sensitivities(found.work.recipe, specs, 0)
    assert reads_sensitivities(found.work.recipe, specs, 1)
    without = run(folder, tmp_path / "two", measured=False, **settings)
    for module, (factors, _) in found.results.items():
        for name, entry in factors.items():
            other = without.results[module][0][name]
            assert load_file(entry.file)[entry.name].equal(load_file(other.file)[other.name])


def test_the_dense_stream_is_the_models_own(tmp_path: Path) -> None:
    folder = save_pico("llama", tmp_path / "model")
    found = run(folder, tmp_path / "journal", method="svd", cf=2.0)
    with torch.no_grad():
        whole = native("llama", folder)
        state = whole(found_ids(0), output_hidden_states=True).hidden_states[-1]
        torch.testing.assert_close(
            whole.model.norm(found.batches[0].hidden), state, rtol=1e-4, atol=1e-4
        )


def found_ids(n: int) -> torch.Tensor:
    return calibration().ids[n]


def test_calibration_beats_none_on_the_trained_model(
    tiny: Path, sample: Path, blr: Run, tmp_path: Path
) -> None:
    """Through the command line: half the sample calibrates, the perplexity is on the other half."""
    text = sample.read_text()
    (tmp_path / "calibration.txt").write_text(text[: len(text) // 2])
    (tmp_path / "heldout.txt").write_text(text[len(text) // 2 :])
    found = []
    for name, options in {
        "plain": [],
        "calibrated": ["--calibration", "calibration.txt", "--samples", "16", "--seq-len", "128"],
    }.items():
        compressing = ["compress", tiny, "-m", "svd", "--cf", "1.5", "-o", name, "--force"]
        done = blr(*compressing, *options)
        assert done.returncode == 0, done.stderr
        judged = blr("eval", name, "--text", "heldout.txt", "--window", "128", "--format", "json")
        found.append(json.loads(judged.stdout)["perplexity"])
    assert found[1] < found[0] / 2
