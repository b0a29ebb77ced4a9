"""Checkpoints in few bits and their exports: the same bytes, the same loss; what cannot be is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from exporting import compress_to, export_to, tokens_without_blr
from pico import save_pico
from running import Invoke
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from blr.compressor import register
from blr.compressor.modeling.layers import CorrectedLinear, QuantizedLinear
from blr.compressor.runtime.decoder import Decoder

register()

CORRECTED = {"method": "svd", "base": "int2", "rank": 16, "group": 64}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}


@pytest.fixture(scope="module")
def corrected(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compress_to(tiny, tmp_path_factory.mktemp("corrected") / "c", **CORRECTED)


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_dense_weights_are_packed_as_an_export_packs_them(kind: str, tiny: Path, tmp_path: Path) -> None:
    """Canonical, exported from that, or exported from the dense checkpoint: the same bytes."""
    stored = compress_to(tiny, tmp_path / "canonical", method="dense", quantize=kind)
    again = export_to(stored, tmp_path / "again")
    direct = export_to(tiny, tmp_path / "direct", quantize=kind, check=False)
    found = [tensors(folder) for folder in (stored, again, direct)]
    assert found[0].keys() == found[1].keys() == found[2].keys()
    for name, tensor in found[0].items():
        assert all(other[name].dtype == tensor.dtype and other[name].equal(tensor) for other in found)


@pytest.mark.parametrize("name", ["corrected", "structured"])
def test_an_export_loses_what_its_checkpoint_loses(
    name: str, corrected: Path, tiny: Path, sample: Path, tmp_path: Path, invoke: Invoke
) -> None:
    given = {"method": "svd", "cf": 1.25, "quantize": "int4"}
    source = corrected if name == "corrected" else compress_to(tiny, tmp_path / "svd", **given)
    code, _, err = invoke("export", source, "-o", tmp_path / "out")
    assert code == 0 and "formats without kernels" not in err
    losses = []
    for folder in (source, tmp_path / "out"):
        code, out, err = invoke("eval", folder, "--text", sample, "--max-tokens", 1024, "--format=json")
        assert code == 0, err
        losses.append(json.loads(out)["perplexity"])
        assert invoke("verify", folder)[0] == 0
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    code, out, _ = invoke("inspect", tmp_path / "out", "--format=json")
    found = json.loads(out)
    size = sum(8 * t.nbytes for n, t in tensors(source).items() if n.endswith(("_q", "_scale")))
    assert found["bits"] == pytest.approx(size / found["dense_parameters"])
    assert f"{found['bits']:.3f} bits a weight" in (source / "README.md").read_text()


def test_an_export_runs_without_blr_and_in_the_runtime(corrected: Path, tmp_path: Path) -> None:
    """The tokens of the checkpoint's own model, by stages alone."""
    output = export_to(corrected, tmp_path / "out")
    ids = list(range(5, 17))
    there = tokens_without_blr({"out": output}, ids, tmp_path / "elsewhere")["out"]
    model = AutoModelForCausalLM.from_pretrained(corrected, dtype=torch.float32).eval()
    given = torch.tensor([ids])
    expected = model.generate(given, max_new_tokens=24, do_sample=False, eos_token_id=None)[0].tolist()
    assert there == expected
    exported = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32).eval()
    decoder = Decoder(exported, batch=1, context=64, ops="torch")
    found = decoder.generate(given, None, max_new_tokens=24)[0]
    assert expected == ids + found
    assert {phase.kind for phase in decoder.plan.phases} & {"module", "norm"} == set()


def test_the_way_back_is_a_dense_checkpoint(corrected: Path, tmp_path: Path) -> None:
    dense = export_to(corrected, tmp_path / "dense", kind="dense")
    models = [
        AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32).eval() for f in (dense, corrected)
    ]
    ids = torch.arange(5, 29)[None]
    with torch.inference_mode():
        y, expected = (model(ids).logits for model in models)
    assert type(models[0]).__name__ == "LlamaForCausalLM"
    assert float((y - expected).norm() / expected.norm()) < 0.05  # weights are rounded to bfloat16


