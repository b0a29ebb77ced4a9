"""Options and patterns that nothing can follow are refused before anything is read."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import Invoke

HUGE = "1" + "0" * 30
WRONG: dict[str, list[str]] = {
    "generate X a": [
        *("--top-p 0", "--top-p 2", "--top-p nan", "--top-p inf", "--top-p -1", "--top-k 0"),
        *(f"--top-k {HUGE}", "--temperature nan", "--temperature inf", "--temperature -1"),
        *("--temperature 1e-300", f"--seed {HUGE}", f"--seed -{HUGE}", "--seed 1.5", "--dtype ="),
        *("--dtype int8", "--device meta", "--device =", "--device toaster", "--device cuda:x"),
        *("--max-new-tokens 0", f"--max-new-tokens {HUGE}", "--format xml"),
    ],
    "eval X --text X": [
        *("--window 1", f"--window {HUGE}", "--stride 0", f"--stride {HUGE}", "--batch 0"),
        *(f"--batch {HUGE}", "--max-tokens 1", f"--max-tokens {HUGE}", "--dtype =", "--dtype int8"),
        *("--device meta", "--device =", "--format ="),
    ],
    "compress X -o out": [
        *("--cf nan", "--cf inf", "--cf 1", "--cf -2", "--rank 0", f"--rank {HUGE}", "--rank 8 --cf 2"),
        "--blocks 0",
        *(f"--blocks {HUGE}", "--rounds -1", f"--rounds {HUGE}", f"--seed {HUGE}", "--seed -1"),
        *("--dtype =", "--dtype int8", "--device meta", "--device =", "--method =", "--heads ="),
        *("--solver =", "--samples 0", "--seq-len 1", "--allocation =", "--refit -1", "--finish -1"),
        *("--max-shard-size 0", "--max-shard-size =", f"--max-shard-size {'9' * 400}GB", "--include ="),
        *("--method ks --pattern (1,2,3", "--method ks --pattern (1,2,3,4)(1,5,6,1)"),
        *("--method ks --pattern (0,2,2,1)", "--method ks --pattern =", "--kv-cf 1", "--kv-cf 0.5"),
    ],
    "plan X": [
        "--rank 8 --cf 2",
        "--cf nan",
        "--gpu =",
        "--gpu toaster",
        "--dtype =",
        "--method =",
        "--rank 0",
    ],
    "export X -o out": [
        *("--batch 0", f"--batch {HUGE}", "--context 0", f"--context {HUGE}", "--dtype ="),
        *("--dtype float64", "--quantize =", "--quantize int2", "--quantize-head =", "--gpu ="),
        *("--gpu toaster", "--max-shard-size -1", "--format ="),
    ],
    "heal X --teacher X -o out": [
        *("--minutes nan", "--epochs inf", "--steps 0", "--lr nan", "--lr 0", "--clip nan", "--mix nan"),
        *("--hidden nan", "--hidden -1", "--warmup nan", "--warmup 1", "--save-minutes inf"),
        *(f"--window {HUGE}", "--window 1", "--batch 0", f"--batch {HUGE}", "--top-k 0", "--patience 0"),
        *(
            f"--own-tokens {HUGE}",
            "--vary nan",
            "--vary 1",
            "--vary -0.1",
            f"--seed {HUGE}",
            "--loss =",
            "--train =",
            "--train x",
            "--device meta",
        ),
    ],
    "bench layers": [
        *("--n =", "--n 0", f"--n {HUGE}", f"--n {'9' * 5000}", "--dtype =", "--cf nan", "--cf 1"),
        *("--blocks 0", "--repeats 0", f"--repeats {HUGE}", "--seconds nan", "--seconds -1"),
        *("--device meta", "--models =", "--models toaster", "--structures =", "--structures x"),
    ],
    "bench kernels": [
        *("--dtypes =", "--dtypes x", "--batch 0", f"--batch {HUGE}", "--sample 0", "--repeats 0"),
        *("--patterns x", "--patterns (0,1,1,1)", "--seconds inf", "--device meta"),
    ],
    "bench decode": [
        *("--contexts 0", "--batches 17", "--steps 0", "--rounds 0", "--cf nan", "--blocks 1"),
        *("--dtype =", "--ops =", "--mode =", "--seconds nan", "--device meta", "--models ="),
    ],
    "tune": [
        "--dtype =",
        "--shapes =",
        "--structures =",
        "--seconds nan",
        "--gpu-name ../x",
        "--device meta",
    ],
}
EMPTY: dict[str, list[str]] = {  # of variables that are not set: not the current folder
    **{command: ["="] for command in ("compress", "plan", "verify", "inspect", "export -o x")},
    **{"generate": ["= a"], "eval": ["= --text X"], "push": ["= a/b"], "sweep -o x --eval X": ["="]},
    **{"heal -o x": ["= --teacher X", "X --teacher ="]},
}
IDLE: dict[str, list[str]] = {  # what nothing would read
    "compress X -o out": [
        *("--method svd --blocks 4", "--method svd --rounds 5", "--method blast --heads per-head"),
        *("--samples 9", "--seq-len 9", "--mix 0.5", "--refit 2", "--finish 2", "--group 64"),
        *("--gpu h100", "--method blast --couplings int8", "--quantize int4 --couplings none"),
        *("--method dense --quantize int4 --base int2", "--method ks --tokens-per-second 9"),
        *("--calibration self --mix 0.5", "--allocation sensitivity", "--rank 8 --allocation uniform"),
        *("--method dense --quantize int4 --allocation uniform",),
        *("--calibration X --base int2 --rank 8 --allocation sensitivity",),
    ],
    "plan X": ["--method svd --blocks 4", "--group 64"],
    "sweep X -o out --eval X": [
        *("--methods svd", "--rank 8", "--base int2", "--quantize int8", "--mix 0.5", "--blocks 4"),
        *("--cf 2 --methods svd --rounds 9", "--cf 2 --plain none --group 64"),
    ],
    "generate X a": ["--top-k 5", "--top-p 0.5"],
    "eval X --text X": ["--shots 1", "--limit 1", "--tasks-path X", "--window 8 --stride 9"],
    "eval X --sts X": ["--stride 9", "--max-tokens 9", "--text X", "--tasks X"],
    "export X -o out": [
        *("--as dense --gpu h100", "--as onnx --gpu h100"),
        *("--as dense --batch 2", "--as onnx --kv-quantize int8"),
    ],
    "heal X --teacher X -o out": [
        *("--data X --mix 1", "--data X --mix 0 --own-tokens 9", "--loss lm --top-k 5"),
        "--loss lm --vary 0.1",
    ],
    "verify X": ["--public-key X", "--identity x"],
}
OPTIONS = [(c, o) for table in (WRONG, EMPTY, IDLE) for c, found in table.items() for o in found]


@pytest.mark.parametrize(
    ("command", "options"), OPTIONS, ids=[f"{c} {o[:40]}".replace("/", "_") for c, o in OPTIONS]
)
def test_wrong_options_are_usage_errors_before_anything_is_read(
    command: str, options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, invoke: Invoke
) -> None:
    """ "=" stands for an empty text; no file that the commands name exists."""
    monkeypatch.chdir(tmp_path)
    words = ["" if word == "=" else word for word in f"{command} {options}".split()]
    code, out, err = invoke(*words)
    assert (code, out) == (2, ""), err
    assert err.count("\n") == 1 and "bug" not in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("heal X", "blr heal"),
        ("recipes show", "blr recipes show"),
        ("compress X --wings", "blr compress"),
        ("generate X a --max-new-tokens 0", "blr generate"),
        ("bench wings", "blr bench"),
        ("compres X", "blr"),
    ],
)
def test_what_cannot_be_read_names_the_help_of_its_own_command(
    words: str, named: str, invoke: Invoke
) -> None:
    code, out, err = invoke(*words.split())
    assert (code, out) == (2, "") and err.endswith(f"; see `{named} --help`\n"), err


PATTERNS = {
    "no chain": ("(1,2,3,4)(1,5,6,1)", "do not meet"),
    "zero": ("(1,0,3,4)", "positive integers"),
    "half a block": ("(1,4,3,4)(2,6,4,1)", "cannot be factorized"),
    "beyond all layers": ("(99999,99999,99999,99999)", "expected at most"),
    "no pattern": ("(1,2,3)", "expected a chain"),
    "empty": ("", "expected a chain"),
}


@pytest.mark.parametrize("case", PATTERNS)
@pytest.mark.parametrize("place", ["recipe", "rule"])
def test_patterns_that_no_layer_can_hold(case: str, place: str, tmp_path: Path, invoke: Invoke) -> None:
    pattern, fragment = PATTERNS[case]
    path = tmp_path / "recipe.yaml"
    line = f'pattern: "{pattern}"'
    rule = f'rules:\n  - {{match: "*", method: ks, {line}}}\n'
    path.write_text(f"method: ks\n{line}\n" if place == "recipe" else rule)
    code, _, err = invoke("recipes", "validate", path)
    assert code == 3 and fragment in err and "recipe.yaml:2" in err and err.count("pattern is") <= 1


@pytest.mark.parametrize("pattern", ["butterfly", "monarch", "(1,192,48,2)(2,48,192,1)", "(1,8,8,1)"])
def test_patterns_of_some_layer(pattern: str, tmp_path: Path, invoke: Invoke) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"method: ks\npattern: {pattern}\n")
    assert invoke("recipes", "validate", path)[0] == 0
