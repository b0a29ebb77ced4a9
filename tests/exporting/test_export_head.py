"""A quantized output head: its own packed weights, a tie that ends, the tokens it gives everywhere,
and what the command says about it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from exporting import compress_to, export_to, plain_layers, tokens_without_blr
from pico import save_pico
from quantized import quantize_head, quantize_model
from running import Invoke
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from blr.compressor import register
from blr.compressor.modeling import generation as fused
from blr.compressor.modeling.layers import QuantizedLinear, StructuredLinear
from blr.compressor.runtime.decoder import Decoder
from blr.compressor.workspace.manifest import read_manifest

register()

COMBINATIONS = [(None, "int8"), (None, "int4"), ("int8", "int4"), ("int4", "int8")]
IDS = torch.arange(40, 60)[None]


def load(folder: Path, dtype: torch.dtype | str = torch.float32) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def greedy(model: torch.nn.Module) -> list[int]:
    """24 tokens after `IDS`, by transformers."""
    return model.generate(IDS, max_new_tokens=24, do_sample=False, eos_token_id=None)[0].tolist()


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pico("llama", tmp_path_factory.mktemp("untied") / "llama")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "head"), COMBINATIONS)
@pytest.mark.parametrize("name", ["dense", "blast"])
def test_tensors_are_those_of_the_quantized_source(
    name: str, kind: str | None, head: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    """The tied embedding is stored unchanged beside the head's own weights."""
    folder = export_to(sources[name], tmp_path / "out", quantize=kind, quantize_head=head)
    stored = load_file(folder / "model.safetensors")
    model = load(sources[name], "auto")
    errors = quantize_head(model, int(head[3:]))
    packed = quantize_model(model, int(kind[3:]), skip=plain_layers(folder)) if kind else {}
    expected = model.state_dict()
    of_head = {key for key in stored if key.startswith("lm_head.")}
    assert of_head == {"lm_head.weight_q", "lm_head.weight_scale"}
    for key in of_head | {"model.embed_tokens.weight"}:
        assert stored[key].equal(expected[key]), key
    manifest = read_manifest(folder)
    assert manifest["quantization_errors"]["lm_head"] == pytest.approx(errors["lm_head"])
    kinds = {module.rpartition(".")[2] for module in packed}
    assert manifest["quantization_errors"].keys() == {"lm_head", *kinds}
    assert manifest["untied_bytes"] == sum(stored[key].nbytes for key in of_head)
    assert json.loads((folder / "config.json").read_bytes())["tie_word_embeddings"] is False


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "head"), COMBINATIONS)
def test_what_loads_computes_what_is_stored(
    kind: str | None, head: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    """Layers, head and embedding are what they should be, and the logits those of `quantize.py`."""
    folder = export_to(sources["svd"], tmp_path / "out", quantize=kind, quantize_head=head)
    found, plain = load(folder), plain_layers(folder)
    assert isinstance(found.lm_head, QuantizedLinear) and found.lm_head.packing.bits == int(head[3:])
    layers = {n: m for n, m in found.named_modules() if isinstance(m, StructuredLinear)}
    assert len(layers) == 28 and plain != list(layers)
    for name, layer in layers.items():
        bits = layer.packing and layer.packing.bits
        assert bits == (None if name in plain else kind and int(kind[3:]))
    expected = load(sources["svd"], "auto")
    quantize_head(expected, int(head[3:]))
    if kind:
        quantize_model(expected, int(kind[3:]), skip=plain)
    with torch.inference_mode():
        torch.testing.assert_close(found(IDS).logits, expected.float()(IDS).logits)


@pytest.mark.slow  # its parts one by one: above, and `test_export.py` without blr
def test_copied_elsewhere_without_blr_and_in_the_runtime_the_tokens_are_the_same(
    sources: dict[str, Path], untied: Path, tmp_path: Path
) -> None:
    made = {
        "tied": export_to(sources["dense"], tmp_path / "tied", quantize_head="int8"),
        "both": export_to(sources["blast"], tmp_path / "both", quantize="int4", quantize_head="int8"),
        "untied": export_to(untied, tmp_path / "untied", quantize="int8", quantize_head="int4"),
    }
    expected = {}
    for name, folder in made.items():
        model = load(folder)
        expected[name] = greedy(model)
        ours = Decoder(model, context=64, ops="torch").generate(IDS, max_new_tokens=24)
        assert IDS[0].tolist() + ours[0] == expected[name], name
    assert tokens_without_blr(made, IDS[0].tolist(), tmp_path / "elsewhere") == expected


def test_generate_of_the_export_takes_the_runtime_with_a_packed_head(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime reads the packed bytes of the head, not a dequantized copy."""
    model = load(export_to(sources["dense"], tmp_path / "out", quantize_head="int8", context=64))
    expected = greedy(model)
    held = Decoder(model, context=64, ops="torch")
    monkeypatch.setattr(fused, "obstacle", lambda device: None)
    monkeypatch.setattr(fused, "_make_decoder", lambda model, settings: held)
    assert greedy(model) == expected and held.rows == 1
    head = model.lm_head
    gain = model.model.norm.weight.nbytes
    (read,) = (held.bytes_of(phase) for phase in held.plan.phases if phase.name == "lm_head")
    assert read == head.packed().nbytes + gain
    bound = 0.35 * head.weight.nbytes  # float32 before; 192 columns are padded to 256
    assert read < bound


def test_an_untied_head_is_replaced(untied: Path, tmp_path: Path, invoke: Invoke) -> None:
    arguments = ("export", untied, "-o", tmp_path / "out", "--quiet", "--quantize-head", "int8")
    code, out, err = invoke(*arguments, "--format", "json")
    summary = json.loads(out)
    assert code == 0, err
    assert (summary["quantize"], summary["quantize_head"], summary["untied_bytes"]) == (None, "int8", 0)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert "lm_head.weight" not in stored and "model.embed_tokens.weight" in stored
    assert "untied_bytes" not in read_manifest(tmp_path / "out")


def test_a_checkpoint_that_stores_both_ends_of_a_tie(tiny: Path, tmp_path: Path) -> None:
    """As .bin files do: the head is made from its own copy, which goes; nothing is added."""
    model = load(tiny, "auto")
    folder = shutil.copytree(tiny, tmp_path / "both")
    state = {n: t.clone() for n, t in model.state_dict().items()}
    torch.save(state, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    made = export_to(folder, tmp_path / "out", quantize_head="int8", allow_pickle=True)
    one = export_to(tiny, tmp_path / "one", quantize_head="int8")
    assert "untied_bytes" not in read_manifest(made)
    found, expected = (load_file(f / "model.safetensors") for f in (made, one))
    assert found.keys() == expected.keys()
    assert all(tensor.equal(expected[key]) for key, tensor in found.items())


def test_a_structured_head_is_packed_as_the_structure_it_is(untied: Path, tmp_path: Path) -> None:
    source = compress_to(untied, tmp_path / "source", method="svd", cf=1.25, include=["*"])
    made = export_to(source, tmp_path / "out", quantize_head="int4")
    model = load(made)
    assert model.lm_head.spec.structure == "svd" and model.lm_head.packing.bits == 4
    assert getattr(model.model.layers[0].mlp.up_proj, "packing", None) is None
    ours = Decoder(model, context=64, ops="torch").generate(IDS, max_new_tokens=24)
    assert IDS[0].tolist() + ours[0] == greedy(model)


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_families_without_a_runtime(name: str, tmp_path: Path) -> None:
    """GPT-2's weights are stored [in, out], but not its head's; OPT has no table in configs/."""
    source = save_pico(name, tmp_path / "source")
    made = load(export_to(source, tmp_path / "out", quantize_head="int8"))
    expected = load(source)
    with torch.inference_mode():
        y, exact = made(IDS).logits, expected(IDS).logits
    assert 0 < float((y - exact).norm() / exact.norm()) < 0.01
    assert made.lm_head.weight.shape == expected.lm_head.weight.shape


def test_the_command_reports_the_loss_and_the_bytes(
    sources: dict[str, Path], tmp_path: Path, invoke: Invoke
) -> None:
    arguments = ("export", sources["dense"], "--quiet", "--overwrite", "-o", tmp_path / "out")
    code, out, err = invoke(*arguments, "--quantize", "int4", "--quantize-head", "int8")
    assert code == 0, err
    added = read_manifest(tmp_path / "out")["untied_bytes"]
    assert f"output head: {added:,} bytes beside the embedding" in out
    assert "error:       of int4 and int8 head, by layer type: " in out and "lm_head 0.00" in out
    assert "output head has int8 weights" in (tmp_path / "out" / "README.md").read_text()
    assert invoke("verify", tmp_path / "out")[0] == 0


@pytest.mark.parametrize("kind", [None, "int8", "int4"])
def test_the_head_stays_unless_asked(
    kind: str | None, sources: dict[str, Path], tmp_path: Path, invoke: Invoke
) -> None:
    """Whatever `--quantize` says. "none" says the same; `--as dense` takes that, too."""
    quantize = ("--quantize", kind) if kind else ("--as", "dense")
    for head in ((), ("--quantize-head", "none")):
        output = tmp_path / f"out{len(head)}"
        how = ("--quiet", "--format", "json", *quantize, *head)
        code, out, _ = invoke("export", sources["dense"], *how, "-o", output)
        assert code == 0 and json.loads(out)["quantize_head"] is None
        stored = load_file(output / "model.safetensors")
        assert not any(name.startswith("lm_head.weight_") for name in stored)
    files = [(tmp_path / f"out{n}" / "model.safetensors").read_bytes() for n in (0, 2)]
    assert files[0] == files[1]


@pytest.mark.parametrize("name", ["bert", "bert-mlm"])
def test_models_without_such_a_head_are_refused(name: str, tmp_path: Path, invoke: Invoke) -> None:
    source = save_pico(name, tmp_path / "source")
    code, out, err = invoke("export", source, "-o", tmp_path / "out", "--quantize-head", "int8", "-q")
    assert (code, out) == (2, "") and "is no causal language model" in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()
    code, _, err = invoke("export", source, "-o", tmp_path / "out", "--quantize-head", "fp8", "-q")
    assert code == 2 and "--quantize-head fp8: expected one of int8, int4, none" in err
