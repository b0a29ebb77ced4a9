"""vLLM gives the log-probabilities that transformers gives: by the plugin, by the Transformers backend,
in one process and in two."""

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
from served import MIXTURES, MODELS, PROMPT
from transformers import AutoModelForCausalLM

from blr.compressor import register

register()

METHODS: dict[str, dict[str, Any]] = {
    "svd": {},
    "heads": {"heads": "per-head"},
    "monarch": {"blocks": 4},
    "blast": {"blocks": 4, "rounds": 1},
    "ks": {},
    # q is dense, k and v are not
    "mixed": {"exclude": ["*.q_proj", "*.0.mlp.down_proj"]},
    "int4": {"quantize": "int4", "group": 32},
    "corrected": {"base": "int2", "rank": 8, "group": 32},
}
EXPERTS = {"svd": {}, "int4": METHODS["int4"], "corrected": METHODS["corrected"]}
EXPERTS["mixed"] = {"exclude": ["*.experts.[dw][o2]*", "*.0.self_attn.*"]}  # down_proj or w2
PACKED = "int4", "corrected"
# arguments: folder, --model-impl, processes, prompt, a file for the log-probabilities of the prompt's
# tokens and for the tokens generated (standard output is vLLM's own)
SERVE = """
import json, os, sys
if __name__ == "__main__":
    from vllm import LLM, SamplingParams
    folder, impl, processes, prompt = *sys.argv[1:3], int(sys.argv[3]), json.loads(sys.argv[4])
    llm = LLM(folder, model_impl=impl, tensor_parallel_size=processes, skip_tokenizer_init=True,
              dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=4,
              trust_remote_code=impl == "transformers")
    sampling = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=1, detokenize=False)
    found = llm.generate([{"prompt_token_ids": prompt}], sampling)[0]
    scores = [row[t].logprob for row, t in zip(found.prompt_logprobs[1:], prompt[1:], strict=True)]
    with open(sys.argv[5], "w") as file:
        json.dump([scores, list(found.outputs[0].token_ids)], file)
"""
CASES = [
    *((f"llama-{method}", "auto", 1) for method in METHODS),
    *((f"{family}-svd", "auto", 1) for family in ("mistral", "qwen2", "qwen3")),
    *((f"{family}-{method}", "auto", 1) for family in MIXTURES for method in EXPERTS),
    *((f"llama-{method}", "auto", 2) for method in METHODS if method not in ("ks", *PACKED)),
    ("qwen2-svd", "auto", 2),
    *((f"llama-{method}", "transformers", 1) for method in ("blast", "ks")),
    *(("plain", "transformers", processes) for processes in (1, 2)),
]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By family and method."""
    folder, found = tmp_path_factory.mktemp("checkpoints"), {}
    methods = {"llama": METHODS, **dict.fromkeys(MIXTURES, EXPERTS)}
    for family, (config, settings, cls) in {**MODELS, **MIXTURES}.items():
        save_model(config, settings, cls, folder / family)
        for method, named in methods.get(family, {"svd": {}}).items():
            options = {"method": method if method in ("monarch", "blast", "ks") else "svd", **named}
            output = folder / f"{family}-{method}"
            size = {} if "base" in options else {"cf": 1.5}
            found[output.name] = compress_to(folder / family, output, **size, **options)
    found["plain"] = export_to(found["llama-svd"], folder / "plain", kind="plain")
    return found


def serve(folder: Path, impl: str, processes: int, out: Path) -> subprocess.CompletedProcess[str]:
    small = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if processes == 1:
        small["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    else:  # a core each, on machines of one NUMA node
        small["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(processes)))
    arguments = [str(folder), impl, str(processes), json.dumps(PROMPT), str(out)]
    command = [sys.executable, "-c", SERVE, *arguments]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | small
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=PATIENCE)


@pytest.mark.parametrize(("name", "impl", "processes"), CASES)
def test_the_same_as_transformers(
    name: str, impl: str, processes: int, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    done = serve(checkpoints[name], impl, processes, tmp_path / "out.json")
    assert done.returncode == 0, done.stderr[-4000:]
    ours = "Using Transformers modeling backend" not in done.stdout + done.stderr
    assert ours == (impl == "auto")
    scores, tokens = json.loads((tmp_path / "out.json").read_text())
    model, ids = AutoModelForCausalLM.from_pretrained(checkpoints[name]).eval(), torch.tensor([PROMPT])
    with torch.no_grad():
        expected = model(ids).logits[0].log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(scores), expected, atol=1e-4, rtol=1e-4)
    whole = model.generate(ids, max_new_tokens=8, do_sample=False)[0, len(PROMPT) :].tolist()
    assert tokens == whole


def test_what_is_not_served_says_so(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    done = serve(export_to(checkpoints["llama-svd"], tmp_path / "export"), "auto", 1, tmp_path / "out")
    assert done.returncode != 0 and "found an export of blr" in done.stdout + done.stderr
    for name in ("llama-ks", "llama-int4", "mixtral-svd"):
        done = serve(checkpoints[name], "auto", 2, tmp_path / "out")
        assert done.returncode != 0 and "serve it in one process" in done.stdout + done.stderr
