"""The folder of a sweep: what others have put there is neither believed, nor written, nor removed."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from limited import Limited, refused
from state_files import NO_OBJECTS, Spoil, changed
from sweeping import FORKED

from blr.compressor.base.errors import OutputError
from blr.compressor.commands.sweep.folder import Folder, files_of

COMMON = {"texts": {"1": "a"}, "headers": "h"}
POINTS = {"dense": "", "svd": "1" * 64}
RECORD = {"perplexities": [2.5], "kl": [0.1], "bits": 3.0, "bytes": 9, "seconds": 1.0, "kept": False}
Make = Callable[[Path], object]


def listing(root: Path) -> list[tuple[str, int, int]]:
    """Every file below `root` with size and time, links not followed; the lock comes and goes."""
    found = [(path, path.lstat()) for path in sorted(root.rglob("*")) if path.name != "sweep.lock"]
    kept = [(path, status) for path, status in found if not stat.S_ISDIR(status.st_mode)]
    return [(str(path), status.st_size, status.st_mtime_ns) for path, status in kept]


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """A sweep whose point is done."""
    place = Folder(tmp_path / "out", COMMON, POINTS)
    with place.held(restart=False):
        place.write("points/svd.json", {**RECORD, "digest": "1" * 64})
        place.write("logs/svd.spent.json", {"seconds": 4.0})
        place.log("svd").write_text("said\n")
    return tmp_path / "out"


def use(folder: Path, restart: bool = False) -> None:
    """What a run does with what lies there."""
    place = Folder(folder, COMMON, POINTS)
    with place.held(restart):
        place.record("svd")
        place.spent("svd")


WRONG: dict[str, tuple[str, Spoil]] = {
    **{f"{file}-{kind}": (file, spoil) for file in ("points/svd.json", "logs/svd.spent.json")
       for kind, spoil in NO_OBJECTS.items()},
    **{f"sweep-{kind}": ("sweep.json", spoil) for kind, spoil in NO_OBJECTS.items()},
    "sweep-foreign": ("sweep.json", changed(about="notes of mine")),
    "sweep-common": ("sweep.json", changed(common=[1])),
    "sweep-made-list": ("sweep.json", changed(made=["svd"])),
    "sweep-made-path": ("sweep.json", changed(made={"../mine": "1"})),
    "sweep-made-number": ("sweep.json", changed(made={"svd": 1})),
    "record-text": ("points/svd.json", changed(bits="3")),
    "record-infinite": ("points/svd.json", changed(bits=float("inf"))),
    "record-negative": ("points/svd.json", changed(perplexities=[-1.0])),
    "record-bool": ("points/svd.json", changed(bytes=True)),
    "record-null": ("points/svd.json", changed(bits=None)),
    "record-more": ("points/svd.json", changed(mine=1)),
    "record-less": ("points/svd.json", changed(seconds=...)),
    "record-no-texts": ("points/svd.json", changed(perplexities=[])),
    "record-two-texts": ("points/svd.json", changed(perplexities=[2.0, 3.0])),
    "record-two-kl": ("points/svd.json", changed(kl=[0.1, 0.2])),
    "record-of-another-point": ("points/svd.json", changed(digest="2" * 64)),
    "spent-text": ("logs/svd.spent.json", changed(seconds="4")),
    "spent-negative": ("logs/svd.spent.json", changed(seconds=-4.0)),
    "spent-more": ("logs/svd.spent.json", changed(minutes=1)),
}  # fmt: skip


@pytest.mark.fast
@pytest.mark.parametrize("case", WRONG)
def test_state_that_no_sweep_wrote_is_one_line(case: str, begun: Path) -> None:
    use(begun)
    file, spoil = WRONG[case]
    spoil(begun / file)
    with pytest.raises(OutputError) as error:
        use(begun)
    said = str(error.value)
    assert Path(file).name.partition(".")[0] in said and said.isprintable() and len(said) < 600
    assert said.endswith(("the point is made again", "or choose another --output"))


def _links(path: Path) -> None:
    (path.parents[2] / "elsewhere").write_text("mine")
    path.symlink_to(path.parents[2] / "elsewhere")


def _link_to_folder(path: Path) -> None:
    shutil.move(path, path.parents[1] / "elsewhere")
    path.symlink_to(path.parents[1] / "elsewhere")


def _mine(path: Path) -> None:
    path.write_text("mine")


FOREIGN: dict[str, tuple[str, Make]] = {
    "record of mine": ("points/mine.json", _mine),
    "log of mine": ("logs/mine.log", _mine),
    "output of mine": ("outputs/mine", lambda path: (path.mkdir(), _mine(path / "notes.txt"))),
    "file among outputs": ("outputs/notes.txt", _mine),
    "other kind": ("logs/svd.txt", _mine),
    "scratch of mine": ("points/mine.json.0123456789ab.tmp", _mine),
    "link by our name": ("logs/svd.out", _links),
    "link by another": ("logs/mine.log", _links),
    "FIFO by our name": ("logs/svd.out", os.mkfifo),
    "folder by our name": ("logs/svd.out", os.mkdir),
    "link for a folder": ("points", _link_to_folder),
    "link for all outputs": ("outputs", _link_to_folder),
    "page of mine": ("sweep.html", _mine),
}


@pytest.mark.fast
@pytest.mark.parametrize("case", FOREIGN)
def test_begun_anew_it_refuses_what_others_put_there(case: str, begun: Path, tmp_path: Path) -> None:
    name, make = FOREIGN[case]
    make(begun / name)
    before = listing(tmp_path)
    with pytest.raises(OutputError, match="in the way"):
        use(begun, restart=True)
    assert listing(tmp_path) == before


@pytest.mark.fast
@pytest.mark.parametrize("name", [*files_of("new"), "outputs/new"])
def test_a_new_point_takes_no_ones_place(name: str, begun: Path, tmp_path: Path) -> None:
    """Its files would be appended to, replaced, or read as its record."""
    (begun / name).write_text("mine")
    before, place = listing(tmp_path), Folder(begun, COMMON, {**POINTS, "new": "2" * 64})
    with pytest.raises(OutputError, match="in the way, not made by this sweep"), place.held(False):
        pass
    assert listing(tmp_path) == before


@pytest.mark.fast
def test_begun_anew_it_removes_what_earlier_runs_have_listed(begun: Path) -> None:
    """Those of other points, and what a kill has left of a file, as well."""
    (begun / "points/svd.json.0123456789ab.tmp").write_text("{")
    place = Folder(begun, COMMON, {"dense": "", "blast": "3" * 64})
    with place.held(restart=False):
        assert place.made.keys() == {"dense", "svd", "blast"}
    with place.held(restart=True):
        assert place.made.keys() == {"dense", "blast"}
        assert not any((begun / "points").iterdir()) and not any((begun / "logs").iterdir())


@pytest.fixture
def swept(limited: Limited, dense: Path, tmp_path: Path) -> list[str]:
    """A sweep of one point that was done, and its command."""
    (tmp_path / "one.txt").write_text(" ".join(f"w{k * 3 % 40}" for k in range(80)))
    grid = ["--methods", "svd", "--cf", "2", "--plain", "none", "--eval", "one.txt", "--window", "16"]
    command = ["sweep", str(dense), "-o", "out", *grid, "--device", "cpu", "--keep"]
    done = limited.run(*command, cwd=tmp_path, patch=FORKED)
    assert done.code == 0, done.err
    return command


def test_an_output_of_another_recipe_is_no_point(
    swept: list[str], limited: Limited, dense: Path, tmp_path: Path
) -> None:
    """A BLAST under the name of a low rank would be recorded, shown, and removed, as that."""
    place, record = tmp_path / "out/outputs/svd-cf2", tmp_path / "out/points/svd-cf2.json"
    before = json.loads(record.read_text())
    shutil.move(place, tmp_path / "made")
    others = {"blast": ("--method", "blast"), "smaller": ("--method", "svd", "--cf", "3")}
    for name, options in others.items():
        done = limited.run("compress", dense, "-o", name, *options, "--device", "cpu", cwd=tmp_path)
        assert done.code == 0, done.err
        shutil.copytree(tmp_path / name, place)
        kept = listing(place)
        for more in ((), ("--restart",)):
            refused(
                limited.run(*swept, *more, cwd=tmp_path, patch=FORKED),
                *(5, "out/outputs/svd-cf2: in the way, not made by this sweep"),
            )
            assert listing(place) == kept and json.loads(record.read_text()) == before
        shutil.rmtree(place)
    shutil.move(tmp_path / "made", place)
    again = limited.run(*swept, cwd=tmp_path, patch=FORKED)
    assert again.code == 0 and "2 of 2 points are there already" in again.err
    assert limited.run(*swept, "--restart", cwd=tmp_path, patch=FORKED).code == 0


def test_what_a_point_said_is_written_through_no_link(
    swept: list[str], limited: Limited, tmp_path: Path
) -> None:
    (tmp_path / "mine").write_text("mine")
    log = tmp_path / "out/logs/svd-cf2.log"
    log.unlink()
    log.symlink_to(tmp_path / "mine")
    (tmp_path / "out/points/svd-cf2.json").unlink()
    refused(limited.run(*swept, cwd=tmp_path, patch=FORKED), 5, "svd-cf2.log: in the way")
    assert (tmp_path / "mine").read_text() == "mine"
