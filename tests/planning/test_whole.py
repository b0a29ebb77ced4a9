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


@pytest.mark.parametrize(
    ("options", "said", "name"),
    [
        ("--kv-cf 2 -m monarch", "10 replaced by monarch, 4 replaced by svd", "monarch-cf2-kv-cf2"),
        ("--kv-cf 1 --kv-quantize int8", "4 replaced by svd, 10 kept dense", "kv-cf1-int8"),
        ("--kv-rank 4 -m blast", "10 replaced by blast, 4 replaced by svd", "blast-cf2-kv-r4"),
        ("--rank 32", "14 replaced by svd", "svd-r32"),
        ("-m dense --quantize int8", "2 stored in int8, 12 kept dense", "dense-int8"),
        (
            "--base int4 -m svd --rank 2",
            "14 stored in int4, corrected by svd in int4",
            "int4-svd-r2-int4",
        ),
    ],
)
def test_what_layers_became_is_what_became_of_them(
    options: str, said: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what most settings say: caches, rules and sizes decide for some, and the folder's name tells
    outputs of other sizes apart."""
    source = save_pico("llama", tmp_path / "dense")
    monkeypatch.chdir(tmp_path)
    done = blr("compress", source, *options.split(), "-q", "--no-check")
    assert f"layers: {said}" in " ".join(done.out.split()), done.out + done.err
    output = tmp_path / f"dense-{name}"
    card = (output / "README.md").read_text()
    first = said.partition(",")[0].replace(" ", " linear layers ", 1)
    assert first in card
    larger = "--rank 32" in options or "--kv-cf 1" in options
    assert ("times larger" in done.out) is larger and ("times smaller" in done.out) is not larger


def test_what_config_json_does_not_tell_is_left_out(tmp_path: Path) -> None:
    found = blr("plan", save_config("llama-7b", tmp_path / "llama"), "--format", "json").out
    assert json.loads(found)["whole"] is None


def test_experts_count_as_layers(tmp_path: Path) -> None:
    source = save_pico("mixtral", tmp_path / "dense")
    said = blr("plan", source, "--rank", 4).out
    assert "model.layers.0-1.block_sparse_moe.experts.w1.0-3 " in said
    assert "these layers, all experts among them, " in said
    done = blr("compress", source, "-o", tmp_path / "out", "--force")
    assert "32 replaced by svd" in done.out
    assert "83.3% of the model's parameters" in done.out
    done = blr("compress", source, "-o", tmp_path / "less", "--exclude", "*.experts.*")
    assert "11.9% of the model's parameters" in done.out
    assert "the whole model 1.065 times smaller" in done.out
