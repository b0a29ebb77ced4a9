"""`blr export --as vllm` as compressed-tensors, transformers and peft read it, without blr."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bare
import pytest
import torch
from exporting import compress_to, export_to
from pico import MODELS, save_model
from running import Invoke
from tolerances import TOLERANCES
from transformers import AutoModelForCausalLM

from blr.compressor import register

register()

IDS = torch.arange(2, 26)
FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"method": "dense", "quantize": "int8"},
    "int4": {"method": "dense", "quantize": "int4"},
    "int3": {"method": "dense", "quantize": "int3"},
    "int2": {"method": "dense", "quantize": "int2"},
}
FORMATS |= {f"{kind}-16": {"method": "svd", "rank": 16, "base": kind} for kind in FORMATS}
TAKEN = {"llama": (*FORMATS,), "qwen2": ("int4", "int2-16"), "qwen3": ("int3", "int8-16")}
# Loads folders where blr cannot be imported; prints the logits and the tokens of each
STOCK = (
    bare.without("blr")
    + """
import json
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, CompressedTensorsConfig
found = {}
for folder in sys.argv[2:]:
    how = {"quantization_config": CompressedTensorsConfig(run_compressed=False)}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how)
    if folder.endswith("-16"):
        model = PeftModel.from_pretrained(model, folder + "/adapter")
    ids = torch.tensor([json.loads(sys.argv[1])])
    with torch.no_grad():
        logits = model.eval()(input_ids=ids).logits[0].tolist()
    how = {"max_new_tokens": 32, "do_sample": False, "eos_token_id": None}
    found[folder] = logits, model.generate(input_ids=ids, **how)[0].tolist()
print(json.dumps(found))
"""
)


@pytest.fixture(scope="module")
def dense(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models by type; Qwen2 has biases, and both of Qwen tied heads."""
    folder, found = tmp_path_factory.mktemp("dense"), {"llama": tiny}
    for kind in ("qwen2", "qwen3"):
        config, settings, cls = MODELS[kind]
        settings = {**settings, "intermediate_size": 64, "tie_word_embeddings": True}
        found[kind] = folder / kind
        save_model(config, settings, cls, found[kind])
    return found


@pytest.mark.parametrize("kind", TAKEN)
def test_stock_libraries_compute_what_ours_do(kind: str, dense: dict[str, Path], tmp_path: Path) -> None:
    made = {}
    for name in TAKEN[kind]:
        source = compress_to(dense[kind], tmp_path / f"{name}-ours", group=32, **FORMATS[name])
        made[name] = source, export_to(source, tmp_path / name, kind="vllm", dtype="float32")
    done = bare.run(STOCK, json.dumps(IDS.tolist()), *(out for _, out in made.values()), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    stock = json.loads(done.stdout.splitlines()[-1])
    for name, (source, out) in made.items():
        ours = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
        with torch.no_grad():
            expected = ours(IDS[None]).logits[0]
        logits, tokens = stock[str(out)]
        missed = (torch.tensor(logits) - expected).norm() / expected.norm()
        assert float(missed) < 10 * TOLERANCES[torch.float32], name
        with torch.no_grad():
            scores = ours(torch.tensor([tokens[:-1]])).logits[0, len(IDS) - 1 :]
        chosen = scores.gather(1, torch.tensor(tokens[len(IDS) :])[:, None])[:, 0]
        assert len(chosen) == 32, name
        ties = 10 * TOLERANCES[torch.float32] * float(scores.abs().max())
        assert float((scores.max(-1).values - chosen).max()) <= ties, name


def test_the_command_tells_what_the_engine_loses(
    dense: dict[str, Path], tmp_path: Path, invoke: Invoke
) -> None:
    source = compress_to(dense["llama"], tmp_path / "source", group=32, **FORMATS["int2-16"])
    code, out, err = invoke("export", source, "-o", tmp_path / "out", "--as", "vllm", "--format", "json")
    assert code == 0 and "28 layers in int2 are written in 3 bits" in err
    found = json.loads(out)
    assert found["check"]["kl"]["mean"] < 1e-4 and found["check"]["agreement"] > 0.98
    assert "mean KL" in (tmp_path / "out" / "README.md").read_text()
