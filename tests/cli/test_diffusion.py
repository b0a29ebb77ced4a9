"""Commands that take no model of diffusers say so in a line."""

from __future__ import annotations

from pathlib import Path

import pytest
from diffusers_folders import save_diffusion
from limited import Limited, refused


@pytest.fixture(scope="module")
def folders(limited: Limited, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A dense model of diffusers, and a compressed one."""
    folder = tmp_path_factory.mktemp("diffusion")
    dense = save_diffusion(folder / "dense")
    done = limited.run("compress", dense, "--method", "svd", "-o", "out", "--no-check", cwd=folder)
    assert done.code == 0, done.err
    return {"dense": dense, "out": folder / "out"}


@pytest.mark.parametrize("which", ["dense", "out"])
@pytest.mark.parametrize("command", ["export", "heal", "eval", "generate"])
def test_refused(command: str, which: str, folders: dict[str, Path], limited: Limited) -> None:
    dense, given = folders["dense"], folders[which]
    more = {"export": ["-o", "e"], "heal": ["--teacher", dense, "-o", "h"], "generate": ["a text"]}
    more["eval"] = ["--text", Path(__file__)]
    done = limited.run(command, given, *more[command], cwd=dense.parent)
    refused(done, 4, "a model of diffusers")


@pytest.mark.parametrize("command", [["plan", "dense"], ["inspect", "out"], ["verify", "out"]])
def test_taken(command: list[str], folders: dict[str, Path], limited: Limited) -> None:
    done = limited.run(*command, cwd=folders["dense"].parent)
    assert done.code == 0, done.err
