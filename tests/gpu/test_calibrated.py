"""Calibrated compression on a GPU where the statistics of inputs are singular, as behind GELU.

cuSOLVER finds no eigenvalues of some such matrices that LAPACK has no trouble with: every
decomposition must have its fallback.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers
from fresh import SAMPLE, TINY, blr, shared
from rows import Row, bounded, row

from blr.compressor.loading.load import load_model

pytestmark = pytest.mark.gpu
Judge = Callable[[Iterator[Row]], None]

WIDTH = 64
METHODS = {"svd": (), "monarch": ("--blocks", 4), "blast": ("--blocks", 4, "--rounds", 5), "ks": ()}


def save_deficient(folder: Path) -> None:
    """A GPT-2 whose MLPs see singular inputs: of the first layer half of the channels are constant,
    of the second a quarter of the units are dead, a quarter twice another, and there are fewer tokens
    than units."""
    vocabulary = json.loads((TINY / "config.json").read_text("utf-8"))["vocab_size"]
    sizes = {"vocab_size": vocabulary, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 64}
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, eos_token_id=0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for block in model.transformer.h:
            block.ln_2.weight[WIDTH // 2 :] = 0
            first = block.mlp.c_fc
            first.weight[:, :WIDTH], first.bias[:WIDTH] = 0, -100.0
            first.weight[:, WIDTH : 2 * WIDTH] = first.weight[:, 2 * WIDTH : 3 * WIDTH]
            first.bias[WIDTH : 2 * WIDTH] = first.bias[2 * WIDTH : 3 * WIDTH]
    model.save_pretrained(folder)
    for file in TINY.glob("token*"):
        shutil.copy(file, folder)


@pytest.mark.parametrize("refit", [0, 1])
@pytest.mark.parametrize("method", METHODS)
def test_singular_statistics(method: str, refit: int, device: str, work: Path, judge: Judge) -> None:
    """Every layer is fitted with finite factors, and no worse than by nothing at all; a refit, behind
    which the errors of fits are not told, leaves them finite."""
    source, output = shared(work / "deficient", save_deficient), work / f"deficient-{method}-{refit}"
    windows = ("--calibration", SAMPLE, "--samples", 2, "--seq-len", 48, "--refit", refit)
    given = ("--method", method, *METHODS[method], "--cf", 1.5, *windows)
    blr("compress", source, "-o", output, *given, "--device", device, "--quiet")
    judge(compare(f"calibrated {method}", output, device, refit))


def compare(group: str, output: Path, device: str, refit: int) -> Iterator[Row]:
    records = json.loads((output / "blr_layers.json").read_text("utf-8"))
    for name, record in records.items() if not refit else ():
        yield bounded(group, name, record["weighted_error"], 1 + 1e-6)
    model = load_model(output, "AutoModelForCausalLM", dtype="float32", device=device)
    for name, parameter in model.named_parameters():
        yield row(bool(parameter.isfinite().all()), group, f"{name} is finite")
    with torch.no_grad():
        logits = model(torch.arange(2, 26, device=device)[None]).logits
    yield row(bool(logits.isfinite().all()), group, "logits are finite")
