"""`blr tune`: rules from measurements, wrong variants kept out, refusals and interruptions."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from blr.bench import tuning as tune
from blr.bench.checks import PRECISIONS
from blr.bench.harness import Case, Harness, Stopped
from blr.bench.layer_problem import KernelTimer
from blr.bench.results import BenchReport
from blr.bench.shapes import TUNED, LayerShape
from blr.bench.tuned_files import table_text, write_table
from blr.bench.tuning import Tuning
from blr.bench.tuning_rules import Candidate, TunedPoint, merged, rules_of
from blr.compressor.base.progress import Progress
from blr.compressor.cli import timing as command
from blr.compressor.cli.options import Format
from blr.compressor.recipe.tuned_table import TunedRule, read_table, user_table
from blr.kernels.common import dispatch, tables
from blr.kernels.common.tables import BUCKETS, Shape, choose, first_match
from blr.kernels.layers.blast.reference import blast_linear

SHAPE, OTHER = Shape(4096, 4096, 16, 1024), Shape(4096, 1024, 16, 256)
CANDIDATES = ("gemv", {}), ("bmm_mix", {}), ("bmm_mix", {"chunk": 2})
KNOWN = {c.label: c for c in (Candidate(*terms) for terms in CANDIDATES)}
CHUNKED = 'bmm_mix {"chunk": 2}'
TIMES: dict[Shape, dict[int, dict[str, float]]] = {
    SHAPE: {
        1: {"gemv": 1.0, "bmm_mix": 3.0, "dense": 2.0},
        8: {"gemv": 2.0, "bmm_mix": 3.0, "dense": 4.0},
        64: {"bmm_mix": 3.0, CHUNKED: 3.05, "dense": 9.0},
        1024: {"bmm_mix": 5.0, CHUNKED: 4.95, "dense": 9.0},  # as good as before: no new rule
        4096: {"bmm_mix": 9.0, CHUNKED: 7.0, "dense": 20.0},
    },
    OTHER: {
        1: {"gemv": 1.0, "bmm_mix": 0.9, "dense": 0.5},
        8: {"gemv": 2.0, "bmm_mix": 2.5, "dense": 0.5},
        64: {},  # everything failed
        1024: {"bmm_mix": 2.0, "dense": 1.99},  # dense is no better than noise
        4096: {"bmm_mix": 2.0, "dense": 1.0},
    },
}


def points(dtype: str = "bfloat16") -> list[TunedPoint]:
    return [
        TunedPoint("blast", shape, dtype, n, times)
        for shape, measured in TIMES.items()
        for n, times in measured.items()
    ]


def tuning_of(structures: Sequence[str], tokens: tuple[int, ...]) -> Tuning:
    """A run on the CPU in float32."""
    cpu = torch.device("cpu")
    return Tuning([KernelTimer(cpu, PRECISIONS["float32"])], structures, tokens)


def timed(cases: list[Case]) -> None:
    """Run them on the CPU, once."""
    report, cpu = BenchReport("tune", {}), torch.device("cpu")
    assert Harness(report, Progress(quiet=True), cpu, rounds=1).run(cases) == 0 and not report.stopped


def chosen(rules: list[dict[str, Any]], shape: Shape, dtype: torch.dtype = torch.bfloat16) -> list[Any]:
    """What layers get at every bucket: label and bucket where it starts."""
    structured = [rule for rule in rules if rule["variant"] != "dense"]
    found: list[Any] = []
    for n in BUCKETS:
        rule = first_match(structured, "blast", shape, n, dtype)
        label = rule and Candidate(rule["variant"], rule.get("config", {})).label
        if not found or found[-1][1] != label:
            found.append((n, label))
    return found


def test_winners_become_rules_for_the_buckets_they_speak_for() -> None:
    rules = rules_of(points(), KNOWN)
    assert chosen(rules, SHAPE) == [(1, "gemv"), (16, "bmm_mix"), (2048, CHUNKED)]
    assert all(TunedRule(**rule) for rule in rules)


def test_shapes_that_were_not_measured_get_what_loses_least() -> None:
    """Without arguments of a shape; at 64 tokens only one shape speaks."""
    rules = rules_of(points(), KNOWN)
    assert chosen(rules, Shape(100, 100, 4, 20)) == [(1, "gemv"), (16, "bmm_mix")]
    assert chosen(rules, SHAPE, torch.float16) == [(1, None)]


def test_an_older_table_keeps_what_is_not_measured_again() -> None:
    rules = rules_of(points(), KNOWN)
    old = [
        {**rules[0], "variant": "old"},
        {"structure": "blast", "dtype": "float16", "inputs": [8, 8], "variant": "other"},
        {"structure": "blast", "dtype": "bfloat16", "variant": "old"},
        {"structure": "lowrank", "variant": "general"},
    ]
    found = merged(rules, old)
    assert [rule["variant"] for rule in found if rule in old] == ["other", "general"]
    assert [rule for rule in found if rule in rules] == rules
    exact = ["inputs" in rule for rule in found]
    assert exact == sorted(exact, reverse=True)


@pytest.mark.parametrize("structure", TUNED)
def test_candidates_are_all_variants_but_the_reference(structure: str) -> None:
    few = {c.variant for c in tune.candidates(structure, tables.MOST["gemv"])}
    many = {c.variant for c in tune.candidates(structure, tables.MOST["gemv"] + 1)}
    table = tune.variants_of(structure)
    assert few | many == set(table) - {"reference"}
    assert few - many == few & {"gemv"}
    assert many <= few


def test_listed_configurations_are_candidates_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = {"mix": [{"BN": 64}, {"BN": 128}]}
    monkeypatch.setattr(tune, "variants_of", lambda s: {"mix": None, "bmm": None})
    monkeypatch.setattr(tune, "configs_of", lambda structure, variant, n: configs.get(variant, [{}]))
    assert [c.label for c in tune.candidates("blast", 64)] == [
        'mix {"BN": 64}',
        'mix {"BN": 128}',
        "bmm",
    ]


# Whole runs, on the CPU.


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Tunes three plain variants of BLAST for a pico layer on the CPU, in place of a GPU."""
    table = {
        "good": blast_linear,
        "scaled": lambda x, *factors, scale: blast_linear(x, *factors) * scale,
        "broken": lambda x, *factors: torch.full((len(x), 32), float("nan")),
    }
    configs = {"scaled": [{"scale": 1.0}, {"scale": 1.2}]}
    monkeypatch.setattr(tune, "variants_of", lambda structure: table)
    monkeypatch.setattr(tune, "configs_of", lambda structure, variant, n: configs.get(variant, [{}]))
    monkeypatch.setattr(tune, "tuning_device", lambda name: torch.device("cpu"))
    monkeypatch.setattr(tune, "QUICK", (1, 16))
    layer = LayerShape("pico", "up", 32, 32, 2.0, {})
    monkeypatch.setattr("blr.bench.tune.find_layers", lambda models: [layer])
    monkeypatch.setenv("BLR_TUNED_DIR", str(tmp_path))
    return tmp_path


