"""Experts of a mixture on a GPU: by kernels and captured, and fits of several at once."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import compress_to
from fresh import blr
from heal_models import save_characters, write_text
from pico import save_pico
from tolerances import TOLERANCES

from blr.compressor.fitting import sequential
from blr.compressor.loading.loader import load_written
from blr.compressor.modeling import experts
from blr.compressor.modeling.experts import KernelExperts
from blr.compressor.modeling.modeling_blr import Experts

pytestmark = pytest.mark.gpu
METHODS: dict[str, dict[str, Any]] = {
    "int4": {"method": "dense", "quantize": "int4", "group": 32},
    "int2 + low rank": {"method": "svd", "base": "int2", "rank": 8, "group": 32},
    "low rank": {"method": "svd", "rank": 8},
}


@pytest.mark.parametrize("few", [512, 0])
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "gpt-oss"])
@pytest.mark.parametrize("method", METHODS)
def test_a_block_gives_the_same_captured(
    method: str, name: str, few: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For few tokens and for many, of which a graph serves any that choose other experts."""
    source = save_pico(name, tmp_path / "dense")
    model = load_written(compress_to(source, tmp_path / "out", **METHODS[method])).to(
        "cuda", torch.bfloat16
    )
    found = next(m for m in model.modules() if isinstance(m, KernelExperts))
    plain = copy.deepcopy(found)
    plain.__class__ = Experts
    monkeypatch.setattr(experts, "FEW", few)
    monkeypatch.setattr(Experts, "forward", Experts.forward if few == 0 else None)
    width = next(m for m in found.modules() if hasattr(m, "in_features")).in_features
    x = torch.randn(6, width, device="cuda", dtype=torch.bfloat16)
    weights, chosen = torch.rand(6, found.count, device="cuda").topk(2)
    weights, graph = weights.to(x.dtype), torch.cuda.CUDAGraph()
    with torch.no_grad():
        found(x, chosen, weights)
        with torch.cuda.graph(graph):
            y = found(x, chosen, weights)
        monkeypatch.undo()
        for turn in range(2):
            chosen.copy_((chosen + turn) % found.count)
            graph.replay()
            wanted = plain(x, chosen, weights)
            assert (y - wanted).norm() <= TOLERANCES[torch.bfloat16] * wanted.norm()


def test_fits_at_once_are_as_good_as_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_pico("mixtral", tmp_path / "dense")
    save_characters(source)
    text = write_text(tmp_path / "text.txt", 6000)
    sizes = ("--seq-len", 32, "--samples", 16, "--refit", 0, "--force", "--device", "cuda")
    method = ("--method", "svd", "--base", "int2", "--rank", 4, "--group", 32)
    errors = []
    for at_once in (16, 1):
        monkeypatch.setattr(sequential, "AT_ONCE", at_once)
        output = tmp_path / f"out-{at_once}"
        blr("compress", source, "-o", output, "--text", text, *method, *sizes)
        report = json.loads((output / "report.json").read_text())
        found = [layer["error"] for layer in report["layers"]]
        errors.append(sum(found) / len(found))  # of one layer they differ by ties between two levels
    assert errors[0] == pytest.approx(errors[1], rel=2e-2)
