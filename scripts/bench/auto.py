"""`--method auto` against every single method, on models of four families.

    python scripts/bench/auto.py --data FOLDER --mini FOLDER --out FOLDER [--models tiny,mini,qwen2,phi3]
        [--cf 1.25,1.5,2] [--modes plain,calibrated] [--rounds N] [--again auto]

FOLDER of --data holds calibration.txt and heldout.txt, --mini is mini-llama. `tiny` is the bundled
checkpoint, `phi3` its weights with q, k, v and gate, up fused, `qwen2` the first three blocks of
mini-llama with biases, trained for --train steps on the end of calibration.txt. Perplexity of the first
--tokens of heldout.txt in windows of 512, closed form (no refit), fits of --samples windows of 256
tokens. The last columns are the best single method, and by how much `auto` is above it. What is done is
kept in OUT, but for the methods of --again; fits are shared through one journal a model.
"""

from __future__ import annotations

import argparse
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from blr.compressor.checkpoint.journal import Journal
from blr.compressor.checkpoint.source import open_source
from blr.compressor.evaluate import perplexity, read_tokens
from blr.compressor.fitting.engine import compress_calibrated
from blr.compressor.fitting.factorize import Result, factorize_layers
from blr.compressor.fitting.work import Work
from blr.compressor.planning.plan import Plan, make_plan
from blr.compressor.progress import Progress
from blr.compressor.recipe.schema import make_recipe
from blr.compressor.structures.restore import restored

SINGLE = ("svd", "monarch", "blast", "ks")
AUTO = "auto"
TINY = Path(__file__).parents[2] / "tests" / "data" / "tiny-llama"
BLOCKS = 3  # of mini-llama, that `qwen2` has
LAYERS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def make_phi3(given: argparse.Namespace, folder: Path) -> None:
    """tiny-llama as a Phi-3: the same function."""
    dense = AutoModelForCausalLM.from_pretrained(TINY)
    state = dense.state_dict()
    for name in [name for name in state if name.endswith(("q_proj.weight", "gate_proj.weight"))]:
        stem, leaf, _ = name.rsplit(".", 2)
        fused = "qkv_proj" if leaf == "q_proj" else "gate_up_proj"
        parts = [state.pop(f"{stem}.{part}.weight") for part in LAYERS[fused]]
        state[f"{stem}.{fused}.weight"] = torch.cat(parts)
    fields = AutoConfig.from_pretrained(TINY).to_dict()
    model = Phi3ForCausalLM(Phi3Config(**_kept(fields), pad_token_id=0))
    model.load_state_dict(state)
    _save(model, TINY, folder)


def make_qwen2(given: argparse.Namespace, folder: Path) -> None:
    """The first blocks of mini-llama as a Qwen2, trained with its biases for a few steps."""
    dense = AutoModelForCausalLM.from_pretrained(given.mini, dtype=torch.float32)
    fields = {**_kept(AutoConfig.from_pretrained(given.mini).to_dict()), "num_hidden_layers": BLOCKS}
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**fields))
    model.load_state_dict(dense.state_dict(), strict=False)
    tokenizer = AutoTokenizer.from_pretrained(given.mini)
    ids = read_tokens(given.data / "calibration.txt", tokenizer)[-given.train * 4096 :].view(-1, 8, 512)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, len(ids))
    for step, rows in enumerate(ids):
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 20 == 0:
            print(f"qwen2: step {step} of {len(ids)}, loss {float(loss):.3f}", flush=True)
    _save(model, given.mini, folder)


