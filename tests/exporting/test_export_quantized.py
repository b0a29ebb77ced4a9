"""Quantized exports hold what `quantize.py` makes of the source, and report what that loses."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest
import torch
from exporting import compress_to, export_to, plain_layers
from heal_models import save_dense, write_text
from pico import inputs_for, save_pico
from quantized import quantize_model
from running import Invoke
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from blr.compressor import register
from blr.compressor.commands.inspect import inspect_output
from blr.compressor.workspace.manifest import read_manifest

register()


def exported(source: Path, output: Path, **options: object) -> dict[str, torch.Tensor]:
    """All tensors of an export."""
    folder = export_to(source, output, **options)
    return {n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("name", ["dense", "monarch", "blast"])
def test_tensors_and_errors_are_those_of_the_quantized_source(
    name: str, kind: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    stored = exported(sources[name], tmp_path / "out", quantize=kind, max_shard_size=700_000)
    model = AutoModelForCausalLM.from_pretrained(sources[name], dtype="auto")
    plain = tuple(f"{module}." for module in plain_layers(tmp_path / "out"))  # in kernel layout
    errors = quantize_model(model, int(kind[3:]), skip=[module[:-1] for module in plain])
    skipped = (*plain, "lm_head.weight")  # tied
    expected = {n: t for n, t in model.state_dict().items() if not n.startswith(skipped)}
    stored = {n: t for n, t in stored.items() if not plain or not n.startswith(plain)}
    assert stored.keys() == expected.keys()
    assert all(tensor.equal(expected[key]) for key, tensor in stored.items())
    reported = read_manifest(tmp_path / "out")["quantization_errors"]
    kinds = {module.rpartition(".")[2] for module in errors}
    assert reported.keys() == kinds and kinds
    for name in kinds:
        own = [found for module, found in errors.items() if module.endswith(name)]
        assert reported[name] == pytest.approx(mean(own))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    assert all(again[key].equal(tensor) for key, tensor in expected.items())


@pytest.mark.parametrize("method", ["dense", "ks"])
def test_conv1d_weights_and_kronecker_factors(method: str, tmp_path: Path) -> None:
    """GPT-2 stores its weights [in, out]; a quantized one computes nearly the same."""
    source = save_pico("gpt2", tmp_path / "dense")
    if method != "dense":
        source = compress_to(source, tmp_path / method, method=method, cf=1.5)
    output = export_to(source, tmp_path / "out", quantize="int8", dtype="float32")
    found, expected = (AutoModelForCausalLM.from_pretrained(f).eval() for f in (output, source))
    with torch.inference_mode():
        y, exact = found(**inputs_for(found)).logits, expected(**inputs_for(expected)).logits
    error = (y - exact).norm() / exact.norm()
    assert 0 < error < 0.03


def test_the_command_reports_the_loss(sources: dict[str, Path], tmp_path: Path, invoke: Invoke) -> None:
    arguments = ("export", sources["svd"], "--quantize", "int8", "--quiet", "-o")
    code, out, err = invoke(*arguments, tmp_path / "a", "--format", "json")
    found = json.loads(out)
    assert (code, found["quantize"]) == (0, "int8") and found["bytes_after"] < found["bytes_before"], err
    assert found["errors"] and all(0 < error < 0.02 for error in found["errors"].values())
    assert "error:      of int8, by layer type: " in invoke(*arguments, tmp_path / "b", "--overwrite")[1]
    assert invoke("verify", tmp_path / "a")[0] == 0
    assert "int8" in (tmp_path / "a" / "README.md").read_text()


def test_layers_that_would_not_get_smaller_stay_as_they_are(
    sources: dict[str, Path], tmp_path: Path, invoke: Invoke
) -> None:
    """Rows of a few weights, padded to groups of 128, take more bytes packed than in bfloat16."""
    dense = save_pico("llama", tmp_path / "dense")
    source = compress_to(dense, tmp_path / "c", method="blast", cf=1.5, blocks=8, rounds=1)
    code, _, err = invoke("export", source, "-o", tmp_path / "all", "--quantize", "int8")
    assert code == 4 and "no layer gets smaller in int8" in err and not (tmp_path / "all").exists()
    mixed = sources["blast"]  # rows of 48 weights in attention, of 128 in down_proj
    given = ("export", mixed, "-o", tmp_path / "o", "--quantize", "int8", "--format=json")
    code, out, err = invoke(*given)
    found = json.loads(out)
    assert code == 0 and 0 < found["plain"] < found["layers"], err
    assert found["bytes_after"] < found["bytes_before"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "o", dtype=torch.float32).eval()
    exact = AutoModelForCausalLM.from_pretrained(mixed, dtype=torch.float32).eval()
    with torch.inference_mode():
        y, expected = model(**inputs_for(model)).logits, exact(**inputs_for(exact)).logits
    assert (y - expected).norm() < 0.05 * expected.norm()


def test_what_is_lost_is_said_and_too_much_is_refused(
    sources: dict[str, Path], tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In nats a token: on a text, or on what a small model writes itself."""
    given = ("export", sources["dense"], "-o", tmp_path / "out", "-q", "--format=json", "--quantize")
    sample = Path(__file__).parents[1] / "data" / "sample.txt"
    losses = {}
    for kind, more in (("int8", ()), ("int4", ()), ("int4", ("--text", sample))):
        code, out, err = invoke(*given, kind, *more, "--overwrite")
        assert code == 0, err
        losses[kind, bool(more)] = json.loads(out)["check"]["loss"]
    assert 0 < losses["int8", False] < 0.01 < losses["int4", False] < 1
    assert 0.01 < losses["int4", True] < 1 and losses["int4", True] != losses["int4", False]
    monkeypatch.setattr("blr.compressor.output.check.MOST", 0.01)
    monkeypatch.setattr("blr.compressor.output.check.LARGE", 0.01)
    refused = (*given, "int4", "--overwrite")
    before = read_manifest(tmp_path / "out")
    code, _, err = invoke(*refused)
    assert code == 7 and " nats a token lost " in err and "--quantize int8" in err and "--force" in err
    assert read_manifest(tmp_path / "out") == before
    assert invoke(*refused, "--force")[0] == 0 and invoke(*refused, "--no-check")[0] == 0
    assert invoke(*refused, "--text", tmp_path / "none.txt")[0] == 4


