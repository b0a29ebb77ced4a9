"""The check scripts tell right from wrong: what each of their rows must fail on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import export_check
import feature_check
from features import commands, encoders, exports, families, reference
from features.report import FAIL, PASS, SKIP, Row, first_difference, tokens_row
from features.work import Done, fresh

from blr.compressor.generate import Profile, Stage, profile_text

SCRIPTS = Path(feature_check.__file__).parent


def script(name: str, *arguments: object) -> tuple[int, list[str]]:
    """A script's exit code and lines."""
    command = [sys.executable, str(SCRIPTS / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout.splitlines()


def test_tokens_that_differ_fail_and_say_where() -> None:
    assert first_difference([[1, 2], [3, 4]], [[1, 2], [3, 5]]) == "row 1 of 2 differs at token 1 of 2"
    assert first_difference([[1]], [[1, 2]]) == "row 0 of 1 differs at token 1 of 2"
    assert first_difference([[1]], [[1], [2]]) == "1 rows, expected 2"
    assert tokens_row("a", [[1]], [[1]]).verdict == PASS
    assert tokens_row("a", [[1]], [[2]]).verdict == FAIL


class Talker(nn.Module):
    """Says 0, 1, 2 … whatever the prompt; the best logit leads by `leads`, one number a row."""

    device = torch.device("cpu")

    def __init__(self, leads: list[float], distinct: int) -> None:
        super().__init__()
        self.leads, self.distinct = leads, distinct

    def generate(self, ids: torch.Tensor, max_new_tokens: int, **options: Any) -> SimpleNamespace:
        tokens = (torch.arange(max_new_tokens) % self.distinct).expand(len(ids), -1)
        logits = []
        for token in tokens[0]:
            row = torch.zeros(len(ids), 100)
            row[:, 99], row[:, token] = 1, 1 + torch.tensor(self.leads)
            logits.append(row)
        return SimpleNamespace(sequences=torch.cat((ids, tokens), 1), logits=logits)


def test_prompts_near_a_tie_or_in_a_loop_are_not_taken() -> None:
    groups = [[[5], [6]], [[7], [8]]]
    (first, second) = reference.separated(Talker([1e-7, 0.5, 0.5, 1e-7], 40), groups, 48)
    assert (first.ids, second.ids, first.distinct) == ([6], [7], 40)
    for model in (Talker([0.5, 0.5, 1e-7, 0], 40), Talker([0.5] * 4, 3)):
        with pytest.raises(ValueError, match="no candidate"):
            reference.separated(model, groups, 48)


PROMPT = reference.Prompt([1], [2, 3], 1.0)
STEP = exports.Step("a", [PROMPT], fused=False, message="why")
CALL = {"tokens": [[2, 3]], "native": True, "error": ""}


@pytest.mark.parametrize(
    ("call", "heard", "verdict"),
    [
        ({}, ["blr: why"], PASS),
        ({}, ["blr: why", "blr: exported for a100"], PASS),
        ({"tokens": [[2, 4]]}, ["blr: why"], FAIL),
        ({"native": False}, ["blr: why"], FAIL),
        ({}, [], FAIL),
        ({}, ["blr: why", "blr: why else"], FAIL),
        ({}, ["blr: because"], FAIL),
        ({"tokens": [], "error": "no"}, ["blr: why"], FAIL),
    ],
)
def test_a_step_needs_tokens_answerer_and_one_message(
    call: dict[str, Any], heard: list[str], verdict: str
) -> None:
    assert exports.judged(STEP, {**CALL, **call}, heard, "cuda").verdict == verdict


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_where_the_model_landed_decides_who_should_answer(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu = [f"blr: {exports.ON_CPU}"] if device == "cpu" else []
    answer = {**CALL, "native": device == "cpu"}
    found = {"device": device, "calls": [answer, answer]}
    monkeypatch.setattr(exports, "fresh", lambda *a, **k: (found, [[], on_cpu, []]))
    steps = [replace(STEP, fused=True, message=""), replace(STEP, fused=True, message="")]
    assert [row.verdict for row in exports.take(Path(), "cuda", steps)] == [PASS, PASS]
    found["calls"] = [answer, {**answer, "native": not answer["native"]}]
    assert [row.verdict for row in exports.take(Path(), "cuda", steps)] == [PASS, FAIL]


def profile(**changes: Any) -> Profile:
    stages = [Stage("embed", 2.0, 10), Stage("layer.*.attention", 4.0, 1000), Stage("choose", 2.0, 0)]
    known = {"tokens_per_second": 83333.0, "bytes_a_token": 2010, "copy_bandwidth": 4e12}
    return Profile(**{**known, "fraction": 0.5, "stages": stages, **changes})


@pytest.mark.parametrize(
    ("changes", "failed"),
    [
        ({}, 0),
        ({"fraction": 1.2}, 1),
        ({"tokens_per_second": 1e3}, 1),
        ({"bytes_a_token": 2011}, 1),
        ({"stages": [Stage("embed", 12.0, 2010)]}, 1),
    ],
    ids=["right", "fraction", "time", "bytes", "stages"],
)
def test_a_profile_must_agree_with_itself(changes: dict[str, Any], failed: int) -> None:
    """As the command prints it, for a model of two layers."""
    rows = list(commands.sane(commands.parse_profile(profile_text(profile(**changes))), 2))
    assert [row.verdict for row in rows].count(FAIL) == failed and len(rows) == 4


def test_no_profile_is_an_error() -> None:
    with pytest.raises(ValueError, match="no profile"):
        commands.parse_profile("blr: error: none")


@pytest.mark.parametrize(
    ("done", "verdict"),
    [
        (Done(9, "", "blr: error: too long\n"), PASS),
        (Done(1, "", "blr: error: too long\n"), FAIL),
        (Done(9, "text", "blr: error: too long\n"), FAIL),
        (Done(9, "", "blr: error: something else\n"), FAIL),
        (Done(9, "", "blr: error: too long; this is a bug in blr\n"), FAIL),
        (Done(9, "", "Traceback\n"), FAIL),
    ],
)
def test_a_refusal_is_one_line_and_its_exit_code(done: Done, verdict: str) -> None:
    assert commands.refused("a", 9, "too long", lambda: done).verdict == verdict


def test_a_graph_a_shape_and_no_excuse() -> None:
    assert encoders.graphs_row("a", "cuda", 2, 2, []).verdict == PASS
    assert encoders.graphs_row("a", "cuda", 0, 2, []).verdict == FAIL
    assert encoders.graphs_row("a", "cuda", 2, 2, ["blr: it runs eagerly"]).verdict == FAIL
    assert encoders.graphs_row("a", "cpu", 0, 2, []).verdict == SKIP
    calls = encoders.inputs_of(encoders.ENCODERS["bert"])
    assert encoders.shapes_of(calls) == 4 < len(calls), "shapes must come again with other data"


def test_hidden_modules_are_not_installed() -> None:
    code = """
found = []
for name in ("blr.compressor", "triton", "json"):
    try:
        __import__(name)
        found.append(name)
    except ImportError:
        print("blr: no", name, file=sys.stderr)
print("-- call", file=sys.stderr)
print("other")
print(json.dumps(found))
"""
    found, said = fresh(code, {}, ("blr", "triton"))
    assert found == ["json"] and said == [["blr: no blr.compressor", "blr: no triton"], []]
    with pytest.raises(RuntimeError, match="exit code 1: ValueError: broken"):
        fresh("raise ValueError('broken')", {})


def test_every_task_names_something_that_exists() -> None:
    for module, function, arguments in feature_check.all_tasks().values():
        given = len(arguments) + 2
        found = getattr(import_module(f"features.{module}"), function)
        assert found.__code__.co_argcount == given
    assert tuple(families.FAMILIES) == feature_check.FAMILIES
    assert tuple(families.METHODS) == feature_check.METHODS
    assert tuple(encoders.ENCODERS) == feature_check.ENCODERS
    assert set(feature_check.ALONE) <= set(feature_check.all_tasks())


def test_tasks_are_chosen_by_name_beginning_or_pattern() -> None:
    assert feature_check.chosen("generate-profile") == ["generate-profile"]
    assert feature_check.chosen("qwen2-s,*-other-gpu") == ["export-other-gpu", "qwen2-svd"]
    assert feature_check.chosen("") == list(feature_check.all_tasks())
    with pytest.raises(SystemExit, match="no such task"):
        feature_check.chosen("abacus")


def test_a_task_that_breaks_is_a_failed_row(capsys: pytest.CaptureFixture[str]) -> None:
    def outcomes() -> Iterator[tuple[Any, list[Row], str]]:
        yield partial(feature_check.rows_of, "a"), [Row(PASS, "one"), Row(SKIP, "two")], ""
        yield partial(feature_check.rows_of, "b"), [Row(PASS, "three")], "RuntimeError: gone"

    assert feature_check.counted(outcomes()) == {PASS: 2, FAIL: 1, SKIP: 1}
    assert capsys.readouterr().out == "FAIL b: after 1 rows: RuntimeError: gone\n"


def test_feature_check_of_an_encoder_from_end_to_end() -> None:
    code, lines = script("feature_check.py", "--device=cpu", "--only=captured-vit-ks", "--processes=1")
    assert code == 0 and [line[:4] for line in lines] == [PASS, PASS, SKIP, PASS], lines
    assert lines[-1].startswith("PASS: 2 PASS, 0 FAIL, 1 SKIP")


def test_other_tokens_of_a_copy_fail() -> None:
    found = {"ids": [1, 2, 3], "fused": True}
    compared = partial(export_check.compared, "a", "cuda", found)
    assert compared({"ids": [1, 2, 3]}, 4)[0]
    assert not compared({"ids": [1, 2, 4]}, 4)[0]
    assert not compared({"ids": [1, 2, 3]}, 8)[0], "too few to prove anything"
    passed, what = compared({"ids": [], "error": "gone"}, 4)
    assert not passed and "the checkpoint itself: gone" in what


def test_export_check_of_several_checkpoints_at_once(tiny: Path, tmp_path: Path) -> None:
    code, lines = script("export_check.py", tiny, tmp_path, "--tokens=8", "--processes=2")
    assert code == 1 and lines[-1] == "FAIL 1 rows"
    assert {line[:5] for line in lines if "tiny-llama" in line} == {"PASS "}
    assert sum("without blr on cpu" in line for line in lines) == 1
    assert any(line.startswith(f"FAIL export {tmp_path.name}") for line in lines)