def _kept(fields: dict[str, Any]) -> dict[str, Any]:
    """Of a Llama's configuration, what other families have too."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "rms_norm_eps")
    more = ("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rope_parameters")
    return {name: fields[name] for name in (*names, *more, "tie_word_embeddings", "bos_token_id")}


def _save(model: Any, tokenizer: Path, folder: Path) -> None:
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)


MADE = {"phi3": make_phi3, "qwen2": make_qwen2}


class Table:
    """The rows of one model, made where OUT does not have them."""

    def __init__(self, name: str, given: argparse.Namespace) -> None:
        self.name, self.given, self.out = name, given, given.out / name
        self.folder = {"tiny": TINY, "mini": given.mini}.get(name, self.out / "model")
        if not self.folder.exists():
            MADE[name](given, self.folder)
        (self.out / "journal").mkdir(parents=True, exist_ok=True)
        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        self.ids = read_tokens(given.data / "heldout.txt", tokenizer, given.tokens)

    def row(self, mode: str, cf: float) -> dict[str, float]:
        """Perplexity by method."""
        kept = self.out / f"{mode}-{cf:g}-rounds{self.given.rounds}.json"
        found = json.loads(kept.read_text()) if kept.exists() else {}
        for method in (*SINGLE, AUTO):
            if method not in found or method in self.given.again:
                found[method] = self.judged(*self.fitted(mode, cf, method))
                print(f"{self.name} {mode} cf {cf:g} {method}: {found[method]:.3f}", flush=True)
                kept.write_text(json.dumps(found))
        return found

    def fitted(self, mode: str, cf: float, method: str) -> tuple[Plan, dict[str, Result]]:
        """The plan and what was fitted by it."""
        given, source = self.given, open_source(self.folder)
        sizes = {"samples": given.samples, "seq_len": 256, "refit": 0, "rounds": given.rounds}
        recipe = make_recipe(method=method, cf=cf, **sizes)
        work = Work(source, recipe, Journal(self.out / "journal"), Progress(quiet=True), "cpu")
        if mode == "plain":
            plan = make_plan(source, recipe)
            return plan, factorize_layers(work, plan)
        replan = partial(make_plan, source, recipe, calibrated=True)
        done = compress_calibrated(work, replan, str(given.data / "calibration.txt"))
        return done.plan, done.results

    def judged(self, plan: Plan, results: dict[str, Result]) -> float:
        """Perplexity with the weights that the stored factors stand for."""
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()
        journal = Journal(self.out / "journal")
        for planned in plan.layers:
            entries = results[planned.layer.module][0]
            held = journal.tensors(next(iter(entries.values())).file.stem)
            weight = restored(planned.spec, {n: held[e.name] for n, e in entries.items()}, torch.float32)
            parameter = model.get_submodule(planned.layer.module).weight
            parameter.data.copy_(weight.mT if planned.layer.transposed else weight)
        return self.perplexity(model)

    def perplexity(self, model: Any = None) -> float:
        """Of `model`, or of the dense one."""
        model = model or AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()
        return perplexity(model, self.ids, 512, 512, 8, Progress(quiet=True)).perplexity


def line(cells: list[str]) -> str:
    """A row of the printed table."""
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    given = _arguments()
    torch.set_num_threads(given.threads)
    lines = [line(["model", "mode", "CF", *SINGLE, AUTO, "best", "auto over it"]), line(["---"] * 10)]
    worst = -math.inf
    for name in given.models:
        table = Table(name, given)
        lines.append(line([f"{name}, dense {table.perplexity():.2f}", *[""] * 9]))
        for mode in given.modes:
            for cf in given.cf:
                found = table.row(mode, cf)
                best = min(SINGLE, key=lambda method: found[method])
                over = found[AUTO] / found[best] - 1
                worst = max(worst, over)
                figures = [f"{found[method]:.2f}" for method in (*SINGLE, AUTO)]
                lines.append(line(["", mode, f"{cf:g}", *figures, best, f"{over:+.1%}"]))
    print("\n".join(lines))
    print(f"worst: {worst:+.2%}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("data", "mini", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--models", default="tiny,mini,qwen2,phi3", help="by comma")
    parser.add_argument("--cf", default="1.25,1.5,2")
    parser.add_argument("--modes", default="plain,calibrated")
    parser.add_argument("--again", default="", help="methods that are made anew")
    parser.add_argument("--rounds", type=int, help="as of blr compress")
    for name, usual in (("samples", 48), ("tokens", 8192), ("train", 100), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    found = parser.parse_args()
    for name in ("models", "modes", "again"):
        setattr(found, name, getattr(found, name).split(","))
    found.cf = [float(factor) for factor in found.cf.split(",")]
    return found


if __name__ == "__main__":
    main()