def test_a_mixture_by_rules(tiny: Path, tmp_path: Path) -> None:
    """Each layer as its rule says; what is kept dense is counted in the bits."""
    rules = [
        {"match": "*.v_proj", "method": "dense", "quantize": "none"},
        {"match": "*.down_proj", "method": "dense", "quantize": "int4"},
        {"match": "*.o_proj", "base": "none", "quantize": "none", "rank": 20},
        {"match": "*.q_proj", "base": "none", "quantize": "int4", "rank": 40},
    ]
    output = compress_to(tiny, tmp_path / "out", **{**CORRECTED, "rules": rules})
    model = AutoModelForCausalLM.from_pretrained(output)
    block = model.model.layers[0]
    kinds = {
        name: getattr(block.get_submodule(name), "described", None)
        for name in ("self_attn.v_proj", "mlp.down_proj", "self_attn.o_proj", "self_attn.q_proj")
    }
    found = [kind and (kind.structure, kind.quantized) for kind in kinds.values()]
    assert found == [None, ("dense", True), ("svd", False), ("svd", True)]
    assert isinstance(block.mlp.up_proj, CorrectedLinear) and isinstance(
        block.mlp.up_proj.base, QuantizedLinear
    )
    export_to(output, tmp_path / "exported")
    facts = json.loads((output / "report.json").read_bytes())["totals"]
    held = {n: t for n, t in tensors(output).items() if ".layers." in n and "norm" not in n}
    bits = sum(8 * tensor.nbytes for tensor in held.values()) / facts["dense_parameters"]
    assert facts["bits"] == pytest.approx(bits, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("export", "--quantize", "int4"), 2, "few bits already"),
        (("compress", "--method", "svd"), 4, "already compressed by blr"),
    ],
)
def test_what_cannot_be_done_again_is_refused(
    arguments: tuple[str, ...], code: int, message: str, corrected: Path, tmp_path: Path, invoke: Invoke
) -> None:  # fmt: skip
    command, *options = arguments
    found = invoke(command, corrected, *options, "-o", tmp_path / "out", "-q")
    assert found[0] == code and message in found[2].splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_layers_that_would_not_get_smaller_are_left_and_said(tmp_path: Path, invoke: Invoke) -> None:
    source = save_pico("llama", tmp_path / "dense", dtype=torch.bfloat16)
    given = ("plan", source, "--method", "dense", "--quantize", "int8")
    code, _, err = invoke(*given)
    assert code == 2 and "no layer is left: take a smaller --group" in err
    code, out, _ = invoke(*given, "--group", 32, "--format=json")
    found = json.loads(out)
    assert code == 0 and found["bits"] == pytest.approx(
        found["totals"]["bytes"] * 8 / found["totals"]["parameters"]
    )


def _spoil(folder: Path, name: str, change: object) -> None:
    path = folder / "model.safetensors"
    held = load_file(path)
    held[name] = change(held[name])
    save_file(held, path, metadata={"format": "pt"})
    (folder / "blr_manifest.json").unlink()
    config = json.loads((folder / "config.json").read_bytes())
    config["blr"]["saved"] = {"by": "transformers", "from": "x"}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("part", "change", "code", "message"),
    [
        ("base.weight_scale", lambda t: t * float("nan"), 7, "NaN or Inf"),
        ("correction.U_scale", lambda t: t / 0, 7, "NaN or Inf"),
        ("base.weight_q", lambda t: t[:, :-1].contiguous(), 4, "weight_q"),
        ("base.weight_q", lambda t: t.float(), 4, "weight_q"),
    ],
    ids=["nan", "inf", "shape", "dtype"],
)
def test_hostile_tensors(
    part: str, change: object, code: int, message: str, tiny: Path, sample: Path, tmp_path: Path,
    invoke: Invoke,
) -> None:  # fmt: skip
    rules = [{"match": "*.k_proj", **CORRECTED, "quantize": "int4"}]
    source = compress_to(tiny, tmp_path / "c", method="svd", rank=8, include=["*.k_proj"], rules=rules)
    _spoil(source, f"model.layers.0.self_attn.k_proj.{part}", change)
    found = invoke("export", source, "-o", tmp_path / "out", "-q")
    assert found[0] == code and message in found[2].splitlines()[-1], found
    if code == 7:
        found = invoke("eval", source, "--text", sample, "--max-tokens", 64)
        assert found[0] == code and message in found[2].splitlines()[-1]


@pytest.mark.parametrize(
    "change", [{"bits": 5}, {"group": 7}, {"bits": 8}, {"in_features": -4}], ids=str
)
def test_hostile_entries(
    change: dict[str, int], corrected: Path, tmp_path: Path, invoke: Invoke
) -> None:
    import shutil

    folder = shutil.copytree(corrected, tmp_path / "c")
    (folder / "blr_manifest.json").unlink()
    config = json.loads((folder / "config.json").read_bytes())
    config["blr"]["saved"] = {"by": "transformers", "from": "x"}
    config["blr"]["layers"]["model.layers.0.mlp.up_proj"]["base"].update(change)
    (folder / "config.json").write_text(json.dumps(config))
    for command in (("export", folder, "-o", tmp_path / "out"), ("generate", folder, "a")):
        code, _, err = invoke(*command)
        assert code in (4, 10) and err.count("blr: error") == 1, err
