"""Pivot rows decoded on a GPU: every mode, alone and in batches, says what transformers says there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from exporting import compress_to
from pico import VOCAB, save_pico
from tolerances import TOLERANCES

from blr.compressor.loading.load import load_model
from blr.compressor.runtime.decoder import Decoder

pytestmark = pytest.mark.gpu
RULES = [{"match": "*k_proj", "method": "dense"}, {"match": "*.1.*up_proj", "pivot": False}]


@pytest.mark.parametrize("mode", ["graph", "eager"])
@pytest.mark.parametrize("settings", [{}, {"quantize": "int8", "group": 32}], ids=["plain", "packed"])
@torch.no_grad()
def test_steps_give_the_logits_of_the_model(
    settings: dict[str, object], mode: str, device: str, tmp_path: Path
) -> None:
    """Beside dense and low-rank layers; biases, the residual and gate times up go with the places."""
    dense = save_pico("qwen2", tmp_path / "dense")
    folder = compress_to(dense, tmp_path / "out", pivot=True, cf=1.1, rules=RULES, **settings)
    model = load_model(folder, "AutoModelForCausalLM", dtype="float32", device=device).eval()
    decoder = Decoder(model, context=16, batch=4, mode=mode, ops="triton")
    for rows in (1, 2, 4):
        ids = torch.randint(2, VOCAB, (rows, 6), generator=torch.Generator().manual_seed(rows))
        ids = ids.to(device)
        decoder.prefill(ids[:, :-1])
        expected = model(ids).logits[:, -1].float()
        missed = (decoder.step(ids[:, -1]) - expected).norm() / expected.norm()
        assert float(missed) < 10 * TOLERANCES[torch.float32]
