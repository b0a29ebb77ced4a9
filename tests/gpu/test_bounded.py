"""Bounded intermediates and caches of ranks on a GPU: the results of the same model without them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from pico import inputs_for
from rows import Row, bounded, relative, row
from structured import blast, low_rank, monarch, per_head, structured_model
from tolerances import TOLERANCES

from blr.compressor.modeling.rank_attention import keep_ranks
from blr.kernels.common import transient

pytestmark = pytest.mark.gpu
Judge = Callable[[Iterable[Row]], None]
FAMILIES = ("bert", "roberta", "vit", "gpt2", "llama", "mistral", "qwen3")
SPECS = {"whole": low_rank, "per head": per_head, "monarch": monarch, "blast": blast}
MIB = "0.003"  # some three of the sequences


def inputs_of(name: str, model: Any, padding: str) -> dict[str, Any]:
    """Padded on one side, with a row that nobody sees, or as they are."""
    inputs = dict(inputs_for(model))
    if padding and "input_ids" in inputs:
        mask = torch.ones_like(inputs["input_ids"])
        half = mask.shape[1] // 2
        mask[0, slice(0, half) if padding == "left" else slice(half, None)] = 0
        if padding == "masked":
            mask[0] = 0
        inputs["attention_mask"] = mask
    return inputs


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, device: str, judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transient, "LEAST", 5)
    judge(compare(name, device, monkeypatch))


@torch.no_grad()
def compare(name: str, device: str, patch: pytest.MonkeyPatch) -> Iterator[Row]:
    for kind, spec in SPECS.items():
        for dtype in (torch.float32, torch.bfloat16):
            model = structured_model(name, spec).to(device, dtype)
            for padding in ("", "left", "right", "masked"):
                given = {
                    key: value.to(device, dtype) if value.is_floating_point() else value.to(device)
                    for key, value in inputs_of(name, model, padding).items()
                }
                found = []
                for text in ("off", MIB):
                    patch.setenv(transient.VARIABLE, text)
                    found.append(model(**given)[0].float().nan_to_num())
                case = f"{kind}, {padding or 'no'} padding, {dtype}"
                yield bounded(f"bounded {name}", case, relative(found[1], found[0]), TOLERANCES[dtype])


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
def test_caches_of_ranks(name: str, device: str, judge: Judge) -> None:
    judge(generations(name, device))


def generations(name: str, device: str) -> Iterator[Row]:
    """Greedy tokens and beams of whole keys and values and of their ranks; int8 generates."""
    ids = torch.arange(2, 44, device=device).view(2, 21)
    options: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    options |= {"eos_token_id": None, "attention_mask": torch.ones_like(ids)}
    spec = low_rank if name == "gpt2" else per_head
    for beams in (1, 3):
        found = {}
        for kind in (None, "ranks", "int8"):
            model = structured_model(name, spec).to(device)
            model.config.blr["kv_cache"] = kind
            keep_ranks(model)
            found[kind] = model.generate(ids, num_beams=beams, **options).tolist()
        yield row(found["ranks"] == found[None], f"ranks {name}", f"{beams} beams")
        yield row([len(r) for r in found["int8"]] == [30, 30], f"ranks {name}", f"{beams} beams, int8")
