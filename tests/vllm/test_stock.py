"""`blr export --as vllm` in vLLM without blr's plugin: the checkpoint's log-probabilities and tokens.

vLLM's CPU build has a kernel for 4 bits alone, in half precision; for packed experts it asks for AMX.
Others run on a GPU. Here vLLM reads
the configuration and loads weights and adapter of those, and plain torch stands in for the kernel.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import compress_to, export_to
from patience import PATIENCE
from pico import save_model
from served import MIXTURES, MODELS, PROMPT
from tolerances import TOLERANCES
from transformers import AutoModelForCausalLM

from blr.compressor import register
from blr.compressor.exporting.files import elsewhere

register()

FORMATS: dict[str, dict[str, Any]] = {
    "int4": {"method": "dense", "quantize": "int4"},
    "int4-16": {"method": "svd", "base": "int4", "rank": 16},
    "int8": {"method": "dense", "quantize": "int8"},
    "int3-16": {"method": "svd", "base": "int3", "rank": 16},
    "int2": {"method": "dense", "quantize": "int2"},
    "int2-16": {"method": "svd", "base": "int2", "rank": 16},
}
PLAIN = """
import torch
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import compressed_tensors_wNa16

def plain(packed, scale, bits, inputs):
    stream = (packed[..., None] >> torch.arange(32) & 1).flatten(-2)[..., : inputs * bits]
    levels = (stream.unflatten(-1, (-1, bits)) << torch.arange(bits)).sum(-1) - 2 ** (bits - 1)
    return (levels.unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]).flatten(-2)

class Plain:
    def __init__(self, config, **names):
        self.config = config

    def process_weights_after_loading(self, layer):
        pass

    def apply_weights(self, layer, x, bias=None):
        bits, inputs = self.config.weight_type.size_bits, self.config.partition_weight_shape[0]
        weight = plain(layer.weight_packed, layer.weight_scale, bits, inputs)
        return torch.nn.functional.linear(x, weight.to(x.dtype), bias)

compressed_tensors_wNa16.choose_mp_linear_kernel = lambda config: Plain
"""
PLAIN_EXPERTS = """
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_wna16 as moe,
)

class PlainExperts(moe.CompressedTensorsWNA16MoEMethod):
    is_monolithic = False

    def process_weights_after_loading(self, layer):
        stored = [(layer.w13_weight_packed, layer.w13_weight_scale)]
        stored += [(layer.w2_weight_packed, layer.w2_weight_scale)]
        self.weights = [plain(p, s, self.num_bits, s.shape[-1] * self.group_size) for p, s in stored]

    def apply(self, layer, x, topk_weights, topk_ids, *shared, **named):
        gate_up, down = (w[topk_ids.long()].to(x.dtype) for w in self.weights)
        gate, up = torch.einsum("tkoi,ti->tko", gate_up, x).chunk(2, -1)
        y = torch.einsum("tkoi,tki->tko", down, torch.nn.functional.silu(gate) * up)
        return (y * topk_weights[..., None].to(x.dtype)).sum(1)

moe.select_wna16_moe_backend = lambda **asked: (moe.WNA16MoEBackend.TRITON, None)
moe.CompressedTensorsWNA16MoEMethod = PlainExperts
"""
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
              max_num_seqs=4, gpu_memory_utilization=0.2, **how)
    sampling = SamplingParams(temperature=0, max_tokens=32, prompt_logprobs=1, detokenize=False,
                              ignore_eos=True)
    adapter = LoRARequest("corrected", 1, folder + "/adapter") if corrected else None
    found = llm.generate([{"prompt_token_ids": prompt}], sampling, lora_request=adapter)[0]
    scores = [row[t].logprob for row, t in zip(found.prompt_logprobs[1:], prompt[1:], strict=True)]
    with open(sys.argv[3], "w") as file:
        json.dump([scores, list(found.outputs[0].token_ids)], file)
"""

# arguments: a model, a prompt, a file for its greedy tokens, the settings of a draft or nothing
DRAFTED = """
import json, sys
if __name__ == "__main__":
    from vllm import LLM, SamplingParams
    folder, prompt, out, *draft = sys.argv[1:]
    how = {"speculative_config": json.loads(draft[0])} if draft else {}
    llm = LLM(folder, skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=128,
              max_num_seqs=4, **how)
    sampling = SamplingParams(temperature=0, max_tokens=32, detokenize=False, ignore_eos=True)
    found = llm.generate([{"prompt_token_ids": json.loads(prompt)}], sampling)[0]
    open(out, "w").write(json.dumps(list(found.outputs[0].token_ids)))
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
        save_model(*{**MODELS, **MIXTURES}[kind], dense)
    source = compress_to(dense, folder / f"{name}-ours", group=32, **FORMATS[name])
    return source, export_to(source, folder / name, kind="vllm", dtype="bfloat16", check=False)


CASES = [(kind, name) for kind in ("tiny", "llama", "qwen2", "qwen3") for name in FORMATS]
CASES += [(kind, name) for kind in MIXTURES for name in ("int4", "int8")]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_the_same_as_the_checkpoint(kind: str, name: str, tiny: Path, tmp_path: Path) -> None:
    source, folder = exported(kind, name, tiny, tmp_path)
    code = SERVE if name.startswith("int4") else PLAIN + SERVE
    code = PLAIN + PLAIN_EXPERTS + SERVE if kind in MIXTURES else code
    done = run(code, str(folder), json.dumps(PROMPT), str(tmp_path / "out.json"))
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


def test_a_draft_of_ours_leaves_the_dense_models_tokens(tiny: Path, tmp_path: Path) -> None:
    """By the settings that the card of a pair names."""
    _, folder = exported("tiny", "int4", tiny, tmp_path)
    line = shlex.split(elsewhere("model", str(folder))["vllm"])
    found = []
    for draft in ([], line[line.index("--speculative-config") + 1 :]):
        done = run(DRAFTED, str(tiny), json.dumps(PROMPT), str(tmp_path / "out.json"), *draft)
        assert done.returncode == 0, done.stderr[-4000:]
        found.append(json.loads((tmp_path / "out.json").read_text()))
    assert found[0] == found[1] and len(found[0]) == 32
