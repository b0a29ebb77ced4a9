"""Structured models that transformers itself splits over processes compute what whole ones do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import compress_to
from limited import Limited
from pico import save_pico
from processes import run_split
from transformers import AutoModelForCausalLM

from blr.compressor import register
from blr.compressor.modeling.splitting import split_plan

register()

METHODS: dict[str, dict[str, Any]] = {
    "svd": {},
    "blast": {"blocks": 4, "rounds": 1},
    "monarch": {"blocks": 4},
}


def made(folder: Path, method: str, **settings: Any) -> Path:
    return compress_to(save_pico("llama", folder / "dense"), folder / "out", method=method, **settings)


ALWAYS = pytest.param("blast"), *(pytest.param(m, marks=pytest.mark.slow) for m in ("svd", "monarch"))


@pytest.mark.parametrize("method", ALWAYS)
def test_two_processes_compute_what_one_does(method: str, limited: Limited, tmp_path: Path) -> None:
    for found in run_split(limited, made(tmp_path, method, **METHODS[method])):
        assert found["distance"] < 1e-5
        assert found["same tokens"]
        assert found["share"] < 0.8
        assert not found["trains"]


@pytest.mark.parametrize("method", METHODS)
def test_factors_are_cut_on_the_side_of_the_native_plan(method: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(made(tmp_path, method, **METHODS[method]))
    plan = split_plan(model, 2)
    assert plan["model.layers.*.mlp.up_proj"] == "colwise"
    assert plan["model.layers.*.mlp.up_proj.U"] == "embedding_rowwise"
    assert plan["model.layers.*.mlp.down_proj"] == "rowwise"
    assert plan["model.layers.*.mlp.down_proj.V"] == "embedding_rowwise"
    if method != "svd":
        with pytest.raises(ValueError, match="parts to split over 3 processes"):
            split_plan(model, 3)


@pytest.mark.parametrize(
    "settings", [{"method": "ks"}, {"method": "dense", "quantize": "int8", "group": 32}]
)
def test_what_is_not_split_stays_whole(settings: dict[str, Any], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(made(tmp_path, **settings), dtype=torch.float32)
    assert split_plan(model, 2) == {}
