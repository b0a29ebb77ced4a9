"""Weights that are not finite are refused; degenerate and odd ones work; retries are recorded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pico import MODELS, save_pico
from safetensors.torch import load_file, save_file

from blr.compressor.base.errors import CapabilityError, InputError, NumericsError, StorageError
from blr.compressor.base.progress import Progress
from blr.compressor.commands.compress import Settings, Summary, compress
from blr.compressor.fitting import factorize
from blr.compressor.recipe.schema import make_recipe
from blr.compressor.structures import linalg
from blr.compressor.structures.base import relative_error

METHODS = ("svd", "monarch", "blast", "ks")
DOWN = "model.layers.1.mlp.down_proj"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pico Llama."""
    return save_pico("llama", tmp_path_factory.mktemp("dense") / "llama")


def edited(dense: Path, folder: Path, edit: Callable[[Tensors], object]) -> Path:
    """A copy of `dense` whose tensors went through `edit`."""
    shutil.copytree(dense, folder)
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def run(
    source: Path, output: Path, allow_pickle: bool = False, check: bool = True, **recipe: Any
) -> Summary:
    """`compress` with defaults that suit a pico model."""
    settings = Settings("pico", allow_pickle=allow_pickle, check=check)
    made = make_recipe(**{"cf": 1.5, "rounds": 2, **recipe})
    return compress(source, made, output, settings, Progress(quiet=True))


def records(output: Path) -> dict[str, Any]:
    return json.loads((output / "blr_layers.json").read_text())


