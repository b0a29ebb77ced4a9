"""A model on the second GPU, and one over two, while the first is the current one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from bundled import METHODS, compressed
from exporting import export_to
from rows import Row, bounded, relative, row, tokens_row
from tolerances import TOLERANCES
from transformers import AutoModelForCausalLM

from blr.compressor import register

register()

pytestmark = pytest.mark.gpu
Judge = Callable[[Iterable[Row]], None]


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(ids.to(model.device)).logits.float().cpu()
    return found


def loaded(folder: Path, where: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, device_map=where, dtype=torch.bfloat16).eval()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_other_gpus_than_the_current_one(
    checkpoint: str | Path, on_cuda: str, work: Path, judge: Judge, tmp_path: Path
) -> None:
    folder = compressed(work, checkpoint) if checkpoint in METHODS else Path(checkpoint)
    names = [f"model.layers.{n}" for n in range(4)]
    both = {n: k % 2 for k, n in enumerate(names)} | {"model.embed_tokens": 0, "model.norm": 1}
    both |= {"model.rotary_emb": 0, "lm_head": 0}  # shares its weight with the embedding
    first = loaded(folder, {"": 0})
    rows, limit = [], TOLERANCES[torch.bfloat16] * first.config.num_hidden_layers**0.5
    for length in (1, 5, 40, 300):
        ids = torch.randint(5, 4000, (2, length), generator=torch.Generator().manual_seed(length))
        expected = logits(first, ids)
        for name, where in (("second", {"": 1}), ("both", both)):
            model = loaded(folder, where)
            for _ in range(3):  # launched, recorded, replayed
                error = relative(logits(model, ids), expected)
                rows.append(bounded("devices", f"{name}, {length} tokens", error, limit))
    rows.append(row(torch.cuda.current_device() == 0, "devices", "the current one stays"))
    export_to(folder, tmp_path / "out", batch=1, context=128)
    ids = torch.arange(5, 25)[None]
    said = []
    for where in (0, 1):
        model = loaded(tmp_path / "out", {"": where})
        said.append(
            [model.generate(ids.to(model.device), max_new_tokens=24, do_sample=False).cpu().tolist()]
        )
    rows.append(tokens_row("devices", "an export on the second", said[1][0], said[0][0]))
    judge(rows)
