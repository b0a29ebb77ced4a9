"""Prompts by CUDA graphs give on a GPU what the modules give when the host calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bundled import METHODS, compressed
from rows import Row, bounded, relative, row
from tolerances import TOLERANCES

from blr.compressor.loading.load import load_model
from blr.compressor.runtime.decoder import Decoder
from blr.compressor.runtime.failures import CACHES

pytestmark = pytest.mark.gpu
Judge = Callable[[Iterable[Row]], None]

PROMPTS = ((1, 1), (1, 15), (1, 100), (1, 129), (2, 40), (3, 77), (4, 200), (1, 400))  # rows, tokens
# An int8 beside the border of two is one of them or the other by the last bit of what is rounded.
INT8 = 5e-3


@pytest.mark.parametrize("cache", CACHES)
def test_prompts_by_graphs(
    checkpoint: str | Path, cache: str, device: str, work: Path, judge: Judge
) -> None:
    """Longest last, and all again: what a graph leaves behind its prompt is nobody's."""
    folder = compressed(work, checkpoint) if checkpoint in METHODS else checkpoint
    model = load_model(folder, "AutoModelForCausalLM", dtype="float32", device=device)
    judge(compare_prompts(model, cache, "triton" if device == "cuda" else "torch"))


def compare_prompts(model: Any, cache: str, ops: str) -> Iterator[Row]:
    made = {"batch": 4, "context": 512, "ops": ops, "cache": cache}
    plain, captured = Decoder(model, mode="eager", **made), Decoder(model, mode="graph", **made)
    group, generator = f"prompts, {cache} cache", torch.Generator().manual_seed(0)
    limit = INT8 if cache == "int8" else TOLERANCES[torch.float32] * model.config.num_hidden_layers**0.5
    for rows, length in PROMPTS * 2:
        ids = torch.randint(5, model.config.vocab_size, (rows, length), generator=generator)
        for lengths in (None, torch.tensor([max(length - 9 * n, 1) for n in range(rows)])):
            found, wanted = (decoder.prefill(ids, lengths) for decoder in (captured, plain))
            name = f"{rows} x {length}{', padded' if lengths is not None else ''}"
            yield bounded(group, name, relative(found, wanted), limit)
            last = [decoder.step(found.argmax(-1)) for decoder in (captured, plain)]
            yield bounded(group, f"{name}, a token behind it", relative(*last), 4 * limit)
    if captured.prompts.graphs is not None:
        replays = [replay for _, replay in captured.prompts.graphs.entries.values()]
        found = sum(replay is not None for replay in replays)
        yield row(found > len(replays) / 2, group, "graphs", f"{found} of {len(replays)} shapes")
