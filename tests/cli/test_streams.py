"""Standard output that is closed, full or a pipe whose reader left, for every command; and what is said
on a standard error that nobody reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from killer import Killer

from blr.compressor.workspace.manifest import read_manifest, verify_files

COMMANDS: dict[str, tuple[str, ...]] = {
    "help": ("--help",),
    "help of compress": ("compress", "--help"),
    "version": ("--version",),
    "recipes list": ("recipes", "list"),
    "recipes show": ("recipes", "show", "llama-7b-blast"),
    "recipes validate": ("recipes", "validate", "llama-7b-blast", "--format", "json"),
    "plan": ("plan", "tiny", "--all"),
    "plan, json": ("plan", "tiny", "--format", "json"),
    "compress": ("compress", "tiny", "--quantize", "int8", "-o", "out", "-q"),
    "compress, json": ("compress", "tiny", "--quantize", "int8", "-o", "out", "-q", "--format", "json"),
    "export": ("export", "tiny", "-o", "out", "-q"),
    "inspect": ("inspect", "made"),
    "verify": ("verify", "made"),
    "eval": ("eval", "tiny", "--text", "text.txt", "--window", "32", "-q"),
    "generate": ("generate", "tiny", "The protocol is", "--max-new-tokens", "4"),
    "generate, json": ("generate", "tiny", "The", "--max-new-tokens", "4", "--format", "json"),
    "refused": ("verify", "tiny", "--format", "json"),
}


@pytest.fixture(scope="module")
def made(killer: Killer, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the commands above name."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "text.txt").write_text("The protocol is what two computers agree about. " * 9)
    (folder / "tiny").symlink_to(tiny)
    assert killer.run("compress", "tiny", "--quantize", "int8", "-o", "made", "-q", cwd=folder).code == 0
    return folder


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    for path in made.iterdir():
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["closed", "full", "left"])
@pytest.mark.parametrize("command", COMMANDS)
def test_results_that_nobody_gets(command: str, kind: str, killer: Killer, place: Path) -> None:
    """6 says so, 141 tells a reader that left, as everywhere; a refusal keeps its own code."""
    asked = COMMANDS[command]
    done = killer.run(*asked, cwd=place, stdout=kind)
    expected = {"closed": (6,), "full": (6,), "left": (141,)}[kind]
    if command == "refused":
        expected = (6,) if kind == "closed" else (5,)
    assert done.code in expected, done.stderr
    assert "Traceback" not in done.stderr and "bug" not in done.stderr
    if done.code == 6:
        assert done.stderr.splitlines()[-1].startswith("blr: error: standard output: ")
    output = place / "out"
    if "-o" in asked:
        assert output.exists() == (kind != "closed")
        assert not list(place.glob("out.blr-*"))
    if output.exists():
        assert not verify_files(output, read_manifest(output))


@pytest.mark.parametrize("command", ["plan, json", "inspect", "verify", "eval", "compress"])
def test_results_on_a_full_disk_are_told_all_the_same(command: str, killer: Killer, place: Path) -> None:
    whole = killer.run(*COMMANDS[command], cwd=place)
    assert whole.code == 0 and whole.stdout
    shutil.rmtree(place / "out", ignore_errors=True)
    told = killer.run(*COMMANDS[command], cwd=place, stdout="full").stderr.splitlines()
    steady = [line for line in whole.stdout.splitlines() if not line.startswith(("time", "output"))]
    assert [line for line in steady if line not in told] == []


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", ["closed", "full", "left"])
@pytest.mark.parametrize("command", ["plan", "compress, json", "export", "generate"])
def test_talk_that_nobody_hears_stops_nothing(
    command: str, kind: str, killer: Killer, place: Path
) -> None:
    whole = killer.run(*COMMANDS[command], cwd=place)
    shutil.rmtree(place / "out", ignore_errors=True)
    done = killer.run(*COMMANDS[command], cwd=place, stderr=kind)
    assert done.code == whole.code == 0
    if "--format" in COMMANDS[command]:
        assert json.loads(done.stdout).keys() == json.loads(whole.stdout).keys()
    else:
        assert len(done.stdout.splitlines()) == len(whole.stdout.splitlines())


@pytest.mark.parametrize("kind", ["closed", "full", "left"])
def test_an_error_that_nobody_hears_keeps_its_code(kind: str, killer: Killer, place: Path) -> None:
    done = killer.run("verify", "tiny", cwd=place, stderr=kind)
    assert done.code == 5 and done.stdout == ""
