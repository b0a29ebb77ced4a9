"""Nothing hangs: whatever is no regular file, too large, too deep or explodes is refused at once.

Every case is a command line in a process of its own: the exit code of the README's table, one line,
a few seconds of CPU, under a gigabyte, nothing left behind.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from limited import Ended, Limited
from spoiling import spoil, words_tokenizer
from tokenizers import Tokenizer, normalizers

SECONDS = 25  # of CPU: imports take some, a tokenizer's trial ten at most
KIBIBYTES = 2**20
TEXT = "the protocol is " * 200


def slowly(*values: str) -> list[Any]:
    """Parameters that only a full run takes: the check they share is tried by another one."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def check(ended: Ended, code: int, fragment: str) -> None:
    assert ended.code == code, ended.err
    assert ended.line.startswith("blr: error: ") and ended.line.isprintable() and len(ended.line) < 2100
    assert fragment in ended.line
    assert ended.cpu < SECONDS and ended.memory < KIBIBYTES


# --- What is no regular file, in the place of every file that is read ------------------------------

SPECIAL: dict[str, Callable[[Path], None]] = {
    "fifo": lambda path: os.mkfifo(path),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "link-to-fifo": lambda path: (os.mkfifo(path.with_name("pipe")), path.symlink_to("pipe"))[0],
    "folder": lambda path: path.mkdir(),
}
READ: dict[str, tuple[tuple[str, ...], str, int]] = {
    "calibration": (("compress", "model", "-o", "out", "--calibration", "f.txt"), "f.txt", 4),
    "calibration-jsonl": (("compress", "model", "-o", "out", "--calibration", "f.jsonl"), "f.jsonl", 4),
    "text": (("eval", "model", "--text", "f.txt"), "f.txt", 4),
    "sts": (("eval", "model", "--sts", "f.csv"), "f.csv", 4),
    "recipe": (("compress", "model", "-o", "out", "-r", "f.yaml"), "f.yaml", 3),
    "recipe-shown": (("recipes", "show", "./f.yaml"), "f.yaml", 3),
    "config": (("plan", "model"), "model/config.json", 4),
    "tokenizer": (("generate", "model", "the"), "model/tokenizer.json", 4),
    "tokenizer-config": (("generate", "model", "the"), "model/tokenizer_config.json", 4),
    "generation-config": (("generate", "model", "the"), "model/generation_config.json", 4),
    "records": (("inspect", "small"), "small/blr_layers.json", 4),
    "manifest": (("verify", "small"), "small/blr_manifest.json", 5),
}


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("case", READ)
def test_special_files(case: str, kind: str, limited: Limited, model: Path, small: Path) -> None:
    command, place, code = READ[case]
    path = model.parent / place
    if place.startswith("small"):
        shutil.copytree(small, model.parent / "small")
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    SPECIAL[kind](path)
    ended = limited.run(*command, cwd=model.parent)
    check(ended, code, path.name)
    assert not (model.parent / "out").exists()


@pytest.mark.parametrize("kind", SPECIAL)
def test_special_files_in_the_partial_folder(kind: str, limited: Limited, model: Path) -> None:
    """Of a run that was interrupted: replaced or refused, but never waited for."""
    path = model.parent / "out.blr-partial" / "run.json"
    path.parent.mkdir()
    SPECIAL[kind](path)
    ended = limited.run("compress", "model", "-o", "out", cwd=model.parent)
    assert ended.code in (0, 5) and ended.cpu < SECONDS, ended.err


def test_fifo_in_the_journal_is_named_and_left(limited: Limited, dense: Path, tmp_path: Path) -> None:
    """It is nothing that blr wrote; without it the run goes on."""
    command = ("compress", dense, "-o", "out", "-q")
    kill = "from blr.compressor.workspace.workspace import Workspace\nWorkspace.commit = lambda s: 1 / 0"
    assert limited.run(*command, cwd=tmp_path, patch=kill).code == 1
    (tmp_path / "out.blr-partial" / "blr_manifest.json").unlink(missing_ok=True)
    entry, *_ = (tmp_path / "out.blr-partial" / "journal").glob("*.safetensors")
    entry.unlink()
    os.mkfifo(entry)
    check(limited.run(*command, cwd=tmp_path), 5, "not written by blr")
    entry.unlink()
    assert limited.run(*command, cwd=tmp_path).code == 0
    assert limited.run("verify", "out", cwd=tmp_path).code == 0


