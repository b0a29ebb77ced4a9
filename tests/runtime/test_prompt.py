"""Prompts by graphs of a few lengths: the same tokens as module by module, whatever fills them up. A
graph is replaced by a function that runs the same pass on the same buffers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pico import VOCAB, save_pico
from torch import Tensor
from transformers import AutoModelForCausalLM

from blr.compressor.runtime.decoder import Decoder
from blr.compressor.runtime.prompt import CAPTURED, GRAPHS, LEAST, WHOLE, Prompts, graph_shape

pytestmark = pytest.mark.fast


class Graphs:
    """Stands for CUDA: counts captures and replays."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.captures += 1
        kept = run()

        def replay() -> Tensor:
            self.replays += 1
            return kept.copy_(run())

        return replay


def pico(folder: Path, family: str = "llama") -> Any:
    return AutoModelForCausalLM.from_pretrained(save_pico(family, folder), dtype=torch.float32).eval()


def decoders(model: Any, cache: str = "whole") -> tuple[Decoder, Decoder, Graphs]:
    """One without graphs, one with them."""
    plain, captured = (Decoder(model, batch=3, context=64, ops="torch", cache=cache) for _ in range(2))
    captured.prompts = Prompts(model, captured.state.kv, counter := Graphs())
    return plain, captured, counter


def prompt(rows: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB, (rows, length), generator=generator)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_filled_up_prompts_give_the_same_tokens(family: str, tmp_path: Path) -> None:
    """mistral: a window shorter than the prompts. Longest first: what it leaves in the cache lies behind
    the shorter ones, and so do the tokens that fill these up."""
    plain, captured, counter = decoders(pico(tmp_path, family))
    for number, (rows, length) in enumerate([(2, 50), (2, 33), (1, 1), (1, 16), (1, 17), (3, 41)] * 2):
        ids = prompt(rows, length, seed=number)
        expected = plain.generate(ids, max_new_tokens=12)
        assert captured.generate(ids, max_new_tokens=12) == expected, (rows, length)
    assert counter.captures == 5 and counter.replays == 12  # 1 and 16 tokens share a graph


@pytest.mark.parametrize("cache", ["whole", "int8"])
def test_rows_of_different_lengths(cache: str, tmp_path: Path) -> None:
    plain, captured, counter = decoders(pico(tmp_path), cache)
    for lengths in ((20, 9), (18, 23), (5, 30, 11)):
        longest = max(lengths)
        ids = prompt(len(lengths), longest, seed=longest)
        mask = (torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]).long()
        expected = plain.generate(ids, mask, max_new_tokens=8)
        assert captured.generate(ids, mask, max_new_tokens=8) == expected
    assert (counter.captures, counter.replays) == (2, 3)


def test_a_full_cache_has_a_graph_of_its_length(tmp_path: Path) -> None:
    plain, captured, counter = decoders(pico(tmp_path))
    ids = prompt(1, 63)
    for _ in range(2):
        assert captured.generate(ids, max_new_tokens=1) == plain.generate(ids, max_new_tokens=1)
    assert (counter.captures, counter.replays) == (1, 2)


def test_a_pass_that_is_not_worth_a_graph_is_not_filled_up(tmp_path: Path) -> None:
    plain, captured, _ = decoders(pico(tmp_path))
    seen: list[int] = []
    captured.prompts = Prompts(captured.model, captured.state.kv, lambda run: None)
    captured.model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    ids = prompt(1, 33)
    for _ in range(2):
        captured.prefill(ids)
    assert seen == [48, 33, 33]  # the first tells whether it is worth it
    assert captured.generate(ids, max_new_tokens=4) == plain.generate(ids, max_new_tokens=4)


def test_shapes_of_graphs() -> None:
    """Each takes its prompt, wastes at most a quarter of it or `LEAST` tokens, and they are few."""
    shapes = set()
    for length in range(1, 2100):
        found = graph_shape(1, length, 1, 4096)
        assert (found is None) == (length > CAPTURED)
        if found is not None:
            shapes.add(found)
            assert length <= found[1] < length + max(LEAST, length / 4 + 1)
    assert len(shapes) < 30
    every = {graph_shape(rows, n, 16, 4096) for rows in range(1, 17) for n in range(1, CAPTURED + 1)}
    assert len(every) <= GRAPHS, "or a server of all of them would capture without end"
    assert graph_shape(3, 100, 16, 4096) == (4, 112) and graph_shape(3, 100, 3, 4096) == (3, 112)
    assert graph_shape(1, 100, 1, 101) == (1, 101) and graph_shape(16, 129, 16, 4096) is None


def test_where_memory_is_short_prompts_go_in_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens on a GPU go together until that fails; what has been written to the cache is again."""
    plain, _, _ = decoders(pico(tmp_path))
    steps = []

    def in_chunks(self: Prompts, ids: Tensor, padding: Any, step: int) -> Tensor:
        steps.append(step)
        if len(steps) == 1:
            raise torch.OutOfMemoryError("no room")
        return native(self, ids, padding, 16)

    native = Prompts._in_chunks
    monkeypatch.setattr(Prompts, "_in_chunks", in_chunks)
    monkeypatch.setattr(Prompts, "_on_gpu", staticmethod(lambda ids: True))
    ids = prompt(1, 50)
    logits = Decoder(plain.model, batch=1, context=64, ops="torch").prefill(ids)
    assert steps == [WHOLE, 512]
    monkeypatch.undo()
    assert torch.allclose(logits, plain.prefill(ids), atol=1e-4)
