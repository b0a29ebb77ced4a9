"""`--gpus N`: one process starts the others, speaks for them, and none outlives it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from limited import Limited, refused
from patience import PATIENCE
from ranks import weights

# The first process writes down the others' numbers and, once it has kept a layer, does something
THEN = """
import os, signal
from blr.compressor.workspace.journal import Journal
from blr.compressor.cli.signals import Crew
start, store = Crew._start, Journal.store
def started(self, *arguments):
    member = start(self, *arguments)
    members.append(member.pid)
    open("members", "a").write(f"{member.pid}\\n")
    return member
def stored(self, *arguments):
    store(self, *arguments)
    DO
members = []
Crew._start, Journal.store = started, stored
"""
# In processes that were started so: every fit fails
FAILING = """
import os
if "BLR_PARENT" in os.environ:
    from blr.compressor.base.errors import NumericsError
    from blr.compressor.fitting import factorize
    def fail(weight, job):
        raise NumericsError(f"{job.layer.module}: spoilt")
    factorize.factorize = fail
"""


PAUSE = 0.05  # seconds between looks at a process


def command(dense: Path, *more: object) -> list[str]:
    return ["compress", str(dense), "--device", "cpu", "-q", "-o", "out", *map(str, more)]


def assert_gone(folder: Path) -> None:
    """The members end with the first, a moment later at most."""
    tries = int(PATIENCE / PAUSE)
    for pid in (folder / "members").read_text().split():
        while os.path.exists(f"/proc/{pid}") and _state(pid) != "Z":
            tries -= 1
            assert tries > 0, f"process {pid} is still there"
            time.sleep(PAUSE)


def _state(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("then", "code", "said"),
    [
        (
            "os.kill(members[0], signal.SIGKILL); signal.pause()",
            9,
            "process 1 of 2 was ended by SIGKILL",
        ),
        ("os.kill(os.getpid(), signal.SIGINT); signal.pause()", 130, "stopped by SIGINT"),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
    ],
    ids=["a member dies", "Ctrl-C", "the first dies"],
)
def test_an_end_is_the_end_of_all(
    then: str, code: int, said: str, limited: Limited, dense: Path, tmp_path: Path
) -> None:
    patch = THEN.replace("DO", then)
    ended = limited.run(*command(dense, "--gpus", "2"), cwd=tmp_path, patch=patch)
    assert (ended.code, ended.out) == (code, ""), ended.err
    assert said in ended.err and ended.err.count("\n") == bool(said)
    if said:
        assert "resume with: blr compress" in ended.err
    assert_gone(tmp_path)
    alone = limited.run(*command(dense), cwd=tmp_path)  # resumes
    assert alone.code == 0, alone.err


def test_two_as_one_and_their_errors(limited: Limited, dense: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(FAILING)
    spoilt = limited.run(*command(dense, "--gpus", "2"), cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    refused(spoilt, 7, "spoilt")
    assert spoilt.out == "" and spoilt.err.count("\n") == 1
    done = limited.run(*command(dense, "--gpus", "2"), cwd=tmp_path)
    assert done.code == 0 and done.out.count("output:") == 1 and done.err == "", done.err
    assert limited.run(*command(dense)[:-1], "alone", cwd=tmp_path).code == 0
    assert weights(tmp_path / "out") == weights(tmp_path / "alone")


def test_under_a_launcher_it_is_refused(limited: Limited, dense: Path, tmp_path: Path) -> None:
    environment = {"WORLD_SIZE": "2", "RANK": "0"}
    ended = limited.run(*command(dense, "--gpus", "2"), cwd=tmp_path, env=environment)
    refused(ended, 2, "leave it out under a launcher")