@pytest.mark.parametrize(
    ("name", "size", "command", "code"),
    [
        ("t.txt", 2**40, ("compress", "model", "-o", "out", "--calibration", "t.txt"), 4),
        ("t.txt", 2**29, ("compress", "model", "-o", "out", "--calibration", "t.txt"), 4),
        ("t.txt", 2**40, ("eval", "model", "--text", "t.txt"), 4),
        ("t.csv", 2**40, ("eval", "model", "--sts", "t.csv"), 4),
        ("model/tokenizer.json", 2**40, ("generate", "model", "the"), 4),
        ("model/tokenizer_config.json", 2**25, ("generate", "model", "the"), 4),
        ("small/blr_layers.json", 2**40, ("inspect", "small"), 4),
        ("small/blr_manifest.json", 2**40, ("verify", "small"), 5),
    ],
)
def test_huge_files(
    name: str, size: int, command: tuple[str, ...], code: int, limited: Limited, model: Path, small: Path
) -> None:
    if name.startswith("small"):
        shutil.copytree(small, model.parent / "small")
    (model.parent / name).touch()
    os.truncate(model.parent / name, size)  # a sparse file
    check(limited.run(*command, cwd=model.parent), code, Path(name).name)


# --- Numbers of a configuration -------------------------------------------------------------------

LAYERS = [129, 20_000, 10**6, 10**30]
COMMANDS = {
    "plan": ("plan", "model"),
    "compress": ("compress", "model", "-o", "out"),
    "export": ("export", "model", "-o", "out"),
    "generate": ("generate", "model", "the"),
    "eval": ("eval", "model", "--text", "t.txt"),
}


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("command", COMMANDS)
def test_layers_that_are_not_there(command: str, layers: int, limited: Limited, model: Path) -> None:
    (model.parent / "t.txt").write_text(TEXT)
    spoil(model, "config.json", num_hidden_layers=layers)
    check(limited.run(*COMMANDS[command], cwd=model.parent), 4, "num_hidden_layers")


@pytest.mark.parametrize("layers", [5000, 20_000, 10**6])
def test_layers_of_a_plan_without_weights(layers: int, limited: Limited, model: Path) -> None:
    (model / "model.safetensors").unlink()
    spoil(model, "config.json", num_hidden_layers=layers)
    check(limited.run("plan", "model", cwd=model.parent), 4, "num_hidden_layers")


