"""Hostile checkpoints and recipes through `blr compress`: an exit code, one line, nothing else.

Commands that need no torch run in one process, which also shows that no refusal imports it, those
that do in forks of one that has; the peak of memory stays under a gigabyte in both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import hostile
import pytest
from limited import Limited
from patience import PATIENCE
from producing import listing

SECONDS = 10  # of CPU, for one refusal
KIBIBYTES = 2**20
BATCH = """
import contextlib, io, json, os, sys, time
from pathlib import Path
from blr.compressor.cli import main
for line in sys.stdin:
    case = json.loads(line)
    os.chdir(case["cwd"])
    sys.argv = ["blr", *case["argv"]]
    out, err, code, started = io.StringIO(), io.StringIO(), 0, time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code
    memory = Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]
    heavy = sorted({"torch", "transformers", "numpy"} & sys.modules.keys())
    seconds = time.process_time() - started
    print(json.dumps([code, out.getvalue(), err.getvalue(), seconds, int(memory), heavy]))
"""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")


def batch(cases: dict[str, tuple[Path, list[str]]]) -> dict[str, dict[str, Any]]:
    """Run ``blr`` once for each case, (folder, arguments), all in one process."""
    before = {name: listing(folder) for name, (folder, _) in cases.items()}
    jobs = [{"cwd": str(folder), "argv": argv} for folder, argv in cases.values()]
    done = subprocess.run(
        [sys.executable, "-c", BATCH],
        **{"input": "\n".join(map(json.dumps, jobs)), "text": True, "stdout": subprocess.PIPE},
        **{"check": True, "timeout": PATIENCE, "env": {**os.environ, "COLUMNS": "80"}},
    )
    fields = ("code", "out", "err", "seconds", "memory", "heavy")
    results = {}
    for name, line in zip(cases, done.stdout.splitlines(), strict=True):
        folder = cases[name][0]
        results[name] = {
            **dict(zip(fields, json.loads(line), strict=True)),
            **{"untouched": listing(folder) == before[name]},
            **{"canary": (folder / "canary").exists()},
        }
    return results


def in_forks(cases: dict[str, tuple[Path, list[str]]], limited: Limited) -> dict[str, dict[str, Any]]:
    """The same where torch is imported already."""
    results = {}
    for name, (folder, argv) in cases.items():
        before = listing(folder)
        ended = limited.run(*argv, cwd=folder, env={"COLUMNS": "80"})
        results[name] = {
            **{"code": ended.code, "out": ended.out, "err": ended.err},
            **{"seconds": ended.cpu, "memory": ended.memory},
            **{"untouched": listing(folder) == before, "canary": (folder / "canary").exists()},
        }
    return results


def check(result: dict[str, Any], code: int, fragment: str) -> None:
    """One printable line with `fragment`, the exit code, and nothing written, run or used up."""
    assert result["code"] == code, result["err"]
    line = result["err"].removesuffix("\n")
    assert line.startswith("blr: error: ") and line.isprintable() and len(line) < 600
    assert fragment in line
    assert json.loads(result["out"]) == {"error": line.removeprefix("blr: error: "), "exit_code": code}
    assert result["untouched"] and not result["canary"]
    assert result["seconds"] < SECONDS and result["memory"] < KIBIBYTES


# --- Checkpoints ----------------------------------------------------------------------------

PLAIN = [case for case, entry in hostile.HOSTILE.items() if not entry.allow_pickle]
PICKLED = [case for case, entry in hostile.HOSTILE.items() if entry.allow_pickle]


def table(names: list[str], root: Path, *options: str) -> dict[str, tuple[Path, list[str]]]:
    """Checkpoints written below `root`, and the arguments that compress them."""
    cases = {}
    for name in names:
        folder = root / name
        (folder / "checkpoint").mkdir(parents=True)
        hostile.HOSTILE[name].build(folder / "checkpoint")
        cases[name] = (folder, ["compress", "./checkpoint", "-o", "out", "--format=json", *options])
    return cases


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return batch(table(PLAIN, tmp_path_factory.mktemp("plain")))


@pytest.fixture(scope="module")
def pickled(tmp_path_factory: pytest.TempPathFactory, limited: Limited) -> dict[str, dict[str, Any]]:
    return in_forks(table(PICKLED, tmp_path_factory.mktemp("pickled"), "--allow-pickle"), limited)


@pytest.mark.parametrize("case", PLAIN)
def test_checkpoint_refused(case: str, plain: dict[str, dict[str, Any]]) -> None:
    check(plain[case], 4, hostile.HOSTILE[case].fragment)
    assert plain[case]["heavy"] == []


@pytest.mark.parametrize("case", PICKLED)
def test_pickle_refused(case: str, pickled: dict[str, dict[str, Any]]) -> None:
    check(pickled[case], 4, hostile.HOSTILE[case].fragment)


# Refused by what transformers makes of the config, hence with torch but before any work
_BARE = {"model_type": "biogpt", "architectures": ["BioGptForCausalLM"]}
NATIVE: dict[str, tuple[dict[str, Any], str]] = {
    "type-unknown": ({"model_type": "nonesuch"}, "model type 'nonesuch'"),
    "architecture-unknown": ({"architectures": ["EvilForCausalLM"]}, "'EvilForCausalLM'"),
    "architecture-function": ({"architectures": ["pipeline"]}, "architecture 'pipeline'"),
    "architecture-other-class": ({"architectures": ["Trainer"]}, "architecture 'Trainer'"),
    "architecture-of-another-family": ({"architectures": ["BertModel"]}, "config.json"),
    "architecture-with-more-tensors": ({"tie_word_embeddings": False}, "lm_head.weight"),
    "quantized": ({"quantization_config": {"quant_method": "gptq"}}, "method 'gptq'"),
    "quantized-oddly": ({"quantization_config": "yes"}, "method 'yes'"),
    "no-table-no-architecture": ({**_BARE, "architectures": None}, "no architectures"),
    "no-table-huge-depth": ({**_BARE, "num_hidden_layers": 10**6}, "num_hidden_layers '1000000'"),
    "no-table-huge-experts": ({**_BARE, "a": {"num_experts": 10**9}}, "num_experts '1000000000'"),
    "no-table-bad-width": ({**_BARE, "hidden_size": "wide"}, "'biogpt' cannot be built from"),
    "no-table-bad-heads": ({**_BARE, "num_attention_heads": 0}, "'biogpt' cannot be built from"),
    "no-table-other-tensors": (_BARE, "missing keys ['biogpt.embed"),
    "compressed-already": ({"model_type": "blr_llama"}, "already compressed"),
}


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory, limited: Limited) -> dict[str, dict[str, Any]]:
    cases = {}
    for name, (values, _) in NATIVE.items():
        folder = tmp_path_factory.mktemp("native")
        (folder / "checkpoint").mkdir()
        hostile.write(folder / "checkpoint", **values)
        cases[name] = (folder, ["compress", "./checkpoint", "-o", "out", "--format=json"])
    return in_forks(cases, limited)


@pytest.mark.parametrize("case", NATIVE)
def test_config_refused(case: str, native: dict[str, dict[str, Any]]) -> None:
    check(native[case], 4, NATIVE[case][1])


def test_tables_are_large() -> None:
    assert len(PLAIN) >= 90 and len(PICKLED) >= 10 and len(RECIPES) >= 25


@pytest.mark.parametrize("case", ["shard-fifo", "header-of-26-MB", "config-auto-map-no-type"])
def test_refused_by_the_real_command(case: str, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    hostile.HOSTILE[case].build(tmp_path / "checkpoint")
    before = listing(tmp_path)
    command = [Path(sys.executable).with_name("blr"), "compress", "checkpoint", "-o", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 4 and done.stdout == ""
    assert done.stderr.startswith("blr: error: ") and done.stderr.count("\n") == 1
    assert listing(tmp_path) == before


# Standard input is one that nobody writes to or closes
HELD_OPEN = "import os; reader, writer = os.pipe(); os.dup2(reader, 0)"


def test_code_in_the_source_never_runs(limited: Limited, tmp_path: Path) -> None:
    """A good checkpoint whose config and tokenizer ask for code, with standard input held open.

    It compresses without a question, and the output asks for no code but our own."""
    source = tmp_path / "checkpoint"
    source.mkdir()
    hostile.auto_map(source)
    (source / "tokenizer.json").write_text("{}")
    command = ("compress", source, "-o", "out", "--cf", "1.2")
    done = limited.run(*command, cwd=tmp_path, patch=HELD_OPEN)
    assert done.code == 0, done.err
    assert not (tmp_path / "canary").exists()
    assert b"evil" not in b"".join(path.read_bytes() for path in (tmp_path / "out").iterdir())
    assert not list((tmp_path / "out").glob("evil*"))


def test_code_runs_only_when_trusted(limited: Limited, tmp_path: Path) -> None:
    """A model that is nothing but its own code: refused without a question, run if asked to."""
    source = tmp_path / "checkpoint"
    source.mkdir()
    hostile.auto_map(source, model_type="evil")
    (source / "tokenizer.json").write_text("{}")
    command = ("generate", "checkpoint", "text")
    ended = limited.run(*command, cwd=tmp_path)
    assert (ended.code, ended.out) == (4, ""), ended.err
    assert ended.err.startswith("blr: error: ") and ended.err.count("\n") == 1
    assert not (tmp_path / "canary").exists()
    limited.run(*command, "--trust-remote-code", cwd=tmp_path)
    assert (tmp_path / "canary").exists()


# --- Recipes --------------------------------------------------------------------------------

_LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
RECIPES: dict[str, tuple[bytes, str]] = {
    "python-tag": (
        b"cf: !!python/object/apply:os.system ['touch canary']",
        "recipe.yaml:1: found the tag",
    ),
    "python-name": (b"cf: 2\nmethod: !!python/name:os.system", "recipe.yaml:2: found the tag"),
    "local-tag": (b"!x {cf: 2}", "the tag '!x'"),
    "binary-tag": (b"pattern: !!binary aGVsbG8=", "the tag"),
    "set-tag": (b"include: !!set {a, b}", "the tag"),
    "billion-laughs": (_LAUGHS.encode(), "anchor"),
    "alias-to-itself": (b"include: &a [*a]", "anchor"),
    "merge-key": (b"<<: {cf: 3}", "unknown key"),
    "deep-flow": (b"include: " + b"[" * 30_000, "nested"),
    "deep-mappings": (b"a: {" * 10_000, "nested"),
    "deep-blocks": (b"include:\n" + b"- " * 20_000, "nested"),
    "duplicate": (b"cf: 2\nmethod: svd\ncf: 3\n", "recipe.yaml:3: found the key 'cf' a second time"),
    "duplicate-quoted": (b"cf: 2\n'cf': 3\n", "a second time"),
    "unknown": (b"method: svd\nmethd: blast\n", "recipe.yaml:2: key 'methd'"),
    "number-as-key": (b"3: 4", "'3' as a key"),
    "list-as-key": (b"[a, b]: 4", "a collection as a key"),
    "list": (b"- cf: 2", "a list at the top"),
    "scalar": (b"svd", "only 'svd'"),
    "empty": (b"", "empty"),
    "comment-only": (b"# nothing\n", "empty"),
    "two-documents": (b"cf: 2\n---\ncf: 3\n", "second document"),
    "directive": (b"%YAML 1.1\n---\ncf: 2\n", "directive"),
    "text-for-number": (b"cf: two", "recipe.yaml:1: key 'cf': found 'two'"),
    "quoted-number": (b"cf: '2'", "found '2'"),
    "number-for-text": (b"method: 3", "found 3"),
    "text-for-list": (b"include: '*'", "found '*'"),
    "number-in-list": (b"include:\n  - a\n  - 3\n", "recipe.yaml:3: key 'include.1': found 3"),
    "yaml-1.1-boolean": (b"method: no", "found 'no'"),
    "too-small": (b"cf: 0.5", "greater than 1"),
    "nan": (b"cf: .nan", "finite"),
    "infinite": (b"cf: 1e999", "finite"),
    "many-digits": (b"seed: " + b"9" * 10_000, "10000 digits"),
    "boolean-for-number": (b"rank: true", "found True"),
    "no-yaml": (b"cf: [", "invalid YAML"),
    "tab": (b"cf:\n\t2", "recipe.yaml:2: found invalid YAML"),
    "control-character": (b"cf: 2\nmethod: \x07\n", "recipe.yaml:2: found invalid YAML"),
    "escape-in-key": (b'"\\e[31m\\u202e": 2', "key '\\x1b[31m"),
    "not-utf-8": (b"cf: 2 # \xff\xfe", "no UTF-8 (at byte 8)"),
    "utf-16": ("cf: 2".encode("utf-16"), "no UTF-8"),
    "huge": (b"#" * 65_537, "65537 bytes"),
}


def place(name: str, folder: Path) -> None:
    """Put the recipe `name` into `folder`; some are no regular files."""
    path = folder / "recipe.yaml"
    special = {"fifo": os.mkfifo, "folder": os.mkdir, "missing": lambda path: None}
    if name in special:
        special[name](path)
    elif name == "device":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(RECIPES[name][0])


FRAGMENTS = {
    **{name: fragment for name, (_, fragment) in RECIPES.items()},
    **{"fifo": "FIFO", "folder": "folder", "missing": "no readable file", "device": "device"},
}


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    cases = {}
    for name in FRAGMENTS:
        folder = tmp_path_factory.mktemp("recipe")
        (folder / "checkpoint").mkdir()
        hostile.write(folder / "checkpoint")
        place(name, folder)
        options = ["--recipe", "./recipe.yaml", "--format", "json"]
        cases[name] = (folder, ["compress", "checkpoint", "-o", "out", *options])
    return batch(cases)


@pytest.mark.parametrize("case", FRAGMENTS)
def test_recipe_refused(case: str, recipes: dict[str, dict[str, Any]]) -> None:
    check(recipes[case], 3, FRAGMENTS[case])
    assert recipes[case]["heavy"] == []
