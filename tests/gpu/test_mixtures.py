"""Exports of mixtures decode their experts within the graph of a token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import compress_to, export_to
from pico import save_pico

from blr.compressor.loading.loader import load_written
from blr.compressor.runtime.decoder import Decoder
from blr.compressor.runtime.phases import supports

pytestmark = pytest.mark.gpu

WAYS: dict[str, dict[str, Any]] = {
    "svd": {"method": "svd", "cf": 1.5},
    "int4": {"method": "dense", "quantize": "int4", "group": 32},
    "corrected": {"method": "svd", "base": "int2", "rank": 2, "group": 32},
}
PROMPTS = torch.arange(2, 26).reshape(2, 12)
NEW = 24


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "gpt-oss"])
def test_dense_experts(name: str, on_cuda: str, tmp_path: Path) -> None:
    """In bfloat16 a graph gives the tokens of single launches; float32 is left to transformers."""
    folder = export_to(save_pico(name, tmp_path / "dense"), tmp_path / "export", batch=2)
    model = load_written(folder).to(on_cuda)
    assert "bfloat16" in supports(model)
    model, ids = model.bfloat16(), PROMPTS.to(on_cuda)
    graph, single = (Decoder(model, context=64, batch=2, mode=mode) for mode in ("graph", "eager"))
    assert graph.generate(ids, max_new_tokens=NEW) == single.generate(ids, max_new_tokens=NEW)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "gpt-oss"])
def test_tokens_of_a_mixture(name: str, way: str, device: str, tmp_path: Path) -> None:
    """One row and two, in float32: the tokens that transformers gives on a CPU without a cache."""
    folder = compress_to(save_pico(name, tmp_path / "dense"), tmp_path / "out", **WAYS[way])
    whole = {"attention_mask": torch.ones_like(PROMPTS), "pad_token_id": 0, "use_cache": False}
    asked = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    expected = load_written(folder).generate(PROMPTS, **whole, **asked)[:, PROMPTS.shape[1] :]
    model = load_written(export_to(folder, tmp_path / "export", batch=2)).to(device)
    ours = Decoder(model, context=64, batch=2)
    for rows in (1, 2):
        found = ours.generate(PROMPTS[:rows].to(device), max_new_tokens=NEW)
        assert found == expected[:rows].tolist()
