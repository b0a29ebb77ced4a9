"""`blr export --as vllm` in vLLM without blr's plugin: the checkpoint's log-probabilities and tokens.

vLLM's CPU build has 4 bits alone, in half precision. Its other bits run on a GPU; here its reader of the
configuration takes them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import compress_to, export_to
from patience import PATIENCE
from pico import save_model
from served import MODELS, PROMPT
from tolerances import TOLERANCES
from transformers import AutoModelForCausalLM

from blr.compressor import register

register()

FORMATS: dict[str, dict[str, Any]] = {
    "int4": {"method": "dense", "quantize": "int4"},
    "int4-16": {"method": "svd", "base": "int4", "rank": 16},
    "int8": {"method": "dense", "quantize": "int8"},
}
# arguments: folder, prompt, a file for log-probabilities of the prompt's tokens and generated tokens
SERVE = """
import json, sys
if __name__ == "__main__":
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest
    folder, prompt = sys.argv[1], json.loads(sys.argv[2])
    corrected = folder.endswith("-16")
    how = {"enable_lora": True, "max_lora_rank": 16} if corrected else {}
    llm = LLM(folder, skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=128,
              max_num_seqs=4, **how)
    sampling = SamplingParams(temperature=0, max_tokens=32, prompt_logprobs=1, detokenize=False,
                              ignore_eos=True)
    adapter = LoRARequest("corrected", 1, folder + "/adapter") if corrected else None
    found = llm.generate([{"prompt_token_ids": prompt}], sampling, lora_request=adapter)[0]
    scores = [row[t].logprob for row, t in zip(found.prompt_logprobs[1:], prompt[1:], strict=True)]
    with open(sys.argv[3], "w") as file:
        json.dump([scores, list(found.outputs[0].token_ids)], file)
"""
READ = """
import json, sys
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
import torch
for folder in sys.argv[1:]:
    with open(folder + "/config.json") as file:
        config = CompressedTensorsConfig.from_config(json.load(file)["quantization_config"])
    scheme = config.get_scheme(torch.nn.Linear(1, 1), "model.layers.0.mlp.down_proj")
    print(type(scheme).__name__, scheme.num_bits, scheme.group_size)
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    small = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    small |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": ""}
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | small
    return subprocess.run(
        [sys.executable, "-c", *command],
        capture_output=True,
        text=True,
        env=environment,
        timeout=PATIENCE,
    )


def exported(kind: str, name: str, tiny: Path, folder: Path) -> tuple[Path, Path]:
    """The compressed checkpoint of a model type in a format, and its export."""
    dense = tiny
    if kind != "tiny":
        dense = folder / kind
        save_model(*MODELS[kind], dense)
    source = compress_to(dense, folder / f"{name}-ours", group=32, **FORMATS[name])
    return source, export_to(source, folder / name, kind="vllm", dtype="bfloat16", check=False)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", ["tiny", "llama", "qwen2", "qwen3"])
def test_the_same_as_the_checkpoint(kind: str, name: str, tiny: Path, tmp_path: Path) -> None:
    source, folder = exported(kind, name, tiny, tmp_path)
    done = run(SERVE, str(folder), json.dumps(PROMPT), str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr[-4000:]
    scores, tokens = json.loads((tmp_path / "out.json").read_text())
    model, ids = AutoModelForCausalLM.from_pretrained(source).float().eval(), torch.tensor([PROMPT])
    with torch.no_grad():
        expected = model(ids).logits[0].log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
        after = model(torch.tensor([PROMPT + tokens[:-1]])).logits[0, len(PROMPT) - 1 :]
    missed = (torch.tensor(scores) - expected).norm() / expected.norm()
    assert float(missed) < TOLERANCES[torch.bfloat16]
    behind = after.max(-1).values - after.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert float(behind.max()) < TOLERANCES[torch.bfloat16] * float(after.abs().max())  # but for ties


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8), ("int3", 3), ("int2", 3)])
def test_its_reader_takes_the_other_bits(kind: str, bits: int, tiny: Path, tmp_path: Path) -> None:
    grid = {"grid": "uniform"} if kind == "int3" else {}
    source = compress_to(tiny, tmp_path / "source", method="dense", quantize=kind, group=32, **grid)
    folder = export_to(source, tmp_path / "out", kind="vllm", check=False)
    done = run(READ, str(folder))
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split()[-3:] == ["CompressedTensorsWNA16", str(bits), "32"]
