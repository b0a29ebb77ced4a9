"""Any number of processes compresses to the same bytes, and finishes what another number began."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from limited import Limited
from ranks import SMALL, run_ranks, weights

CALIBRATED = ("--samples", "37", "--seq-len", "16", "--finish", "1", "--refit", "1")  # five batches
COMMANDS: dict[str, tuple[Any, ...]] = {
    "data-free": ("--method", "svd"),
    "svd": ("--method", "svd", "--calibration", "TEXT", *CALIBRATED),
    "blast": (
        "--method",
        "blast",
        "--blocks",
        "4",
        "--rounds",
        "4",
        "--calibration",
        "TEXT",
        *CALIBRATED,
    ),
    "self": ("--method", "monarch", "--calibration", "self", "--samples", "40", "--seq-len", "16"),
}
COUNTS = [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4, 7))]
# The second process dies: about to keep a layer or, where all fit layers together, between two
DIE = """
import os, signal
from blr.compressor.workspace.journal import Journal
store, stored = Journal.store, []
def dying(self, *arguments):
    if os.environ.get("RANK") == "1" and len(stored) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    stored.append(1)
    store(self, *arguments)
Journal.store = dying
from blr.compressor.fitting.factorize import Work
missing, asked = Work.missing, []
def dying_between(self, keys):
    if os.environ.get("RANK") == "1" and len(asked) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    asked.append(1)
    return missing(self, keys)
Work.missing = dying_between
"""


class Compressed:
    """What one process makes of a command, made when first asked for."""

    def __init__(self, limited: Limited, dense: Path, text: Path, folder: Path) -> None:
        self.limited, self.dense, self.text, self.folder = limited, dense, text, folder

    def command(self, name: str) -> list[Any]:
        given = [self.text if part == "TEXT" else part for part in COMMANDS[name]]
        return ["compress", self.dense, *given, "--device", "cpu", "-q", "-o", "out"]

    def weights(self, name: str) -> str:
        cwd = self.folder / name
        if not cwd.exists():
            cwd.mkdir()
            done = run_ranks(self.limited, 1, *self.command(name), cwd=cwd)
            assert done.code == 0, done.err
        return weights(cwd / "out")


@pytest.fixture(scope="module")
def alone(
    limited: Limited, dense: Path, text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Compressed:
    return Compressed(limited, dense, text, tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", [*list(COMMANDS)[:3], pytest.param("self", marks=pytest.mark.slow)])
def test_as_one(name: str, count: int, alone: Compressed, tmp_path: Path) -> None:
    done = run_ranks(alone.limited, count, *alone.command(name), cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.out.count("output:") == 1 and "blr: error" not in done.err
    assert weights(tmp_path / "out") == alone.weights(name)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", ["data-free", "blast"])
def test_one_finishes_what_several_began(
    name: str, count: int, alone: Compressed, tmp_path: Path
) -> None:
    command = alone.command(name)
    killed = run_ranks(alone.limited, count, *command, cwd=tmp_path, patch=SMALL + DIE)
    assert killed.code == 9 and killed.out == "", killed.err
    assert killed.err.count("another process of this run is gone") == 1
    assert list((tmp_path / "out.blr-partial" / "journal").glob("*.safetensors"))
    done = run_ranks(alone.limited, 1, *command, cwd=tmp_path)
    assert done.code == 0, done.err
    assert weights(tmp_path / "out") == alone.weights(name)


def test_a_finished_run_is_noticed_by_all(alone: Compressed, tmp_path: Path) -> None:
    """Killed before the last rename: the first makes up for it, and the others have nothing to do."""
    die = "from blr.compressor.workspace.workspace import Workspace\nimport os\n" + (
        "Workspace.commit = lambda self: os._exit(77)\n"
    )
    command = alone.command("data-free")
    assert run_ranks(alone.limited, 1, *command, cwd=tmp_path, patch=SMALL + die).code == 77
    done = run_ranks(alone.limited, 2, *command, cwd=tmp_path, patch=SMALL + "import torch\n")
    assert done.code == 0, done.err
    assert weights(tmp_path / "out") == alone.weights("data-free")
