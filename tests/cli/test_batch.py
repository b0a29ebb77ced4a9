"""`scripts/batch_compress.sh`: goes past failures, keeps what is there, resumes, ends with a table."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE
from pico import save_pico

INSTALLED = Path(sys.executable).parent
QUICK = """#!/usr/bin/env python3
import json, os, pathlib, sys, time
command, *rest = sys.argv[1:]
top = pathlib.Path(__file__).parents[1]
with open(top / "asked", "a") as file:
    print(command, *rest, sep="|", file=file)
if command == "compress":
    if rest[0].endswith("slow") and not (top / "go").exists():
        open(top / "waits", "w").close()
        time.sleep(600)
    os.makedirs(rest[rest.index("--output") + 1])
    print(json.dumps({"cf": 2.0, "factor": 1.5, "seconds": 0.1}))
if command == "eval":
    found = (top / "text").exists()
    print(json.dumps({"perplexity": 7.0} if found else {"error": "no text", "exit_code": 4}))
    sys.exit(0 if found else 4)
"""
SCRIPT = Path(__file__).parents[2] / "scripts" / "batch_compress.sh"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pico("llama", tmp_path_factory.mktemp("batch") / "small")


def batch(
    folder: Path, *arguments: object, blr: Path = INSTALLED, **variables: str
) -> subprocess.CompletedProcess[str]:
    """The script with the `blr` that lies in a folder."""
    return subprocess.run(
        ["bash", str(SCRIPT), *map(str, arguments)],
        **{"cwd": folder, "capture_output": True, "text": True, "timeout": PATIENCE},
        env={**os.environ, **variables, "PATH": f"{blr}{os.pathsep}{os.environ['PATH']}"},
    )


@pytest.fixture
def quick(tmp_path: Path) -> Path:
    """A folder with a `blr` that does nothing but note what it was asked, in ../asked. For one called
    "slow" it opens the pipe ../waits and waits for a signal; evaluations succeed where ../text is."""
    folder = tmp_path / "a bin"
    folder.mkdir()
    (folder / "blr").write_text(QUICK)
    (folder / "blr").chmod(0o755)
    return folder


def names(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Combination to state, of the table."""
    rows = (line.split("  ") for line in done.stdout.splitlines()[1:])
    return {row[0]: next(filter(None, row[1:])).strip() for row in rows}


