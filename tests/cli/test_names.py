"""Names, paths, prompts and locales of any kind: taken and shown escaped, or refused in one line."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from limited import Limited, refused

Run = Callable[..., subprocess.CompletedProcess[str]]

# --- Names and paths ------------------------------------------------------------------------------

NAMES = {
    "newline": b"model\n---\nlicense: evil",
    "escape": b"model\x1b[31m",
    "direction": "model\u202egnp.exe".encode(),
    "quotes": b"model'\"`$(x)",
    "japanese": "模型".encode(),
    "dashes": b"---",
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("locale", [{}, {"PYTHONIOENCODING": "ascii"}], ids=["utf-8", "ascii"])
@pytest.mark.parametrize("name", NAMES)
def test_names_of_folders(
    name: str, locale: dict[str, str], limited: Limited, dense: Path, tmp_path: Path
) -> None:
    """Every command takes them and prints them escaped; nothing of them reaches a header."""
    given = f"./{os.fsdecode(NAMES[name])}"
    shutil.copytree(dense, tmp_path / given)
    patch = "import sys\nsys.stdout.reconfigure(encoding='ascii', errors='strict')" if locale else ""
    for command in (
        ("compress", given, "-o", f"{given}.out"),
        ("inspect", f"{given}.out"),
        ("verify", f"{given}.out"),
        ("export", f"{given}.out", "-o", "exported"),
        ("plan", given),
        ("generate", given, "the", "--max-new-tokens", "2"),
    ):
        ended = limited.run(*command, cwd=tmp_path, patch=patch)
        assert ended.code == 0, ended.err
        assert all(line.isprintable() for line in (ended.out + ended.err).splitlines())
        assert "license: evil" not in ended.out.splitlines()
    for folder in (f"{given}.out", "exported"):
        card = (tmp_path / folder / "README.md").read_text("utf-8")
        header, rest = card.removeprefix("---\n").split("\n---\n", 1)
        keys = {line.partition(":")[0] for line in header.splitlines() if not line.startswith("- ")}
        assert keys == {"library_name", "tags"}
        assert rest.startswith("# ") and "\nlicense" not in rest


def test_names_that_are_no_text(limited: Limited, model: Path) -> None:
    """Libraries take names as text: such a folder is refused before anything is done."""
    given = os.fsdecode(b"./mod\xe9le")
    os.rename(model, model.parent / given)
    for command in (("compress", given), ("export", given, "-o", "out"), ("generate", given, "the")):
        refused(limited.run(*command, cwd=model.parent), 4, "no text in utf-8; rename")
    os.rename(model.parent / given, model)
    for name in ("compress", "export"):
        ended = limited.run(name, "model", "-o", given, cwd=model.parent)
        refused(ended, 5, "no text in this locale; choose another")


LONG = "a" * 5000
PATHS = {"long": LONG, "long-parts": "/".join(["a" * 200] * 30), "no-user": "~nosuchuser/x"}
TAKES_PATHS: dict[str, tuple[tuple[str, ...], int]] = {
    "compress": (("compress", "{}", "-o", "out"), 4),
    "output": (("compress", "model", "-o", "{}/out"), 5),
    "calibration": (("compress", "model", "-o", "out", "--calibration", "{}.txt"), 4),
    "recipe": (("compress", "model", "-o", "out", "-r", "{}.yaml"), 3),
    "recipe-name": (("recipes", "validate", "{}"), 3),
    "plan": (("plan", "{}"), 4),
    "export": (("export", "{}", "-o", "out"), 4),
    "generate": (("generate", "{}", "the"), 4),
    "text": (("eval", "model", "--text", "{}"), 4),
    "sts": (("eval", "model", "--sts", "{}"), 4),
    "inspect": (("inspect", "{}"), 4),
    "verify": (("verify", "{}"), 4),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("command", TAKES_PATHS)
def test_paths(command: str, path: str, limited: Limited, model: Path) -> None:
    arguments, code = TAKES_PATHS[command]
    filled = (argument.replace("{}", PATHS[path]) for argument in arguments)
    ended = limited.run(*filled, cwd=model.parent)
    refused(ended, code, PATHS[path][:8])
    assert len(ended.err) < 2100


# --- Prompts and encodings ------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [b"the \xff protocol", b"\xed\xa0\x80", b"\xc3"], ids=repr)
def test_prompts_that_are_no_text(prompt: bytes, limited: Limited, dense: Path) -> None:
    ended = limited.run("generate", dense, os.fsdecode(prompt), cwd=dense.parent)
    refused(ended, 2, "prompt")


def test_prompt_of_a_locale_without_its_characters(limited: Limited, dense: Path) -> None:
    """LC_ALL=C without UTF-8 mode gives a prompt as bytes in disguise; they are UTF-8 all the same."""
    disguised = "the é protocol".encode().decode("ascii", "surrogateescape")
    command = ("generate", dense, disguised, "--max-new-tokens", "2", "--format", "json")
    assert limited.run(*command, cwd=dense.parent).code == 0


def test_a_prompt_beyond_the_context_is_told_in_one_line(limited: Limited, tiny: Path) -> None:
    """Not in two, by the tokenizer, too."""
    ended = limited.run("generate", tiny, "hello " * 1500, cwd=tiny.parent)
    refused(ended, 9, "context of 1024")
    assert ended.err.count("\n") == 1, ended.err


@pytest.mark.parametrize(("text", "code", "said"), [("", 4, "t.txt: 0 tokens"), ("the", 7, "NaN")])
def test_a_text_without_tokens_is_told_before_weights_are_read(
    text: str, code: int, said: str, limited: Limited, model: Path
) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000] + b"\xff" * 1000)
    (model.parent / "t.txt").write_text(f"{text} " * 9)
    refused(limited.run("eval", "model", "--text", "t.txt", cwd=model.parent), code, said)


def test_calibration_with_half_a_character(limited: Limited, model: Path) -> None:
    (model.parent / "t.jsonl").write_text('{"text": "the \\ud800 protocol"}\n')
    command = ("compress", "model", "-o", "out", "--calibration", "t.jsonl")
    refused(limited.run(*command, cwd=model.parent), 4, "t.jsonl:1")


ASCII: dict[str, dict[str, str]] = {
    "C": {"LC_ALL": "C"},
    "C-without-utf-8": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "strict-ascii": {"LC_ALL": "POSIX", "PYTHONIOENCODING": "ascii:strict"},
}


@pytest.mark.parametrize("locale", ASCII)
def test_locales(locale: str, installed: Run, dense: Path, tmp_path: Path) -> None:
    """What the encoding of a stream has no bytes for is escaped; results are the same."""
    (tmp_path / "模型").symlink_to(dense)
    environment = {**os.environ, **ASCII[locale]}
    for command in (("plan", "--help"), ("recipes", "list"), ("plan", dense)):
        assert installed(*command, env=environment).returncode == 0
    result = installed("plan", "./模型", env=environment)
    if locale == "C-without-utf-8":
        assert result.returncode == 4 and "LC_ALL" in result.stderr
    else:
        assert result.returncode == 0
    assert result.stderr.isascii() and "bug" not in result.stderr
