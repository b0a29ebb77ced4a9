"""Mixtures of every type, whole: calibrated, healed, exported, and the same tokens by every way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import export_to, tokens_without_blr
from fresh import blr
from heal_models import QUIET, save_characters, write_text
from pico import save_pico

from blr.compressor import register
from blr.compressor.commands.heal import heal
from blr.compressor.loading.loader import load_written
from blr.compressor.recipe.settings import HealOptions
from blr.compressor.runtime.phases import supports

register()

# By phases of a token; transformers decodes others.
DECODED = ("mixtral", "qwen3-moe", "qwen2-moe", "gpt-oss")
OTHERS = ("olmoe", "deepseek-v3", "glm4-moe", "granite-moe")
PROMPT = list(range(97, 109))
WAYS = {
    "svd": ("--method", "svd", "--cf", 1.5),
    "int4": ("--method", "dense", "--quantize", "int4", "--group", 32),  # of inputs of 16, too
    "corrected": ("--method", "svd", "--base", "int2", "--rank", 2, "--group", 32),
}


def case(number: int, name: str, way: str) -> Any:
    """A diagonal of the table runs everywhere."""
    marks = [] if list(WAYS)[number % len(WAYS)] == way else [pytest.mark.slow]
    return pytest.param(name, way, id=f"{name}-{way}", marks=marks)


CASES = [case(n, name, way) for n, name in enumerate((*DECODED, *OTHERS)) for way in WAYS]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_from_a_text_to_tokens(name: str, way: str, tmp_path: Path) -> None:
    source = save_pico(name, tmp_path / "dense")
    save_characters(source)
    text = write_text(tmp_path / "text.txt", 4000)
    sizes = ("--seq-len", 16, "--samples", 8, "--refit", 1, "--force")
    blr("compress", source, "-o", tmp_path / "out", "--text", text, *WAYS[way], *sizes)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    experts = [layer for layer in report["layers"] if ".experts." in layer["module"]]
    chosen = [layer["tokens"] for layer in experts if layer["module"].rpartition(".")[2] == "0"]
    assert experts and all(0 <= count <= 8 * 16 for count in chosen)
    options = {
        "window": 16,
        "batch": 64,
        "steps": 4,
        "rate": 0.01,
        "mix": 0.0,
        "data": (str(text),),
        "device": "cpu",
    }
    said = heal(tmp_path / "out", source, tmp_path / "healed", HealOptions("c", "d", **options), QUIET)
    (before,), (after,) = said.before.values(), said.after.values()
    assert after["kl"] <= before["kl"]
    folders = {"out": tmp_path / "healed", "export": export_to(tmp_path / "healed", tmp_path / "export")}
    model, ids = load_written(folders["export"]), torch.tensor([PROMPT])
    assert (supports(model) is None) == (name in DECODED)
    # with a cache a CPU multiplies one token with packed weights in bfloat16
    plain = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "use_cache": False}
    found = {n: load_written(f).generate(ids, **plain)[0].tolist() for n, f in folders.items()}
    found |= {f"{n} alone": t for n, t in tokens_without_blr(folders, PROMPT, tmp_path / "x").items()}
    assert found["out"] == found["export"] == found["out alone"] == found["export alone"]
