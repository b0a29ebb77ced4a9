"""`blr plan` and `blr recipes`: tables from headers or config.json alone, and exit codes."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE
from running import Run

from configs import save_config


def test_plan_of_a_checkpoint_groups_blocks(tiny: Path, blr: Run) -> None:
    done = blr("plan", tiny, "--method", "blast", "--cf", "1.5")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split()[:4] == ["layers", "structure", "shape", "rank"]
    assert len(lines) == 1 + 7 + 5
    assert lines[1].startswith("model.layers.0-3.")
    assert "uniform share of cf 1.5" in lines[1]
    assert "h200 (measured ceilings" in lines[-3]
    every = blr("plan", tiny, "--method", "blast", "--cf", "1.5", "--all")
    assert len(every.stdout.splitlines()) == 1 + 28 + 5


def test_plan_says_what_compressing_and_healing_would_take(tiny: Path, blr: Run) -> None:
    fits, healing = blr("plan", tiny, "--calibrated").stdout.splitlines()[-3:-1]
    assert fits.startswith("compressing: about ") and " of the 150 of h200" in fits
    assert " of the host, " in fits and fits.endswith(" of disk (predicted)")
    assert healing.startswith("healing: ") and " of h200, " in healing and " at least, with " in healing
    found = json.loads(blr("plan", tiny, "--gpu", "a40", "--format", "json").stdout)
    assert found["heal"]["fits"] and found["heal"]["room"] == 48e9
    assert found["heal"]["said"].startswith("healing: ")
    assert found["compress"]["fits"] and found["compress"]["seconds"] == pytest.approx(
        sum(found["compress"]["phases"].values())
    )
    two = json.loads(blr("plan", tiny, "--calibrated", "--gpus", "2", "--format", "json").stdout)
    assert two["compress"]["gpus"] == two["heal"]["gpus"] == 2


def test_plan_as_json_has_every_layer(tiny: Path, blr: Run) -> None:
    done = blr("plan", tiny, "-m", "ks", "--gpu", "l4", "--format", "json")
    found = json.loads(done.stdout)
    assert len(found["layers"]) == 28
    assert found["gpu"] == {"name": "l4", "source": "datasheet", "chosen": "asked for"}
    assert found["from"] == "headers"
    assert found["cf"] == pytest.approx(2.0, rel=0.01)
    assert found["totals"]["parameters"] == sum(layer["parameters"] for layer in found["layers"])
    assert all("least predicted error" in layer["rule"] for layer in found["layers"])


def test_seventy_billion_parameters_from_config_json(blr: Run, tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = blr("plan", save_config("llama-3.1-70b", tmp_path / "m"), "-r", "llama-3.1-70b-blast")
    assert done.returncode == 0, done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime < 10  # seconds of CPU
    assert "0-79.self_attn.k_proj  dense" in done.stdout
    assert "160 kept dense" in done.stdout
    assert "no weights were found" in done.stdout


def test_plan_loads_no_torch(tiny: Path) -> None:
    code = (
        "import sys; from blr.compressor.cli import main\n"
        "try: main()\nfinally: print('torch' in sys.modules, file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, "plan", str(tiny), "--method", "blast"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert done.stderr.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--cf", "5000"], 2, "reaches at most cf"),
        (["--cf", "0.5"], 2, "cf is 0.5"),
        (["--gpu", "abacus"], 2, "known: h200"),
        (["--method", "dense"], 2, "give quantize, as int4"),
        (["--recipe", "gpt2-svd"], 2, "matches no compressible layer"),
        (["--recipe", "lama"], 3, "did you mean"),
        (["--heads", "some"], 2, "heads is 'some': expected whole, per-head, auto or grouped:G"),
        (["--base", "int4", "--method", "ks", "--rank", "8"], 2, "method ks corrects no base"),
        (["--base", "int4", "--method", "ks", "--cf", "8"], 2, "method ks corrects no base"),
    ],
)
def test_what_cannot_be_met_is_an_error(
    tiny: Path, blr: Run, options: list[str], code: int, message: str
) -> None:
    done = blr("plan", tiny, *options)
    assert done.returncode == code
    assert done.stdout == ""
    assert message in done.stderr.splitlines()[-1]


def test_names_that_are_like_none_are_not_answered_with_all(tiny: Path, blr: Run) -> None:
    said = blr("plan", tiny, "--recipe", "nope").stderr
    assert "`blr recipes list`" in said and "did you mean" not in said


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        (["--cf", "3"], True),
        (["--rank", "8"], False),
        (["-m", "ks", "--pattern", "butterfly", "--include", "*o_proj"], False),
        (["--recipe", "ranks.yaml"], False),
    ],
)
def test_a_factor_is_told_as_asked_for_where_it_sizes_a_layer(
    tiny: Path, blr: Run, tmp_path: Path, options: list[str], asked: bool
) -> None:
    (tmp_path / "ranks.yaml").write_text('rules:\n- {match: "*", rank: 8}\n')
    assert ("(asked for 3)" in (out := blr("plan", tiny, *options).stdout)) is asked, out


def test_a_plan_of_calibrated_ranks_says_that_it_knows_none(tiny: Path, blr: Run) -> None:
    assert "calibration measures" in blr("plan", tiny, "--calibrated").stdout
    assert "calibration measures" not in blr("plan", tiny, "--calibrated", "--rank", 8).stdout


def test_bits_that_no_correction_has_are_told_with_those_that_the_tightest_layer_takes(
    tiny: Path, blr: Run
) -> None:
    command = ("plan", tiny, "--base", "int2", "--method", "blast", "--bpw")
    done = blr(*command, 2.3)
    assert done.returncode == 2
    assert "of model.layers.0.self_attn.k_proj (64x192); give " in done.stderr, done.stderr
    enough = done.stderr.partition("give ")[2].partition(",")[0]
    assert blr(*command, enough).returncode == 0


def test_dense_rules_that_take_the_whole_budget_are_refused(
    tiny: Path, blr: Run, tmp_path: Path
) -> None:
    (tmp_path / "r.yaml").write_text('cf: 2\nrules:\n- {match: "*.mlp.*", method: dense}\n')
    done = blr("plan", tiny, "-r", "r.yaml")
    assert done.returncode == 2
    assert "parameters more than it leaves" in done.stderr


def test_rules_that_leave_too_much_to_the_others_are_refused(
    tiny: Path, blr: Run, tmp_path: Path
) -> None:
    (tmp_path / "r.yaml").write_text('cf: 1.2\nrules:\n- {match: "*.mlp.*", cf: 8}\n')
    done = blr("plan", tiny, "-r", "r.yaml")
    assert done.returncode == 2
    assert "raise cf" in done.stderr


def test_recipes_list_show_and_validate(blr: Run, tmp_path: Path) -> None:
    listed = json.loads(blr("recipes", "list", "--format", "json").stdout)
    assert "Llama-7B" in listed["llama-7b-blast"]
    lines = blr("recipes", "list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(listed)
    shown = blr("recipes", "show", "mistral-7b-blast").stdout
    assert "extends: gqa-blast" in shown
    resolved = json.loads(blr("recipes", "show", "mistral-7b-blast", "--format", "json").stdout)
    assert (resolved["method"], resolved["extends"]) == ("blast", None)
    (tmp_path / "bad.yaml").write_text("method: blast\nblock: 4\n")
    assert blr("recipes", "validate", "gpt2-svd").returncode == 0
    done = blr("recipes", "validate", "bad.yaml")
    assert done.returncode == 3
    assert "bad.yaml:2: key 'block'" in done.stderr


def test_compress_takes_a_recipe_with_rules(tiny: Path, blr: Run, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(
        "method: svd\ncf: 1.5\nrules:\n"
        '- {match: "*.[kv]_proj", method: dense}\n- {match: "*.mlp.*", method: monarch, blocks: 4}\n'
    )
    done = blr("compress", tiny, "-r", "r.yaml", "-o", "out", "--format", "json", "--force")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["cf"] == pytest.approx(1.5, rel=0.01) and found["kept"] == 8
    layers = json.loads(blr("inspect", "out", "--format", "json").stdout)["layers"]
    assert len(layers) == 20
    assert {layer["structure"] for layer in layers if ".mlp." in layer["module"]} == {"monarch"}
    assert blr("generate", "out", "The protocol", "--max-new-tokens", "2").returncode == 0
