"""Own text by CUDA graphs is what the modules write, and no graph or buffer of it is left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fresh import TINY
from tolerances import TOLERANCES
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from blr.compressor.loading.load import load_model
from blr.compressor.text.decoding import BUCKET, StaticReader, StaticReading, can_be_static
from blr.compressor.text.own import OwnText, continued, draw

pytestmark = pytest.mark.gpu
ROWS, LENGTH = 32, 2 * BUCKET + 20
WANTED = OwnText(tokens=ROWS * LENGTH, length=LENGTH, seed=0, author="a")
SLACK = 200 << 20  # bytes: workspaces of libraries stay, the cache is 500 MiB


def tiny(dtype: str, device: str) -> Any:
    return load_model(TINY, "AutoModelForCausalLM", dtype=dtype, device=device)


def prompts(device: str, length: int = 3) -> Tensor:
    made = torch.randint(5, 100, (ROWS, length), generator=torch.Generator().manual_seed(1))
    return made.to(device)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.inference_mode()
def test_tokens_by_graphs_are_those_without(dtype: str, on_cuda: str) -> None:
    model = tiny(dtype, on_cuda)
    with StaticReading(model, LENGTH) as reading:
        found = [continued(model, prompts(on_cuda), 0, WANTED, reading) for _ in range(3)]
        held = reading.held
        assert held is not None and held.captures and sorted(held.graphs) == [64, 128, LENGTH]
        continued(model, prompts(on_cuda, 9), 1, WANTED, reading)
        assert reading.held is held and held.captures
        reading.held = StaticReader(model, ROWS, LENGTH, captures=False)
        expected = continued(model, prompts(on_cuda), 0, WANTED, reading)
        assert not reading.held.graphs
    for tokens in found:
        same = (tokens == expected).all(1).float().mean()
        assert same == 1.0 if dtype == "float32" else same > 0.9


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.inference_mode()
def test_probabilities_are_those_of_the_plain_model(dtype: str, on_cuda: str) -> None:
    """Of every token of texts at random, read a second time, so that each is read by a graph."""
    model = tiny(dtype, on_cuda)
    assert can_be_static(model, LENGTH)
    reader, ids = StaticReader(model, ROWS, LENGTH, captures=True), prompts(on_cuda, LENGTH)
    expected = model(input_ids=ids, use_cache=False).logits.float().softmax(-1)
    limit = 2 * TOLERANCES[getattr(torch, dtype)] * model.config.num_hidden_layers**0.5
    for _ in range(2):
        reader.restart()
        for n in range(LENGTH):
            found = reader.read(ids[:, n : n + 1])
            assert float((found - expected[:, n]).norm() / expected[:, n].norm()) < limit
    assert reader.captures and len(reader.graphs) == 3


@torch.inference_mode()
def test_the_host_waits_for_no_token(on_cuda: str) -> None:
    model, ids = tiny("bfloat16", on_cuda), prompts(on_cuda)
    with StaticReading(model, LENGTH) as reading:
        continued(model, ids, 0, WANTED, reading)
        continued(model, ids, 0, WANTED, reading)
        reader, generator = reading.reader(ROWS), torch.Generator(on_cuda).manual_seed(0)
        assert reader is not None and len(reader.graphs) == 3
        fresh = ids
        torch.cuda.set_sync_debug_mode("error")
        try:
            with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
                for _ in range(LENGTH - ids.shape[1]):
                    fresh = draw(reader.read(fresh), generator)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@torch.inference_mode()
def test_nothing_is_left_behind(on_cuda: str) -> None:
    model, wanted = tiny("bfloat16", on_cuda), OwnText(1, 1000, 0, "a")
    ids = prompts(on_cuda).repeat(16, 1)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    with StaticReading(model, wanted.length) as reading:
        continued(model, ids, 0, wanted, reading)
        assert reading.held is not None and reading.held.captures
    assert torch.cuda.memory_allocated() < before[0] + SLACK
    assert torch.cuda.memory_reserved() < before[1] + SLACK