@pytest.mark.parametrize(
    ("values", "fragment"),
    [
        ({"hidden_size": 2**40}, "hidden_size"),
        ({"head_dim": 2**40}, "head_dim"),
        ({"vocab_size": 10**12}, "vocab_size"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings"),
        ({"text_config": {"encoder_layers": 10**7}}, "encoder_layers"),
        ({"depths": [2, 2, 10**6]}, "depths"),
        ({"vision": [{"num_experts": 10**9}]}, "num_experts"),
        ({"n_layer": 10**9}, "n_layer"),
        ({"model_type": "blr_blr_llama"}, "blr_blr_llama"),
        ({"model_type": "blr_nonesuch"}, "blr_nonesuch"),
        ({"_attn_implementation": "evil/kernel"}, "evil/kernel"),
        ({"text_config": {"_attn_implementation_internal": "evil/kernel@main"}}, "evil/kernel"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
    ],
)
def test_configurations_of_no_model(
    values: dict[str, Any], fragment: str, limited: Limited, model: Path
) -> None:
    spoil(model, "config.json", **values)
    check(limited.run("generate", "model", "the", cwd=model.parent), 4, fragment)


# --- Tokenizers ------------------------------------------------------------------------------------

DOUBLING = normalizers.Replace("a", "aa")
TOKENIZERS: dict[str, Tokenizer | str] = {
    "regex-backtracks": words_tokenizer(split=r"(a+)+$"),
    "regex-alternates": words_tokenizer(split=r"(a|a|aa)+b"),
    "normalizer-doubles-often": words_tokenizer(normalizer=normalizers.Sequence([DOUBLING] * 40)),
    "normalizer-doubles": words_tokenizer(normalizer=normalizers.Sequence([DOUBLING] * 9)),
    "normalizer-prepends": words_tokenizer(normalizer=normalizers.Prepend("a" * 100_000)),
    "not-json": "{",
    "empty": "",
    "list": "[]",
    "no-tokenizer": "{}",
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("command", ["compress", *slowly("export", "generate")])
@pytest.mark.parametrize("case", TOKENIZERS)
def test_tokenizers_that_explode(case: str, command: str, limited: Limited, model: Path) -> None:
    made, path = TOKENIZERS[case], model / "tokenizer.json"
    made.save(str(path)) if isinstance(made, Tokenizer) else path.write_text(made)
    # no work was done
    started = "import blr.compressor.workspace.scan as s\ns.scan_source = lambda *a: 1 / 0"
    ended = limited.run(*COMMANDS[command], cwd=model.parent, patch=started)
    check(ended, 4, "tokenizer.json")
    assert not (model.parent / "out").exists()


SMALL_FILES: dict[str, bytes] = {
    "not-json": b"{",
    "not-utf-8": b'{"a": "\xff"}',
    "nested": b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}",
    "nested-deeply": b"[" * 200_000,
    "list": b"[1]",
    "empty": b"",
}


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("command", ["compress", *slowly("export", "generate", "eval")])
@pytest.mark.parametrize("case", SMALL_FILES)
def test_small_files_that_are_broken(
    case: str, command: str, name: str, limited: Limited, model: Path
) -> None:
    (model / name).write_bytes(SMALL_FILES[case])
    (model.parent / "t.txt").write_text(TEXT)
    check(limited.run(*COMMANDS[command], cwd=model.parent), 4, name)


@pytest.mark.parametrize(
    "values",
    [{"max_new_tokens": -1}, {"cache_implementation": "none-such"}],
    ids=str,
)
def test_generation_defaults_that_no_loader_takes(
    values: dict[str, Any], limited: Limited, model: Path
) -> None:
    spoil(model, "generation_config.json", **values)
    check(limited.run(*COMMANDS["compress"], cwd=model.parent), 4, "generation_config.json")


# --- Recipes and globs -----------------------------------------------------------------------------

RECIPES: dict[str, str] = {
    "blank-lines": "\n" * 60_000 + "cf: 0.5\n",
    "blank-lines-of-spaces": "   \n" * 16_000 + "cf: 0.5\n",
    "comments": "# a\n\n" * 12_000 + "cf: 0.5\n",
    "blank-lines-and-a-directive": "\n" * 26 + "%YAML 1.1\n---\ncf: 2\n",
    "long-glob": "include: ['" + "[" * 30_000 + "']\n",
    "long-match": "rules:\n- {match: '" + "*a" * 15_000 + "', rank: 3}\n",
    "many-globs": "include: [" + "'*x*y*', " * 6000 + "a]\n",
    "many-rules": "rules:\n" + "- {match: '*a', rank: 3}\n" * 2000,
    "long-key": "a" * 60_000 + ": 2\n",
    "long-extends": "extends: " + "a" * 60_000 + "\n",
    "long-solver": "solver: " + "v" * 60_000 + "\n",
    "unclosed-quotes": 'cf: "' + "a " * 30_000,
    "folded": "gpu: >\n" + "  a\n\n" * 12_000 + "cf: 0.5\n",
    "question-marks": "? " * 30_000,
    "colons": ": " * 30_000,
}


@pytest.mark.parametrize("case", RECIPES)
def test_recipes_that_explode(case: str, limited: Limited, model: Path) -> None:
    (model.parent / "r.yaml").write_text(RECIPES[case])
    ended = limited.run("plan", "model", "-r", "./r.yaml", cwd=model.parent)
    check(ended, 3, "r.yaml")


@pytest.mark.parametrize(
    "glob", ["[" * 30_000, "*a" * 15_000, "[!" * 400, "*" * 513], ids=lambda g: g[:3]
)
@pytest.mark.parametrize("option", ["--include", "--exclude"])
def test_globs_that_explode(option: str, glob: str, limited: Limited, model: Path) -> None:
    check(limited.run("plan", "model", option, glob, cwd=model.parent), 2, option[2:])


PATTERNS = [
    "(" * 30_000,
    "(1,1,1,1)" + ("   " * 9 + "(1,1,1,1)") * 99 + "x",
    "(" + "9" * 10_000 + ",1,1,1)",
]


@pytest.mark.parametrize("pattern", PATTERNS, ids=["brackets", "gaps", "digits"])
def test_patterns_that_explode(pattern: str, limited: Limited, model: Path) -> None:
    command = ("plan", "model", "--method", "ks", "--pattern", pattern)
    check(limited.run(*command, cwd=model.parent), 2, "pattern")


def test_many_rules_for_many_layers_take_seconds(limited: Limited, model: Path) -> None:
    """The most rules, each as long as may be, over more layers than any model has."""
    (model / "model.safetensors").unlink()
    spoil(model, "config.json", num_hidden_layers=2000)
    rules = [f"- {{match: '*{'a' * 200}{number}*{'b' * 200}', rank: 3}}" for number in range(135)]
    (model.parent / "r.yaml").write_text("rules:\n" + "\n".join(rules) + "\n")
    ended = limited.run("plan", "model", "-r", "./r.yaml", cwd=model.parent)
    check(ended, 2, "matches no compressible layer")