@pytest.mark.parametrize(("value", "count"), [(float("nan"), 1), (float("inf"), 3), (-float("inf"), 2)])
def test_not_finite(value: float, count: int, dense: Path, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors[f"{DOWN}.weight"].view(-1)[5 : 5 + count] = value

    source = edited(dense, tmp_path / "llama", edit)
    with pytest.raises(NumericsError, match=f"tensor '{DOWN}.weight' holds {count} NaN or Inf values"):
        run(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(NumericsError, match="computes nothing finite"):
        run(source, tmp_path / "out", exclude=[DOWN])
    assert run(source, tmp_path / "out", check=False, exclude=[DOWN]).layers == 13


@pytest.mark.parametrize("method", METHODS)
def test_zero_and_rank_deficient(method: str, dense: Path, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.q_proj.weight"].zero_()
        tensors["model.layers.0.mlp.up_proj.weight"][1:] = 0  # one row
        low = torch.outer(torch.arange(32.0), torch.arange(48.0).cos())
        tensors["model.layers.0.mlp.down_proj.weight"].copy_(low)
        tensors["model.layers.1.self_attn.v_proj.weight"].fill_(1e-30)
        tensors["model.layers.1.self_attn.o_proj.weight"].mul_(1e15)

    run(edited(dense, tmp_path / "llama", edit), tmp_path / "out", method=method)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert all(bool(torch.isfinite(tensor).all()) for tensor in stored.values())
    errors = {name: record["error"] for name, record in records(tmp_path / "out").items()}
    assert all(0 <= error <= 1 + 1e-6 for error in errors.values())
    assert errors["model.layers.0.self_attn.q_proj"] == 0
    assert errors["model.layers.1.self_attn.v_proj"] < 1e-3 or method == "ks"
    if method != "ks":  # whose pattern may not hold every matrix of rank one
        assert errors["model.layers.0.mlp.down_proj"] < 1e-5
        assert errors["model.layers.0.mlp.up_proj"] < 1e-5


@pytest.mark.parametrize("method", METHODS)
def test_single_rows_and_columns(method: str, tmp_path: Path) -> None:
    """An MLP of width one has weights [1, n] and [n, 1]."""
    settings = {**MODELS["llama"][1], "intermediate_size": 1}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    model.save_pretrained(tmp_path / "llama")
    chain = {"pattern": None} if method == "ks" else {"rank": 1, "blocks": 1}
    include = ["*.mlp.*"]
    if method == "ks":
        with pytest.raises(Exception, match=r"1x32|32x1") as refused:
            run(tmp_path / "llama", tmp_path / "out", method=method, include=include, **chain)
        assert refused.value.exit_code == 2
        return
    run(tmp_path / "llama", tmp_path / "out", method=method, include=include, **chain)
    errors = [record["error"] for record in records(tmp_path / "out").values()]
    assert len(errors) == 6 and max(errors) < 1e-5


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bits_are_copied_untouched_and_said(
    dtype: torch.dtype, dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"model.layers.{n}.mlp.gate_proj.weight" for n in (0, 1)]

    def edit(tensors: Tensors) -> None:
        for name in names:
            tensors[name] = (tensors[name] * 10).to(dtype)

    source = edited(dense, tmp_path / "llama", edit)
    summary = run(source, tmp_path / "out")
    note = next(note for note in summary.notes if "untouched" in note)
    assert note.startswith("2 weights stored as ") and "not compressed" in note
    assert f"blr: note: {note}" in capsys.readouterr().err
    assert summary.layers == 12
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    for name in names:
        assert after[name].dtype == dtype
        assert torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8))


def test_all_in_eight_bits_is_refused_by_name(dense: Path, tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        for name in tensors:
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    source = edited(dense, tmp_path / "llama", edit)
    with pytest.raises(InputError, match="14 weights stored as F8_E4M3"):
        run(source, tmp_path / "out")


def test_overflow_of_the_stored_dtype(dense: Path, tmp_path: Path) -> None:
    source = edited(dense, tmp_path / "llama", lambda tensors: tensors[f"{DOWN}.weight"].mul_(1e12))
    with pytest.raises(NumericsError, match=rf"{DOWN}: factor \w is not finite in torch.float16"):
        run(source, tmp_path / "out", dtype="float16")
    assert run(source, tmp_path / "out2", dtype="bfloat16").layers == 14


# --- Retries --------------------------------------------------------------------------------


class Failing:
    """A torch.linalg function that diverges as often as told."""

    def __init__(self, call: Callable[..., Any], times: int) -> None:
        self.call, self.times, self.calls = call, times, 0

    def __call__(self, matrix: torch.Tensor) -> Any:
        self.calls += 1
        if self.calls <= self.times:
            raise torch.linalg.LinAlgError("linalg.eigh: the algorithm failed to converge")
        return self.call(matrix)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("times", [1, 3])
def test_failing_eigendecomposition_is_repeated_and_recorded(
    times: int, method: str, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(torch.linalg.eigh, times)
    monkeypatch.setattr(torch.linalg, "eigh", failing)
    options = {"method": method, "include": [DOWN]}
    run(dense, tmp_path / "out", **options)
    assert failing.calls > times
    note = "eigendecomposition repeated on the CPU" + {1: "", 3: ", shifted by 1e-07"}[times]
    assert records(tmp_path / "out")[DOWN]["notes"] == [note]
    manifest = json.loads((tmp_path / "out" / "blr_manifest.json").read_text())
    assert manifest["fallbacks"] == [f"{DOWN}: {note}"]
    monkeypatch.setattr(torch.linalg, "eigh", failing.call)
    run(dense, tmp_path / "plain", **options)
    again, plain = (records(tmp_path / name)[DOWN]["error"] for name in ("out", "plain"))
    assert again == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_eigendecomposition_that_always_fails(
    method: str, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(torch.linalg.eigh, 10**9)
    monkeypatch.setattr(torch.linalg, "eigh", failing)
    with pytest.raises(NumericsError, match=f"{DOWN}: .* did not converge in 5 attempts"):
        run(dense, tmp_path / "out", method=method, include=[DOWN])
    assert failing.calls == 5
    monkeypatch.setattr(torch.linalg, "eigh", failing.call)
    assert run(dense, tmp_path / "out", method=method, include=[DOWN]).layers == 1


def test_cholesky_retries_are_recorded_and_bounded() -> None:
    indefinite = torch.diag(torch.tensor([1.0, -1e-7], dtype=torch.float64))
    with linalg.recorded_fallbacks() as notes:
        linalg.cholesky(torch.eye(3, dtype=torch.float64))
        assert notes == []
        linalg.cholesky(indefinite)
        linalg.cholesky(indefinite)
    assert len(notes) == 1 and notes[0].startswith("Cholesky succeeded with 1e-06")
    with pytest.raises(NumericsError, match="no Cholesky factor"):
        linalg.cholesky(torch.diag(torch.tensor([1.0, -1e9], dtype=torch.float64)))


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_out_of_memory_names_the_layer(
    error: Exception, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(factorize, "factorize", fail)
    with pytest.raises(CapabilityError, match=f"{DOWN}: out of memory on cpu"):
        run(dense, tmp_path / "out", include=[DOWN])


def test_a_fault_of_a_kernel_is_not_called_out_of_memory(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(factorize, "factorize", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run(dense, tmp_path / "out", include=[DOWN])


def test_errors_of_zero_weights_are_numbers() -> None:
    """JSON has no infinity."""
    zero = torch.zeros(2, 3)
    assert (relative_error(zero, zero), relative_error(zero, zero + 1)) == (0.0, 1.0)


# --- Pickles --------------------------------------------------------------------------------


def pickled(dense: Path, folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """A copy of `dense` with its matrices, after `change`, in pytorch_model.bin."""
    shutil.copytree(dense, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    state = {name: change(t) if t.dim() == 2 else t for name, t in tensors.items()}
    torch.save(state, folder / "pytorch_model.bin")
    return folder


def test_pickled_and_not_contiguous(dense: Path, tmp_path: Path) -> None:
    source = pickled(dense, tmp_path / "pickled", lambda weight: weight.t().contiguous().t())
    with pytest.raises(InputError, match="--allow-pickle"):
        run(source, tmp_path / "out")
    run(source, tmp_path / "out", allow_pickle=True)
    run(dense, tmp_path / "plain")
    outputs = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "plain"))
    assert all(torch.equal(*pair) for pair in zip(*(t.values() for t in outputs), strict=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "pickled", "plain"]


def test_pickle_of_the_wrong_shape_leaves_nothing(dense: Path, tmp_path: Path) -> None:
    """It is converted before its shapes can be compared; the copy does not stay."""
    source = pickled(dense, tmp_path / "pickled", lambda weight: weight[:-1])
    with pytest.raises(InputError, match="by config"):
        run(source, tmp_path / "out", allow_pickle=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pickled"]


def test_no_room_to_convert_a_pickle(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = pickled(dense, tmp_path / "pickled", lambda weight: weight)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 0, 1000))
    with pytest.raises(StorageError, match=r"1000 bytes free, the run needs about 94848 bytes"):
        run(source, tmp_path / "out", allow_pickle=True)