@pytest.mark.parametrize("name", ["gpt2", "llama-tied"])
def test_a_text_longer_than_the_models_context(name: str, tmp_path: Path, invoke: Invoke) -> None:
    """GPT-2 calls its 64 positions otherwise than other models do."""
    source, text = save_dense(tmp_path / "dense", name), write_text(tmp_path / "text.txt", 500)
    given = ("export", source, "-o", tmp_path / "out", "--quantize", "int8", "--text", text, "-q")
    code, out, err = invoke(*given, "--format=json")
    assert code == 0, err
    assert json.loads(out)["check"]["loss"] < 0.1


def test_what_continues_no_text_is_packed_and_takes_none(tmp_path: Path, invoke: Invoke) -> None:
    """T5 generates, but not from a text alone: what it loses is not measured, and a text not taken."""
    source = save_dense(tmp_path / "dense", "t5")
    given = ("export", source, "-o", tmp_path / "out", "--quantize", "int8", "--format=json", "-q")
    code, _, err = invoke(*given, "--text", write_text(tmp_path / "text.txt", 50))
    assert code == 2 and "--text: no t5 that continues text" in err
    code, out, err = invoke(*given)
    assert code == 0, err
    check = json.loads(out)["check"]
    assert "loss" not in check and 0 < check["distance"] < 0.1


def test_inspect_tells_bits_as_they_are_stored(sources: dict[str, Path], tmp_path: Path) -> None:
    """Of all that is packed, the dense layers and the head as well."""
    for name in ("svd", "dense"):
        folder = export_to(sources[name], tmp_path / name, quantize="int4")
        found = inspect_output(folder)
        rows, stored = {row["module"]: row for row in found["layers"]}, dict[str, int]()
        for path in folder.glob("*.safetensors"):
            for key, tensor in load_file(path).items():
                owner = next((n for n in rows if key.startswith(f"{n}.")), "")
                stored[owner] = stored.get(owner, 0) + 8 * tensor.nbytes
        assert len(rows) == 28
        for module, row in rows.items():
            assert stored[module] / row["dense_parameters"] == pytest.approx(row["bits"]), module
        packed = [row for module, row in rows.items() if module not in plain_layers(folder)]
        assert packed and all(row["bits"] < 10 and row["error"] is None for row in packed)
