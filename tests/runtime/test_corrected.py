"""Layers ``W = Q + S`` as phases: by kernels (interpreter) and references, as transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import compress_to
from pico import MODELS, save_pico
from tolerances import TOLERANCES
from transformers import AutoModelForCausalLM

from blr.compressor import register
from blr.compressor.modeling.layers import StructuredLinear
from blr.compressor.modeling.stages import narrow_factor
from blr.compressor.runtime.decoder import Decoder
from blr.kernels.common.available import has_triton

register()

# What is packed how, and the phases of a layer that corrections bring: rank 4 in one launch; of plain
# numbers and in blocks with launches of their own; a mixture.
KINDS: dict[str, dict[str, Any]] = {
    "int2": {"base": "int2", "quantize": "int4", "rank": 4},
    "int3": {"base": "int3", "grid": "curved", "quantize": "int8", "rank": 3},
    "plain": {"base": "int2", "quantize": "none", "rank": 4},
    "uniform": {"base": "int3", "quantize": "int4", "rank": 3},
    "blast": {"base": "int3", "quantize": "int4", "method": "blast", "blocks": 4, "rank": 4},
    "mixed": {"base": "int2", "rank": 4, "rules": [{"match": "*.k_proj", "base": "int3", "rank": 4}]},
    "grids": {"base": "int3", "rank": 4, "rules": [{"match": "*.k_proj", "grid": "curved", "rank": 4}]},
}


def _model(folder: Path, kind: dict[str, Any]) -> Any:
    given = {"method": "svd", "group": 32, **kind}
    given["rules"] = [{**given, **rule, "rules": None} for rule in given.pop("rules", [])]
    for rule in given["rules"]:
        del rule["rules"]
    source = save_pico("llama", folder / "dense")
    output = compress_to(source, folder / "out", **{k: v for k, v in given.items() if v != []})
    return AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32).eval()


@pytest.mark.skipif(not has_triton(), reason="needs triton")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_transformers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS["llama"][1], "num_hidden_layers", 1)  # the interpreter takes its time
    model = _model(tmp_path, KINDS[kind])
    ids = torch.tensor([[5, 9, 3], [7, 2, 8]])[: 2 if kind in ("int3", "uniform") else 1]
    token = torch.tensor([4, 6])[: len(ids)]
    with torch.inference_mode():
        expected = model(torch.cat([ids, token[:, None]], 1)).logits[:, -1]
    for ops in ("torch", "triton"):
        decoder = Decoder(model, batch=len(ids), context=8, ops=ops)
        decoder.prefill(ids)
        found = decoder.step(token)
        assert float((found - expected).norm() / expected.norm()) < TOLERANCES[torch.float32], ops
        assert {"module", "norm"} & {phase.kind for phase in decoder.plan.phases} == set()


@pytest.mark.parametrize("bits", ["int8", "int4", "int3"])
def test_narrow_factors_are_those_that_are_dequantized(bits: str, tmp_path: Path) -> None:
    """Rows that share a group, and levels that are no whole multiples of their scale."""
    model = _model(tmp_path, {"base": "int2", "quantize": bits, "rank": 4, "group": 32})
    found = [m for m in model.modules() if isinstance(m, StructuredLinear) and m.packing]
    assert found and any(layer.packing.tiled for layer in found)
    for layer in found:
        assert torch.equal(narrow_factor(layer, "U").dense(torch.float32)[0], layer.U)


@pytest.mark.skipif(not has_triton(), reason="needs triton")
def test_inputs_of_three_rows_are_made_ready_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In half precision, by launches before those of the products."""
    monkeypatch.setitem(MODELS["llama"][1], "num_hidden_layers", 1)
    model = _model(tmp_path, KINDS["int3"]).half()
    ids, token = torch.tensor([[5, 9, 3], [7, 2, 8], [1, 6, 4]]), torch.tensor([4, 6, 2])
    found = []
    for ops in ("torch", "triton"):
        decoder = Decoder(model, batch=3, context=8, ops=ops)
        decoder.prefill(ids)
        found.append(decoder.step(token))
    assert float((found[0] - found[1]).norm() / found[0].norm()) < TOLERANCES[torch.float16]


