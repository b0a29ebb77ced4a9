"""Variables of the environment that libraries cannot read: a line names them, never a bug of ours."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from limited import Limited, refused
from running import Run

from blr.compressor.base.variables import wrong_variable

SECONDS = ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT")


@pytest.mark.parametrize("value", ["60s", "1.5", "", " ", "-1", "1_0", "\u0661", "9" * 5000, "none"])
@pytest.mark.parametrize("name", SECONDS)
def test_seconds_of_the_hubs_client(name: str, value: str, limited: Limited, tmp_path: Path) -> None:
    for command in (("verify", "out"), ("plan", "out"), ("eval", "out", "--text", "t.txt")):
        ended = limited.run(*command, cwd=tmp_path, env={name: value})
        refused(ended, 2, f"{name} is ")
        assert len(ended.err) < 300


@pytest.mark.parametrize("name", SECONDS)
def test_seconds_that_are_some(name: str, limited: Limited, small: Path, tmp_path: Path) -> None:
    for value in ("0", "60"):
        assert limited.run("verify", small, cwd=tmp_path, env={name: value}).code == 0


# Read as torch, numpy, tqdm and transformers are imported, or run
LIBRARIES = {
    "NUMPY_MADVISE_HUGEPAGE": "yes",
    "TQDM_NCOLS": "wide",
    "COMPILE_STROBELIGHT_SAMPLE_RATE": "often",
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_what_a_library_does_not_take(name: str, installed: Run, dense: Path) -> None:
    environment = {**os.environ, name: LIBRARIES[name]}
    done = installed("generate", dense, "w1", "--max-new-tokens", "2", env=environment)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2, done.stderr
    assert (
        last.startswith(f"blr: error: {name} is {LIBRARIES[name]!r}") and "Traceback" not in done.stderr
    )


def test_the_number_of_processes(limited: Limited, dense: Path, tmp_path: Path) -> None:
    """We take what is no number for one process, transformers does not."""
    for value in ("many", "2x", "1.5"):
        command = ("generate", dense, "w1", "--max-new-tokens", "2")
        ended = limited.run(*command, cwd=tmp_path, env={"WORLD_SIZE": value})
        assert ended.code in (0, 2) and "bug" not in ended.err, ended.err
        assert ended.code == 0 or "WORLD_SIZE is " in ended.err


def test_errors_of_something_else_name_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "mine")
    for error in (ValueError("shapes differ"), KeyError("mine"), RuntimeError("no 'mine' there")):
        try:
            raise error
        except Exception as raised:
            assert wrong_variable(raised, foreseen=False) is None
    refused_value = ValueError("invalid literal for int() with base 10: 'Mine'")
    for error in (refused_value, ImportError("cannot be imported")):
        error.__cause__ = refused_value if error is not refused_value else None
        said = wrong_variable(error, foreseen=False)
        assert said is not None and said.startswith("MINE is 'mine', which a library does not take (inv")
        assert wrong_variable(error, foreseen=True) is None
