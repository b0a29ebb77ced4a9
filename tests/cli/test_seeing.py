"""Models that read images beside text: their language model is compressed, healed, exported and run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pico import save_seeing, with_tokenizer
from running import Invoke
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText


@pytest.fixture(params=("gemma3", "qwen3_5", "qwen3_vl"))
def dense(request: pytest.FixtureRequest, tiny: Path, tmp_path: Path) -> Path:
    return with_tokenizer(save_seeing(request.param, tmp_path / "dense", vocabulary=4096), tiny)


def test_from_the_model_to_text(dense: Path, tmp_path: Path, invoke: Invoke) -> None:
    """What reads images keeps its weights; the other door of transformers opens what is written."""
    small, healed, exported = (tmp_path / name for name in ("small", "healed", "exported"))
    own = ("--calibration", "self", "--samples", "4", "--seq-len", "16")
    short = ("--steps", "1", "--window", "16", "--batch", "64", "--own-tokens", "200")
    for command in (
        ("compress", dense, "--method", "svd", "--cf", "1.5", *own, "-o", small),
        ("heal", small, "--teacher", dense, *short, "-o", healed),
        ("export", healed, "--quantize", "int4", "-o", exported),
        ("generate", exported, "The", "--max-new-tokens", "2"),
        ("verify", healed),
    ):
        code, _, err = invoke(*command)
        assert code == 0, err
    before, after = (load_file(folder / "model.safetensors") for folder in (dense, healed))
    for name, weight in before.items():
        if "language_model" not in name and "lm_head" not in name:
            torch.testing.assert_close(after[name], weight, rtol=0, atol=0)
    model = AutoModelForImageTextToText.from_pretrained(healed, trust_remote_code=True)
    assert any("StructuredLinear" in str(type(module).__mro__) for module in model.modules())
