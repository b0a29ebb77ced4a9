"""lm-eval's three types of requests on a compressed decoder, by its own model class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import compress_to, export_to
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer

import blr.compressor.modeling  # noqa: F401

PAIRS = [("The protocol is", " a set of rules"), ("A computer", " network")]


@pytest.fixture(scope="module", params=["compressed", "exported"])
def folder(request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outputs")
    output = compress_to(tiny, folder / "compressed", method="svd", cf=1.25)
    return output if request.param == "compressed" else export_to(output, folder / "exported")


@pytest.fixture(scope="module")
def harness(folder: Path) -> Any:
    return HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=2)


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, given, number) for number, given in enumerate(arguments)]


def test_loglikelihoods(folder: Path, harness: Any) -> None:
    found = harness.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for (context, continuation), (total, _) in zip(PAIRS, found, strict=True):
        start = len(tokenizer(context)["input_ids"])
        ids = torch.tensor(tokenizer(context + continuation)["input_ids"])
        with torch.no_grad():
            scores = model(ids[None]).logits[0].log_softmax(-1)
        expected = scores[start - 1 : -1].gather(1, ids[start:, None]).sum()
        assert total == pytest.approx(float(expected), rel=1e-4)


def test_rolling_and_generated(harness: Any) -> None:
    rolling = requests("loglikelihood_rolling", [(context + more,) for context, more in PAIRS])
    assert all(total < 0 for total in harness.loglikelihood_rolling(rolling, disable_tqdm=True))
    until = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}
    asked = requests("generate_until", [(context, dict(until)) for context, _ in PAIRS])
    texts = harness.generate_until(asked, disable_tqdm=True)
    assert len(texts) == len(PAIRS) and all(isinstance(text, str) for text in texts)
    assert texts == harness.generate_until(asked, disable_tqdm=True)
