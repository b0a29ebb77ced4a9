"""`blr export --as plain`: low-rank layers as pairs of `nn.Linear`, in an ordinary model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bare
import pytest
import torch
from exporting import compress_to, export_to
from limited import Limited
from pico import save_pico
from processes import run_split
from running import Invoke
from tolerances import TOLERANCES
from transformers import AutoModel, AutoModelForCausalLM

from blr.compressor import register
from blr.compressor.commands.inspect import inspect_output

register()

# Loads folders where blr cannot be imported; prints the results of each, and what its linear layers are.
WITHOUT_BLR = (
    bare.without("blr")
    + """
import json
import torch
from transformers import AutoModel
for folder in sys.argv[1:]:
    model = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
    linear = [n for n, m in model.named_modules() if type(m) is torch.nn.Linear]
    with torch.no_grad():
        print(json.dumps([linear, model(torch.arange(2, 26)[None])[0].tolist()]))
"""
)
# name: model, settings of the compression, layers that are pairs, layers that are not
CASES: dict[str, tuple[str, dict[str, Any], set[str], set[str]]] = {
    "llama": ("llama-tied", {}, {"q_proj", "o_proj", "down_proj"}, set()),
    "heads": ("llama", {"heads": "per-head"}, {"down_proj", "up_proj"}, {"q_proj", "k_proj"}),
    "packed": ("qwen2", {"quantize": "int8", "group": 32}, {"q_proj", "down_proj"}, set()),
    "conv1d": ("gpt2", {}, {"c_attn", "c_fc"}, set()),
    "encoder": ("bert", {}, {"query", "dense"}, set()),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """By name: the compressed checkpoint and its pairs."""
    folder, found = tmp_path_factory.mktemp("plain"), {}
    for name, (model, settings, _, _) in CASES.items():
        dense = save_pico(model, folder / f"{name}-dense")
        source = compress_to(dense, folder / f"{name}-svd", **{"method": "svd", "cf": 1.5, **settings})
        found[name] = source, export_to(source, folder / name, kind="plain")
    return found


def test_pairs_compute_the_same_where_blr_is_missing(
    made: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    done = bare.run(WITHOUT_BLR, *(plain for _, plain in made.values()), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for (name, (source, _)), line in zip(made.items(), done.stdout.splitlines(), strict=True):
        linear, results = json.loads(line)
        with torch.no_grad():
            expected = AutoModel.from_pretrained(source).eval()(torch.arange(2, 26)[None])[0]
        found = torch.tensor(results)
        assert float((found - expected).norm() / expected.norm()) < 10 * TOLERANCES[torch.float32], name
        ends = {tuple(n.split(".")[-2:]) for n in linear}
        assert {(layer, part) for layer in CASES[name][2] for part in "UV"} <= ends, name
        assert CASES[name][3] <= {last for _, last in ends}, name


def test_with_blr_it_generates_saves_and_loads_the_same(
    made: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    source, plain = made["llama"]
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    model = AutoModelForCausalLM.from_pretrained(plain)
    model.save_pretrained(tmp_path / "again")
    models = [model, *map(AutoModelForCausalLM.from_pretrained, (source, tmp_path / "again"))]
    tokens = [m.generate(torch.arange(2, 14)[None], **options).tolist() for m in models]
    assert tokens[0] == tokens[1] == tokens[2]
    names = [{p.name for p in folder.glob("*.py")} for folder in (plain, tmp_path / "again")]
    assert names[0] == names[1] == {"modeling_blr.py"}


@pytest.mark.parametrize("name", ["llama", "packed"])
def test_inspect_shows_its_pairs(name: str, made: dict[str, tuple[Path, Path]]) -> None:
    source, plain = (inspect_output(folder) for folder in made[name])
    ranks = [[row["rank"].split()[0] for row in each["layers"]] for each in (plain, source)]
    assert ranks[0] == ranks[1]
    assert {row["structure"] for row in plain["layers"]} == {"svd"}
    assert plain["dense_parameters"] == source["dense_parameters"] and plain["cf"] > 1


def test_two_processes_sum_ranks(limited: Limited, made: dict[str, tuple[Path, Path]]) -> None:
    """U is cut by outputs and V by inputs: of a pair one half is held whole."""
    for found in run_split(limited, made["llama"][1]):
        assert found["distance"] < 1e-5 and found["same tokens"]
        assert found["share"] < 0.8


def test_the_command_says_what_it_made_and_what_it_refuses(
    made: dict[str, tuple[Path, Path]], tmp_path: Path, invoke: Invoke
) -> None:
    source, plain = made["heads"]
    asked = ("-o", tmp_path / "out", "--as", "plain", "--quiet")
    code, out, err = invoke("export", source, *asked)
    assert (code, err) == (0, "") and "6 low-rank, each two linear ones; 8 of other form" in out
    assert invoke("verify", tmp_path / "out")[0] == 0
    code, _, err = invoke("export", source.with_name("heads-dense"), *asked, "--overwrite")
    assert code == 2 and "has no low-rank layer; take --as dense" in err
    code, _, err = invoke("export", plain, "-o", tmp_path / "twice")
    assert code == 4 and "an export already" in err