def run(**options: Any) -> None:
    defaults = {"shapes": "pico", "structures": "blast", "dtype": "float32", "quick": True}
    defaults |= {"seconds": None, "gpu_name": "mine", "output": None, "device": "auto", "quiet": True}
    command.tune(**{**defaults, "format": Format.json, **options})


def test_wrong_variants_are_reported_and_never_chosen(
    on_cpu: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run()
    said = capsys.readouterr()
    found = json.loads(said.out)
    path = on_cpu / "mine.yaml"
    assert found["output"] == str(path) == str(user_table("mine"))
    assert found["stopped"] is None
    assert found["cases"] == len(found["winners"]) == 6  # blocks 4, 8 and 16 at two numbers of tokens
    wrong = [line for line in found["refused"] if 'scaled {"scale": 1.2}' in line or ": broken " in line]
    assert len(wrong) == len(found["refused"]) == 2 * 6
    assert all(f"blr: note: {line}" in said.err for line in wrong)
    rules = read_table(path)
    assert len(rules) == found["rules"]
    variants = {(rule["variant"], json.dumps(rule.get("config"))) for rule in rules}
    assert variants <= {("good", "null"), ("scaled", '{"scale": 1.0}'), ("dense", "null")}
    dispatch.forget()
    shape = Shape(32, 32, 4, 16)
    assert choose("blast", shape, 5, torch.float32, "mine")[0] in ("good", "scaled")
    dispatch.forget()


def test_a_second_run_adds_to_the_table(on_cpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = on_cpu / "own.yaml"
    other = {"structure": "lowrank", "dtype": "float16", "variant": "gemm"}
    write_table(path, table_text("mine", "a test", [other]))
    run(output=path, format=Format.text)
    assert other in read_table(path)
    first, head, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{path}: ")
    assert head.split()[:2] == ["structure", "shape"] and len(lines) == 6


def test_no_time_writes_nothing_new(on_cpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(seconds=0.0)
    found = json.loads(capsys.readouterr().out)
    assert found["stopped"].startswith("the seconds were spent before pico up 32→32 blast")
    assert found["cases"] == 0
    assert read_table(on_cpu / "mine.yaml") == []


def test_an_interrupted_run_writes_nothing(
    on_cpu: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    done = Harness.run_case

    def stop(self: Harness, case: Case) -> list[Any]:
        if len(self.report.rows) == 2 * 5:
            raise Stopped(15)
        return done(self, case)

    monkeypatch.setattr(Harness, "run_case", stop)
    with pytest.raises(typer.Exit) as exit:
        run()
    assert exit.value.exit_code == 143
    assert list(on_cpu.iterdir()) == []
    assert "stopped by SIGTERM; 2 cases were timed, nothing was written" in capfd.readouterr().err


def test_every_structure_is_laid_out_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Factors reach variants in the order of VARIANTS' arguments, in kernel layout."""
    layer = LayerShape("pico", "up", 64, 96, 1.5, {})
    bench = tuning_of(TUNED, (3,))
    real = tune.variants_of
    reference = lambda s: {"own": real(s)["reference"]}  # noqa: E731
    monkeypatch.setattr(tune, "variants_of", reference)
    timed(bench.cases([layer]))
    assert bench.refused == []
    assert {p.structure for p in bench.points} == {"lowrank", "monarch", "blast", "kronecker"}
    assert all(p.times.keys() == {"own", "dense"} for p in bench.points)


# Refusals.


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 9, "tune: found no GPU, expected one that CUDA sees; run it on the GPU"),
        (("--device", "cpu"), 9, "tune: found no GPU"),
        (("--device", "cuda:7"), 9, "device 'cuda:7' cannot be used"),
        (("--dtype", "float64"), 2, "dtype 'float64': expected some of bfloat16, float16, float32"),
        (("--dtype", ","), 2, "expected names separated by commas"),
        (("--structures", "dense"), 2, "structure 'dense' is unknown"),
        (("--shapes", "gpt5"), 2, "model 'gpt5' is not in configs/bench-shapes.yaml"),
    ],
)
def test_refusals_are_one_line(
    blr: Callable[..., Any], arguments: tuple[str, ...], code: int, message: str
) -> None:
    done = blr("tune", *arguments, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == code
    assert done.stdout == ""
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
