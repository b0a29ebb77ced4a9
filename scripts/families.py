"""Every type of model that transformers knows, small and random, the whole way by the command line.

    python scripts/families.py --tokenizer FOLDER --text FILE --out FOLDER [--types 'qwen*,bert']
        [--jobs 2] [--more] [--gpus 0,1] [--part 3/4] [--until SECONDS] [--blr 'blr']

For each: compress with calibration (SVD, CF 1.5, a refit, a last pass), heal three steps, export; all
with their checks. Prints a line a type as it is done, and counts at the end:

    right      all of it
    plain      right, but compressed without calibration: what it said against it follows
    refused    one line of an exit code in REFUSED: the command and the line follow
    WRONG      any other exit code, or a traceback
    not made   transformers makes no small model with these sizes

What is done is kept in OUT/done and not done again. --part K/N takes every N-th type from the K-th on,
--until starts none after so many seconds. Ends with 1 if a type is WRONG.
"""

from __future__ import annotations

import argparse
import collections
import fnmatch
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import Queue
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

Result = dict[str, Any]
Step = tuple[str, int, str]  # a command, its exit code, the last line that it said
REFUSED = (2, 4, 9)  # usage, input, capability
MOST = 30_000_000  # parameters of a model that is small
SIZES: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512},
    **{"d_model": 64, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_heads": 4, "n_layers": 4},
    **{"embedding_size": 64, "state_size": 8, "num_layers": 4, "num_heads": 4, "n_positions": 512},
    **{"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0},
    **{"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32},
    **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8},
    **{"v_head_dim": 16, "ffn_dim": 96, "decoder_layers": 4, "decoder_attention_heads": 4},
    **{"decoder_ffn_dim": 96, "encoder_layers": 4, "encoder_attention_heads": 4, "d_ff": 96, "d_kv": 16},
    **{"intermediate_size_mlp": 96, "bos_token_id": 1, "eos_token_id": 1, "layer_types": None},
}
IMAGES = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"image_size": 28, "patch_size": 14, "num_heads": 2, "depth": 2, "out_hidden_size": 64},
}
HYBRID = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_n_heads": 8, "mamba_d_head": 16}


def sections(*sizes: int) -> Result:
    """Of rotations of three kinds of positions."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sizes)}}


ROTATING = ("qwen2_vl", "qwen2_5_vl", "glm4v", "glm_ocr", "glmga", "paddleocr_vl")
# What some types ask for beside the sizes
PECULIAR: dict[str, Result] = {
    "jamba": HYBRID,
    "granitemoehybrid": {**HYBRID, "layer_types": ["mamba", "attention"] * 2},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    **{kind: sections(2, 3, 3) for kind in ROTATING},
    "glm4v_moe": sections(1, 1, 2),
    **{kind: {"head_dim": 8} for kind in ("deepseek_v3", "youtu", "axk1")},
}
MAKE = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import families
families.make(*sys.argv[1:])
"""