# How many launches prepare the inputs of one layer: of q|k|v, o, gate|up and down, but where the stage
# before stores them in the order of the weights.
HALF: dict[str, tuple[dict[str, Any], int]] = {
    "int2": (KINDS["int2"], 4),
    "plain": (KINDS["plain"], 4),
    "dense": ({"method": "dense", "quantize": "int4"}, 3),
    "lowrank": ({"quantize": "int4", "rank": 8}, 3),
    "ragged": ({"quantize": "int4", "rank": 40, "group": 64}, 3),
}


@pytest.mark.skipif(not has_triton(), reason="needs triton")
@pytest.mark.sampled(4)
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("kind", HALF)
def test_half_precision_goes_by_skinny_products(
    kind: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import blr.kernels.decode.skinny.prepare as module

    settings, launches = HALF[kind]
    monkeypatch.setitem(MODELS["llama"][1], "num_hidden_layers", 2 if rows > 1 else 1)
    model = _model(tmp_path, settings).half()
    ids, token = torch.tensor([[5, 9, 3], [7, 2, 8], [1, 6, 4]])[:rows], torch.tensor([4, 6, 2])[:rows]
    found, seen, prepare = [], [], module.prepare
    monkeypatch.setattr(module, "prepare", lambda *a, **k: (seen.append(1), prepare(*a, **k)))
    for ops in ("torch", "triton"):
        decoder = Decoder(model, batch=rows, context=8, ops=ops)
        decoder.prefill(ids)
        found.append(decoder.step(token))
    assert float((found[0] - found[1]).norm() / found[0].norm()) < TOLERANCES[torch.float16]
    layers = model.config.num_hidden_layers
    assert len(seen) == (rows > 1) * (launches * layers + 1)  # the head is plain, after the last norm


@pytest.mark.skipif(not has_triton(), reason="needs triton")
@pytest.mark.parametrize("rows", [2, 3])
def test_packed_stages_behind_plain_ones(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What reads a result says in which order it is stored."""
    monkeypatch.setitem(MODELS["llama"][1], "num_hidden_layers", 1)
    settings = {"method": "dense", "quantize": "int4", "exclude": ["*gate_proj", "*up_proj"]}
    model = _model(tmp_path, settings).half()
    ids, token = torch.tensor([[5, 9, 3], [7, 2, 8], [1, 6, 4]])[:rows], torch.tensor([4, 6, 2])[:rows]
    found = []
    for ops in ("torch", "triton"):
        decoder = Decoder(model, batch=rows, context=8, ops=ops)
        decoder.prefill(ids)
        found.append(decoder.step(token))
    assert float((found[0] - found[1]).norm() / found[0].norm()) < TOLERANCES[torch.float16]


@pytest.mark.skipif(not has_triton(), reason="needs triton")
@pytest.mark.parametrize("kind", ["int2", "dense2"])
def test_two_rows_of_few_bits_run_one_after_the_other(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By products of bytes, wherever those take them; the others on tensor cores."""
    from blr.kernels.decode import choice

    sizes = {"weights": (0, choice.ENDLESS)}
    rules = [rule._replace(**sizes) for rule in choice.STAGES]
    monkeypatch.setitem(choice.RULES, "stages", rules)
    monkeypatch.setattr(choice, "chosen", choice.chosen.__wrapped__)
    monkeypatch.setitem(MODELS["llama"][1], "num_hidden_layers", 1)
    settings = {"method": "dense", "quantize": "int2"} if kind == "dense2" else KINDS[kind]
    model = _model(tmp_path, {**settings, "group": 64}).half()
    found = []
    for ops in ("torch", "triton"):
        decoder = Decoder(model, batch=2, context=8, ops=ops)
        decoder.prefill(torch.tensor([[5, 9, 3], [7, 2, 8]]))
        found.append(decoder.step(torch.tensor([4, 6])))
    assert float((found[0] - found[1]).norm() / found[0].norm()) < TOLERANCES[torch.float16]
