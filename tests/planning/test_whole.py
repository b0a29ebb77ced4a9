"""What is said of the whole model beside the replaced layers: a factor of 2 halves no file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fresh import blr
from pico import save_pico

from configs import save_config

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("name", ["bert", "gpt2", "mixtral"])
@pytest.mark.parametrize("options", [(), ("--dtype", "bfloat16"), ("--exclude", "*.0.*")])
def test_the_plan_says_what_the_file_becomes(
    name: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    source = save_pico(name, tmp_path / "dense")
    asked = (source, "--cf", 2, "--format", "json", *options)
    planned = json.loads(blr("plan", *asked).out)
    done = json.loads(blr("compress", *asked, "-o", tmp_path / "out", "-q").out)
    whole = planned["whole"]
    assert (whole["bytes"], whole["bytes_after"]) == (done["bytes_before"], done["bytes_after"])
    assert whole["factor"] == done["factor"] == done["bytes_before"] / done["bytes_after"]
    replaced = sum(layer["dense_parameters"] for layer in planned["layers"])
    assert whole["share"] == done["share"] == replaced / done["parameters_before"]
    assert 0 < whole["share"] < 1


def test_what_config_json_does_not_tell_is_left_out(tmp_path: Path) -> None:
    found = blr("plan", save_config("llama-7b", tmp_path / "llama"), "--format", "json").out
    assert json.loads(found)["whole"] is None


def test_experts_that_stay_dense_are_said(tmp_path: Path) -> None:
    source = save_pico("mixtral", tmp_path / "dense")
    done = blr("compress", source, "-o", tmp_path / "out")
    assert "experts stay dense, which are 71% of the model's parameters" in done.err
    assert "11.9% of the model's parameters" in done.out
    assert "the whole model 1.065 times smaller" in done.out
