"""A whole model beside an adapter: every command takes the model as it is stored."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from pico import save_pico
from running import Invoke
from spoiling import give_words
from transformers import AutoModelForCausalLM

from blr.compressor import register

register()

LEFT: dict[str, Any] = {
    "no base": {"peft_type": "LORA", "base_model_name_or_path": None, "r": 4},
    "another base": {"peft_type": "LORA", "base_model_name_or_path": "someone/base", "r": 8},
    "no adapter of peft": {"anything": 1},
}
KINDS = [*LEFT, "merged", "unmerged"]
APPLIED = "no adapter is applied"


def _beside(kind: str, folder: Path) -> None:
    """Leave adapter files beside the model in `folder`, which becomes a merged one if it is to be."""
    if kind in LEFT:
        (folder / "adapter_config.json").write_text(json.dumps(LEFT[kind]))
        return
    model = AutoModelForCausalLM.from_pretrained(folder)
    settings = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, settings)
    adapted.save_pretrained(folder)
    if kind == "merged":
        adapted.merge_and_unload().save_pretrained(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_model_beside_an_adapter(kind: str, invoke: Invoke, tmp_path: Path) -> None:
    model = save_pico("llama", tmp_path / "model")
    give_words(model)
    _beside(kind, model)
    (tmp_path / "t.txt").write_text("the protocol is " * 100)
    alone = tmp_path / "alone"
    shutil.copytree(model, alone, ignore=shutil.ignore_patterns("adapter_*"))
    expected = _logits(alone)
    brief = ("--data", tmp_path / "t.txt", "--steps", 1, "--window", 16, "--batch", 32)
    full = ("--method", "svd", "--rank", 64)
    for command in (
        ("plan", model),
        ("eval", model, "--text", tmp_path / "t.txt", "--window", 16),
        ("generate", model, "the", "--max-new-tokens", 2),
        ("compress", model, *full, "-o", tmp_path / "out"),
        ("export", model, "-o", tmp_path / "exported"),
        ("export", tmp_path / "out", "--as", "dense", "-o", tmp_path / "dense"),
        ("heal", tmp_path / "out", "--teacher", model, *brief, "-o", tmp_path / "healed"),
    ):
        code, _, err = invoke(*command)
        assert code == 0, err
        assert (APPLIED in err) == (command[1] == model or command[0] == "heal")
    for name in ("out", "exported", "dense"):
        assert not (tmp_path / name / "adapter_config.json").exists()
        torch.testing.assert_close(_logits(tmp_path / name), expected, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def _logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model(input_ids=torch.arange(5, 37)[None]).logits