def known_types() -> list[str]:
    """Of models that read text, and of those that see, too."""
    from transformers.models.auto import modeling_auto as auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    text = {*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES}
    every = text | set(auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    return sorted(kind for kind in every if kind in CONFIG_MAPPING)


def encoders() -> set[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    return set(MODEL_FOR_MASKED_LM_MAPPING_NAMES)


def make(model_type: str, folder: str, tokenizer: str, dtype: str = "float32") -> None:
    """Saves a small model of a type, that runs, with that tokenizer. For a process of its own: some
    configurations ask for more memory or time than there is."""
    import torch
    import transformers
    from pico import small
    from transformers.models.auto import modeling_auto as names

    from blr.compressor.loading.smoke_run import candidates

    words = transformers.AutoTokenizer.from_pretrained(tokenizer)
    sizes = {**SIZES, "vocab_size": len(words), **PECULIAR.get(model_type, {})}
    kind = transformers.CONFIG_MAPPING[model_type]
    seeing = model_type in names.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    config = kind()
    if seeing:
        parts = {"text_config": sizes, "vision_config": IMAGES}
        found = {
            n: small(getattr(config, n), s).to_dict() for n, s in parts.items() if hasattr(config, n)
        }
        config = kind(**found)
    else:
        config = small(config, sizes)
    auto: Any = transformers.AutoModel
    if model_type in encoders():  # also where its decoder's class has the name of the type
        pass
    elif model_type in names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        auto = transformers.AutoModelForCausalLM
    elif seeing:
        auto = transformers.AutoModelForImageTextToText
    with torch.device("meta"):
        if sum(p.numel() for p in auto.from_config(config).parameters()) > MOST:
            raise ValueError("not small: its sizes have other names")
    torch.manual_seed(0)
    model = auto.from_config(config).eval()
    with torch.no_grad():
        model(**next(candidates(model)))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    words.save_pretrained(folder)


def called(command: list[str], gpu: str, log: Path) -> tuple[int, str]:
    """The exit code of a command and the last line it said; everything goes to `log`."""
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": gpu,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        check=False,
    )
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {shlex.join(command)}\n{done.stdout}\nended with {done.returncode}\n")
    if "Traceback" in done.stdout:
        return -1, done.stdout.strip().splitlines()[-1]
    return done.returncode, (done.stdout.strip().splitlines() or [""])[-1]


class Way:
    """The commands of one type."""

    def __init__(self, given: argparse.Namespace, model_type: str, gpu: str) -> None:
        self.given, self.type, self.gpu = given, model_type, gpu
        self.folder = given.out / "models" / model_type
        self.log = given.out / "logs" / f"{model_type}.log"

    def run(self) -> Result:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.log.unlink(missing_ok=True)
        try:
            return {"type": self.type, **self._walked()}
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _walked(self) -> Result:
        dense, small = str(self.folder / "dense"), str(self.folder / "small")
        here, words = str(Path(__file__).resolve().parent), str(self.given.tokenizer)
        made = [sys.executable, "-c", MAKE, here, self.type, dense, words, self.given.dtype]
        code, said = called(made, self.gpu, self.log)
        if code:
            return {"is": "not made", "said": said}
        against, step = self._compressed(dense, small)
        steps = [step]
        if not step[1]:
            steps += self._rest(dense, small)
        return judged(against, steps)

    def _compressed(self, dense: str, small: str) -> tuple[str, Step]:
        """What was said against calibration, and the compression without it, if anything was."""
        plain = (dense, "--cf", "1.5", "-o", small)
        how = [
            "--calibration",
            str(self.given.text),
            "--samples",
            "8",
            "--seq-len",
            "32",
            "--refit",
            "1",
        ]
        if self.type not in encoders():
            how += ["--finish", "1"]
        step = self._blr("compress", *plain, *how)
        return ("", step) if step[1] not in REFUSED else (step[2], self._blr("compress", *plain))

    def _rest(self, dense: str, small: str) -> list[Step]:
        heal = ["--teacher", dense, "-o", str(self.folder / "healed"), "--data", str(self.given.text)]
        found = [
            self._blr("heal", small, *heal, "--steps", "3", "--batch", "256", "--window", "64"),
            self._blr("export", small, "-o", str(self.folder / "export")),
        ]
        return found + (self._others(dense, small) if self.given.more else [])

    def _others(self, dense: str, small: str) -> list[Step]:
        """What else may be asked of a checkpoint; an encoder refuses some of it."""
        text, half = str(self.given.text), ("--dtype", "bfloat16")
        asked = (
            ("plan", dense),
            ("eval", small, "--text", text, "--max-tokens", "512", *half),
            ("generate", small, "Once upon a time", "--max-new-tokens", "4", *half),
            ("generate", dense, "Once upon a time", "--max-new-tokens", "4"),
            ("compress", dense, "--method", "blast", "--cf", "1.5", "-o", f"{dense}-blast"),
            ("compress", dense, "--base", "int2", "--rank", "4", "--group", "32", "-o", f"{dense}-few"),
            ("eval", f"{dense}-few", "--text", text, "--max-tokens", "512"),
        )
        return [self._blr(*command) for command in asked]

    def _blr(self, name: str, *arguments: str) -> Step:
        command = [*shlex.split(self.given.blr), name, *arguments, "--offline"]
        return name, *called(command, self.gpu, self.log)


def judged(against: str, steps: list[Step]) -> Result:
    """What a type gave, of its steps and of what was said `against` its calibration."""
    failed = [step for step in steps if step[1]]
    said = "; ".join(f"{name} ({code}) {line}" for name, code, line in failed)
    if failed:
        wrong = any(code not in REFUSED for _, code, _ in failed)
        return {"is": "WRONG" if wrong else "refused", "said": said}
    return {"is": "plain" if against else "right", "said": against}


def done(given: argparse.Namespace, model_type: str, free: Queue[str]) -> Result | None:
    """What a type gave, or gave before; None if there was no time for it."""
    kept = given.out / "done" / f"{model_type}.json"
    if kept.exists():
        return dict(json.loads(kept.read_text()))
    if given.until and time.monotonic() - given.started > given.until:
        return None
    gpu = free.get()
    try:
        started = time.monotonic()
        found = Way(given, model_type, gpu).run()
        found["seconds"] = round(time.monotonic() - started, 1)
    finally:
        free.put(gpu)
    kept.write_text(json.dumps(found))
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("tokenizer", "text", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--types", default="*", help="globs, by comma")
    parser.add_argument("--jobs", type=int, default=2, help="types at once on each GPU, or the CPU")
    parser.add_argument("--gpus", default="", help="as 0,1; none for the CPU")
    parser.add_argument("--dtype", default="bfloat16", help="that the models are stored in")
    parser.add_argument("--more", action="store_true", help="the other commands, too")
    parser.add_argument("--part", default="0/1", help="K/N: every N-th from the K-th on")
    parser.add_argument("--until", type=float, default=0.0)
    parser.add_argument("--blr", default=f"{sys.executable} -m blr.compressor")
    found = parser.parse_args()
    found.started = time.monotonic()
    return found


def main() -> None:
    given = arguments()
    for name in ("done", "logs", "models"):
        (given.out / name).mkdir(parents=True, exist_ok=True)
    first, stride = map(int, given.part.split("/"))
    known = known_types()
    wanted = (kind for glob in given.types.split(",") for kind in known if fnmatch.fnmatch(kind, glob))
    types = list(dict.fromkeys(wanted))[first::stride]
    free: Queue[str] = Queue()
    for gpu in given.gpus.split(",") * given.jobs:
        free.put(gpu)
    counts: collections.Counter[str] = collections.Counter()
    with ThreadPoolExecutor(free.qsize()) as pool:
        for future in as_completed([pool.submit(done, given, kind, free) for kind in types]):
            if (found := future.result()) is None:
                counts["no time"] += 1
                continue
            counts[found["is"]] += 1
            print(
                f"{found['type']:28s} {found['seconds']:6.1f} s  {found['is']}  {found['said']}",
                flush=True,
            )
    print(", ".join(f"{name} {number}" for name, number in counts.most_common()))
    sys.exit(counts["WRONG"] > 0)


if __name__ == "__main__":
    main()
