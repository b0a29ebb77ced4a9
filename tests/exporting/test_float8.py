"""Checkpoints in float8: the file, both doors, the export, and what moves and casts leave as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from exporting import compress_to, export_to, tokens_without_blr
from running import Invoke
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from blr.compressor import register
from blr.compressor.fitting.student import make_twin
from blr.compressor.modeling.layers import StructuredLinear
from blr.compressor.structures.specs import spec_from_dict

register()

CASES = {
    "svd": {"method": "svd", "cf": 1.5, "quantize": "fp8"},
    "monarch": {"method": "monarch", "cf": 1.5, "blocks": 4, "quantize": "fp8", "group": 128},
    "dense": {"method": "dense", "quantize": "fp8"},
}


@pytest.fixture(scope="module", params=CASES)
def stored(request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compress_to(tiny, tmp_path_factory.mktemp(request.param) / "c", **CASES[request.param])


def test_file_and_export_hold_the_same_bytes(stored: Path, tmp_path: Path, invoke: Invoke) -> None:
    tensors = load_file(stored / "model.safetensors")
    kinds = {name.rpartition("_")[2]: t.dtype for name, t in tensors.items() if "_q" in name}
    assert set(kinds.values()) == {torch.float8_e4m3fn}
    exported = export_to(stored, tmp_path / "e")
    again = load_file(exported / "model.safetensors")
    packed = [name for name in tensors if name.endswith(("_q", "_scale"))]
    assert all(tensors[n].view(torch.uint8).equal(again[n].view(torch.uint8)) for n in packed)
    for folder in (stored, exported):
        assert invoke("verify", folder)[0] == 0
    code, out, _ = invoke("inspect", stored, "--format=json")
    assert code == 0 and 5 < json.loads(out)["bits"] < 8.2


def test_the_code_in_the_folder_computes_the_same(tiny: Path, tmp_path: Path) -> None:
    stored = compress_to(tiny, tmp_path / "c", **CASES["svd"])
    ids = list(range(5, 17))
    found = tokens_without_blr({"in": stored}, ids, tmp_path / "elsewhere")["in"]
    model = AutoModelForCausalLM.from_pretrained(stored, dtype=torch.float32).eval()
    expected = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False, eos_token_id=None)
    assert found == expected[0].tolist()


def test_casts_and_moves_leave_what_is_stored(stored: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(stored, dtype=torch.bfloat16).eval()
    before = {n: b.view(torch.uint8).clone() for n, b in model.named_buffers() if n.endswith("_q")}
    assert before
    model.half().float()
    after = {n: b for n, b in model.named_buffers() if n in before}
    assert {b.dtype for b in after.values()} == {torch.float8_e4m3fn}
    assert all(before[name].equal(b.view(torch.uint8)) for name, b in after.items())
    layers = [m for m in model.modules() if isinstance(m, StructuredLinear)]
    assert all(layer.weight.dtype == torch.float32 for layer in layers)
    assert torch.isfinite(model(torch.arange(9)[None]).logits).all()

    holder = next(m for m in model.modules() if any(n.endswith("_q") for n in m._buffers))

    def full(_: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        holder._apply(full)
    assert torch.isfinite(model(torch.arange(9)[None]).logits).all()


def test_numbered_factors_are_as_stored(tiny: Path, tmp_path: Path) -> None:
    stored = compress_to(tiny, tmp_path / "c", method="ks", cf=1.5, quantize="fp8")
    exported = export_to(stored, tmp_path / "e")
    tensors = load_file(stored / "model.safetensors")
    for folder in (stored, exported):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval().half().float()
        packed = {n: b for n, b in model.named_buffers() if "factors_q." in n}
        assert packed and all(
            tensors[n].dtype == b.dtype == torch.float8_e4m3fn for n, b in packed.items()
        )
        assert all(tensors[n].view(torch.uint8).equal(b.view(torch.uint8)) for n, b in packed.items())
        assert torch.isfinite(model(torch.arange(9)[None]).logits).all()


def test_a_twin_stores_what_it_was_made_of(stored: Path) -> None:
    """Rounding what is rounded already gives the same numbers, their scales within their precision."""
    tensors = load_file(stored / "model.safetensors")
    table = json.loads((stored / "config.json").read_text())["blr"]["layers"]
    name, fields = next(iter(table.items()))
    own = {k.removeprefix(f"{name}."): t for k, t in tensors.items() if k.startswith(f"{name}.")}
    twin = make_twin(spec_from_dict(fields), own)
    back = twin.stored(torch.bfloat16)
    assert back.keys() == own.keys()
    for key, tensor in back.items():
        assert tensor.dtype == own[key].dtype
        if key.endswith("_scale"):
            assert torch.allclose(tensor.float(), own[key].float(), rtol=2**-7)


def test_what_float8_does_not_go_with_is_refused(tiny: Path, tmp_path: Path, invoke: Invoke) -> None:
    for more, said in (
        (["--method", "svd", "--group", "64"], "group 64 does not belong to fp8"),
        (["--method", "svd", "--base", "int4", "--rank", "4"], "does not belong to a correction"),
    ):
        code, _, err = invoke("compress", tiny, "-o", tmp_path / "o", "--quantize", "fp8", *more)
        assert code == 2 and said in err, err