@pytest.mark.slow
def test_failures_are_noted_and_the_rest_is_done(dense: Path, tmp_path: Path) -> None:
    asked = (tmp_path / "out", f"{dense} {tmp_path}/none", "svd", "1.5", "--no-check", "-q")
    done = batch(tmp_path, *asked)
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert (done.returncode, len(rows)) == (1, 3), done.stderr
    assert rows["none-svd-cf1.5"] == ["failed", "(4)"] and rows["small-svd-cf1.5"][0] == "done"
    assert "none-svd-cf1.5 failed (code 4)" in done.stderr and "no such folder" in done.stderr
    kept = (tmp_path / "out" / "small-svd-cf1.5" / "model.safetensors").stat()
    (tmp_path / "none").symlink_to(dense)  # what failed for want of a model
    again = batch(tmp_path, *asked)
    assert again.returncode == 0 and again.stdout.count(" done ") == 2, again.stderr
    after = (tmp_path / "out" / "small-svd-cf1.5" / "model.safetensors").stat()
    assert (kept.st_ino, kept.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


@pytest.mark.slow
def test_one_of_an_array_and_the_table(dense: Path, tmp_path: Path) -> None:
    asked = (tmp_path / "out", dense, "svd monarch", "1.5 2", "--no-check", "-q")
    assert batch(tmp_path, *asked, BLR_COUNT="1").stdout.strip() == "4"
    done = batch(tmp_path, *asked, BLR_ONLY="2")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    states = [line.split()[1] for line in batch(tmp_path, *asked, BLR_TABLE="1").stdout.splitlines()]
    assert states == ["state", "missing", "missing", "done", "missing"]
    assert batch(tmp_path).returncode == 2


def test_names_with_spaces_and_names_that_are_the_same(quick: Path, tmp_path: Path) -> None:
    model = tmp_path / "my models" / "a b"
    model.mkdir(parents=True)
    done = batch(tmp_path, "an out", model, "svd ks", "2", "--samples", "8", blr=quick)
    assert (done.returncode, names(done)) == (0, {"a b-svd-cf2": "done", "a b-ks-cf2": "done"})
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[0].startswith(f"compress|{model}|--method|svd|--cf|2|--output|an out/a b-svd-cf2|")
    assert asked[0].endswith("|--samples|8")
    done = batch(tmp_path, "an out", f"{model}\nwho/x", "svd", "2", blr=quick)
    assert list(names(done)) == ["a b-svd-cf2", "x-svd-cf2"]
    done = batch(tmp_path, "out", "who/x them/x", "svd", "2", blr=quick)
    assert done.returncode == 2 and "two combinations are called x-svd-cf2" in done.stderr


@pytest.mark.parametrize("number", ["2", "-1", "x"])
def test_a_number_that_no_combination_has_is_refused(number: str, quick: Path, tmp_path: Path) -> None:
    """As of an array that is longer than the list: a task that did nothing would look done."""
    done = batch(tmp_path, "out", "who/x", "svd blast", "2", blr=quick, BLR_ONLY=number)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"BLR_ONLY={number}, expected a number from 0 to 1" in done.stderr
    assert not (tmp_path / "asked").exists()


def test_a_list_of_nothing_is_refused(quick: Path, tmp_path: Path) -> None:
    done = batch(tmp_path, "out", "who/x", "", "2", blr=quick)
    assert done.returncode == 2 and "no combination" in done.stderr


def test_one_of_an_array_is_made_alone(quick: Path, tmp_path: Path) -> None:
    done = batch(tmp_path, "out", "who/x", "svd blast", "2", blr=quick, BLR_ONLY="1")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    (asked,) = (tmp_path / "asked").read_text().splitlines()
    assert asked.startswith("compress|who/x|--method|blast|")


def test_an_evaluation_that_failed_is_tried_again(quick: Path, tmp_path: Path) -> None:
    asked = (tmp_path, "out", "who/x", "svd", "2")
    done = batch(*asked, blr=quick, BLR_EVAL="text")
    assert (done.returncode, names(done)) == (1, {"x-svd-cf2": "failed (4)"})
    (tmp_path / "text").touch()
    done = batch(*asked, blr=quick, BLR_EVAL="text")
    assert (done.returncode, names(done)) == (0, {"x-svd-cf2": "done"}) and "7.000" in done.stdout
    asked_for = [line.split("|")[0] for line in (tmp_path / "asked").read_text().splitlines()]
    assert asked_for == ["compress", "eval", "verify", "eval"]


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_run_and_ends_the_batch(
    which: signal.Signals, quick: Path, tmp_path: Path
) -> None:
    """As Slurm sends it, to the script alone; the same command goes on."""
    os.mkfifo(tmp_path / "waits")
    command = ["bash", str(SCRIPT), "out", "who/a who/slow who/b", "svd", "2"]
    environment = {**os.environ, "PATH": f"{quick}{os.pathsep}{os.environ['PATH']}"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes) as running:
        (tmp_path / "waits").read_text()  # until it opens that
        running.send_signal(which)
        said = running.communicate(timeout=PATIENCE)[1]
    assert running.returncode == 128 + which and "the same command goes on" in said
    assert not (tmp_path / "out" / "b-svd-cf2").exists()
    (tmp_path / "go").touch()
    done = batch(tmp_path, *command[2:], blr=quick)
    assert done.returncode == 0 and set(names(done).values()) == {"done"}
    assert len(names(done)) == 3
