"""`blr sweep`: every point is a command, what fails is one line, and a killed sweep goes on."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from limited import Limited, refused
from safetensors.torch import load_file, save_file
from sweeping import FORKED

from blr.compressor.base.errors import OutputError, UsageError
from blr.compressor.commands.sweep import chain
from blr.compressor.commands.sweep.chain import Command, run_chains
from blr.compressor.commands.sweep.folder import Folder
from blr.compressor.commands.sweep.page import (
    MadePoint,
    SweepResult,
    frontier,
    over_seeds,
    share_of_plain,
    table,
)
from blr.compressor.commands.sweep.run import Grid, listed, points_of

DYING = """
import signal
kept = folder.Folder.write
def write(self, name, content):
    kept(self, name, content)
    if name == "points/svd-cf2.json":
        os.kill(os.getpid(), signal.SIGKILL)
folder.Folder.write = write
"""
OTHERWISE = """
from blr.compressor.commands.sweep.chain import PointChain
ended = PointChain.ended
PointChain.ended = lambda self, code: ended(self, 7 if self.name == "svd-cf600" else code)
"""


@pytest.fixture
def arguments(dense: Path, tmp_path: Path) -> list[str]:
    """A sweep of two points that can be made and one that cannot, judged by two texts."""
    for n, name in enumerate(("one", "two")):
        (tmp_path / f"{name}.txt").write_text(" ".join(f"w{k * (n + 3) % 40}" for k in range(80)))
    texts = ["--eval", "one.txt", "--eval", "two.txt"]
    grid = ["--methods", "svd", "--cf", "2,500", "--plain", "int4", "--group", "32"]
    return ["sweep", str(dense), "-o", "out", *texts, *grid, "--device", "cpu", "--window", "16"]


def _read(folder: Path) -> dict[str, object]:
    return json.loads((folder / "out/sweep.json").read_text())


def test_a_killed_sweep_goes_on_and_a_failing_point_is_a_line(
    limited: Limited, arguments: list[str], tmp_path: Path
) -> None:
    killed = limited.run(*arguments, cwd=tmp_path, patch=FORKED + DYING)
    assert killed.code == -9
    made = tmp_path / "out/points/svd-cf2.json"
    before = made.stat().st_mtime_ns
    done = limited.run(*arguments, "--jobs", "2", cwd=tmp_path, patch=FORKED)
    assert done.code == 0, done.err
    assert made.stat().st_mtime_ns == before
    found = _read(tmp_path)
    assert [point["name"] for point in found["points"]] == ["int4", "svd-cf2"]
    assert [point["name"] for point in found["failed"]] == ["svd-cf500"]
    assert done.out.count("failed: svd-cf500: cf 500 cannot be met") == 1
    assert "blr compress" in done.out and "--method dense --quantize int4" in done.out
    assert all(len(point["losses"]) == 2 and point["bits"] > 1 for point in found["points"])
    assert all(len(point["kl"]) == 2 and min(point["kl"]) > 0 for point in found["points"])
    assert not any((tmp_path / "out/outputs").iterdir())  # only figures are kept
    ElementTree.fromstring((tmp_path / "out/sweep.html").read_text().partition("\n")[2])
    again = limited.run(*arguments, "--format", "json", cwd=tmp_path, patch=FORKED)
    assert json.loads(again.out)["points"] == found["points"]


def test_what_a_sweep_was_made_of_is_known_by_what_it_holds(
    limited: Limited, arguments: list[str], tmp_path: Path
) -> None:
    """Figures of other weights, or of texts in another order, would be shown as those of these."""
    swaps = {"2,500": "2", "int4": "none", "--group": "--seed", "32": "0", "out": str(tmp_path / "out")}
    model, few = tmp_path / "model", [swaps.get(part, part) for part in arguments]
    shutil.copytree(few[1], model)
    few[1] = "model"
    assert limited.run(*few, cwd=tmp_path, patch=FORKED).code == 0

    def refuse(line: list[str], code: int, said: str) -> None:
        refused(limited.run(*line, cwd=tmp_path, patch=FORKED), code, said)

    swapped = [{"one.txt": "two.txt", "two.txt": "one.txt"}.get(part, part) for part in few]
    refuse(swapped, 5, "other settings (texts.1 has changed")
    twice = [part.replace("two.txt", "./one.txt") for part in few]
    refuse(twice, 2, "--text one.txt: the same text as one.txt; give every text once")
    elsewhere = [f"../{part}" if part in ("model", "one.txt", "two.txt") else part for part in few]
    (tmp_path / "inside").mkdir()
    again = limited.run(*elsewhere, "--offline", cwd=tmp_path / "inside", patch=FORKED)
    assert "2 of 2 points are there already" in again.err
    stored = model / "model.safetensors"
    save_file({name: 2 * tensor for name, tensor in load_file(stored).items()}, stored, {"format": "pt"})
    refuse(few, 5, "other settings (weights has changed")


def test_checkpoints_are_kept_where_that_is_asked_for_once(
    limited: Limited, arguments: list[str], tmp_path: Path
) -> None:
    few = [{"2,500": "2", "int4": "none", "--group": "--seed", "32": "0"}.get(p, p) for p in arguments]
    kept = tmp_path / "out/outputs/svd-cf2"
    for more, there in (((), False), (("--keep",), True), ((), True)):
        assert limited.run(*few, *more, cwd=tmp_path, patch=FORKED).code == 0
        assert kept.exists() is there, more


@pytest.mark.parametrize(("patch", "code"), [("", 2), (OTHERWISE, 9)], ids=["one", "several"])
def test_a_sweep_without_a_point_ends_with_the_code_that_all_have(
    patch: str, code: int, limited: Limited, arguments: list[str], tmp_path: Path
) -> None:
    others = {"2,500": "500,600", "int4": "none", "--group": "--seed", "32": "0"}
    hopeless = [others.get(part, part) for part in arguments]
    ended = limited.run(*hopeless, cwd=tmp_path, patch=FORKED + patch)
    refused(ended, code, "none of 2 points could be made; mend what out/logs say")
    assert {point["code"] for point in _read(tmp_path)["failed"]} == ({2} if code == 2 else {2, 7})


def test_a_dense_model_that_cannot_be_judged_ends_a_sweep_before_its_points(
    limited: Limited, arguments: list[str], tmp_path: Path
) -> None:
    too_long = limited.run(*arguments, "--window", "4096", cwd=tmp_path, patch=FORKED)
    refused(too_long, 9, "the dense model cannot be judged: window 4096 is longer than the model's")
    assert [path.name for path in (tmp_path / "out/logs").glob("*.log")] == ["dense.log"]


def test_what_is_compressed_already_is_refused_before_anything_runs(
    limited: Limited, arguments: list[str], tmp_path: Path
) -> None:
    source, given = arguments[1], ("--method", "svd", "--cf", "1.5", "--device", "cpu")
    assert limited.run("compress", source, "-o", "small", *given, cwd=tmp_path).code == 0
    again = ["small" if part == source else part for part in arguments]
    refused(limited.run(*again, cwd=tmp_path, patch=FORKED), 4, "already compressed by blr")
    assert not (tmp_path / "out").exists()


def test_a_stopped_sweep_says_how_to_go_on(
    limited: Limited, arguments: list[str], tmp_path: Path
) -> None:
    stopping = "import signal; chain.start = lambda *_: os.kill(os.getpid(), signal.SIGTERM)"
    ended = limited.run(*arguments, cwd=tmp_path, patch=FORKED + stopping)
    assert ended.code == 143
    assert "finished points are kept in out; resume with: blr sweep" in ended.err


class Failing:
    """A chain whose second command cannot be made."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.given = folder, 0

    def command(self) -> Command:
        self.given += 1
        if self.given > 1:
            raise ValueError("no second one")
        return Command(("true",), self.folder / "out", self.folder / "log")

    def ended(self, code: int) -> None:
        pass

    def stopped(self) -> None:
        self.given = 0


class Endless(Failing):
    def command(self) -> Command:
        return Command(("sleep", "infinity"), self.folder / "out", self.folder / "log")


def test_chains_that_are_left_leave_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def start(command: Command, environ: dict[str, str], alive: int) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(command.arguments))
        return started[-1]

    monkeypatch.setattr(chain, "start", start)
    endless = Endless(tmp_path)
    endless.given = 1
    with pytest.raises(ValueError, match="no second one"):
        run_chains([endless, Failing(tmp_path)], [{}, {}])
    assert endless.given == 0, "told that it was stopped"
    assert [process.returncode for process in started] == [-9, 0]  # known of those waited for alone


def test_seconds_of_a_point_are_those_of_all_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run finds what the first has compressed: its own time would flatter the point."""
    times = iter((0.0, 5.0, 100.0, 107.0))
    monkeypatch.setattr(chain.time, "monotonic", lambda: next(times))
    place = Folder(tmp_path / "out", {"model": "m"}, {"svd": "1"})
    with place.held(restart=False):
        for spent in (5.0, 12.0):
            run = chain.PointChain(place, "svd", "m", ("--method", "svd"), ())
            assert run.command() is not None
            run.stopped()
            assert place.spent("svd") == spent


def test_a_folder_of_something_else_is_left_alone(
    limited: Limited, arguments: list[str], tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("mine")
    refused(limited.run(*arguments, cwd=tmp_path), 5, "no sweep of blr")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]
    refused(limited.run(*arguments, "--cf", "2,2", cwd=tmp_path), 2, "svd-cf2 twice")
    dense = limited.run(*arguments, "--cf", "2", "--methods", "dense", cwd=tmp_path)
    refused(dense, 2, "the line of --plain")


def test_it_is_in_no_output(limited: Limited, arguments: list[str], tmp_path: Path) -> None:
    """Which would not verify any more."""
    few = ("--method", "dense", "--quantize", "int4", "--group", "32", "--device", "cpu")
    assert limited.run("compress", arguments[1], "-o", "out", *few, cwd=tmp_path).code == 0
    inside = ["out/inside" if part == "out" else part for part in arguments]
    refused(limited.run(*inside, cwd=tmp_path, patch=FORKED), 5, "an output of blr, which")
    assert limited.run("verify", "out", cwd=tmp_path).code == 0


def test_a_second_sweep_leaves_alone_what_the_first_one_has(tmp_path: Path) -> None:
    place, other = (Folder(tmp_path / "out", {"model": name}, {"svd": "1"}) for name in "mn")
    with place.held(restart=False):
        place.write("points/svd.json", "{}")
        for second in (place, other):
            with pytest.raises(OutputError, match="another blr run"), second.held(restart=True):
                pass
        assert (tmp_path / "out/points/svd.json").exists()
    with other.held(restart=True):
        assert not list((tmp_path / "out/points").iterdir())
        other.write("points/svd.json", "{}")
    with (
        pytest.raises(OutputError, match=r'other settings .model was "n", now "m"'),
        place.held(restart=False),
    ):
        pass


def test_a_sweep_that_made_nothing_is_in_no_ones_way(tmp_path: Path) -> None:
    """One whose text was too short, say: the next has another."""
    for common in ({"model": "m"}, {"model": "n"}):
        with Folder(tmp_path / "out", common).held(restart=False):
            assert json.loads((tmp_path / "out/sweep.json").read_bytes())["common"] == common


def test_the_grid_combines_what_belongs_together() -> None:
    grid = Grid(("svd", "blast"), (2.0,), ("none", "int8"), ("int2",), (8,), ("int3",), (0.0, 5.0))
    found = points_of(grid, {"blocks": 4, "group": 64, "rounds": 9}, calibrated=False)
    names = [point.name for point in found if not point.heal]
    assert names == [
        *("int3", "svd-cf2", "svd-cf2-int8", "blast-cf2", "blast-cf2-int8"),
        *("int2-svd-r8", "int2-blast-r8"),
    ]
    assert len(found) == 2 * len(names)
    by_name = {point.name: point.recipe for point in found}
    assert by_name["int2-blast-r8-heal5"].blocks == 4 and by_name["svd-cf2"].blocks is None
    assert by_name["int3"].quantize == "int3" and by_name["int3"].group == 64
    assert by_name["svd-cf2"].group is None and by_name["blast-cf2"].rounds == 9


def test_points_of_several_seeds_are_one_with_its_spread() -> None:
    points = points_of(Grid(("svd",), (2.0,), seeds=(0, 7)), {}, calibrated=False)
    assert [(point.name, point.setting) for point in points] == [
        ("svd-cf2-seed0", "svd-cf2"),
        ("svd-cf2-seed7", "svd-cf2"),
    ]
    assert [point.recipe.seed for point in points] == [0, 7]
    made = [
        replace(_found(f"a-seed{n}", 2.0, 0.1 + n / 10, 0.5), commands=(f"blr {n}",)) for n in (0, 1)
    ]
    one = over_seeds(made, "a")
    assert one.losses == pytest.approx((0.15, 0.5)) and one.spread == pytest.approx((0.1, 0.0))
    assert (one.name, one.commands) == ("a", ("blr 0", "blr 1"))
    rows = [replace(one, of_plain=(None, None))]
    said = table(SweepResult("m", ["t", "u"], [1.0, 1.0], "h200", rows, [], ["a"]))
    assert "0.1500 (0.1000)" in said and said.endswith("\n  a: blr 0\n  a: blr 1")


@pytest.mark.parametrize("text", ["1.5,x", "2;3"])
def test_what_is_no_list_of_numbers_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="with commas between"):
        listed("--cf", text, float)


def _found(name: str, bits: float, *losses: float, plain: bool = False) -> MadePoint:
    return MadePoint(name, "", plain, 0.0, bits, losses, None, (), kl=losses)


def test_the_frontier_is_what_nothing_beats_and_plain_is_a_line() -> None:
    points = [
        _found("int4", 4.0, 0.1, 0.2, plain=True),
        _found("int2", 2.0, 0.7, 1.2, plain=True),
        _found("better", 3.0, 0.2, 0.4),
        _found("worse", 3.5, 0.3, 0.5),
        _found("elsewhere", 3.5, 0.3, 0.3),
    ]
    assert [point.name for point in frontier(points)] == ["int4", "elsewhere", "better", "int2"]
    assert share_of_plain(points, points[2], 0) == pytest.approx(0.2 / 0.4)
    assert share_of_plain(points, _found("beyond", 1.0, 0.1, 0.1), 0) is None


def test_begun_anew_it_removes_what_is_its_own_alone(
    limited: Limited, arguments: list[str], tmp_path: Path
) -> None:
    few = [{"2,500": "2", "int4": "none", "--group": "--seed", "32": "0"}.get(p, p) for p in arguments]
    assert limited.run(*few, "--keep", cwd=tmp_path, patch=FORKED).code == 0
    kept = tmp_path / "out/outputs/svd-cf2"
    for mine in (kept / "mine.txt", kept.with_name("mine"), tmp_path / "out/logs/mine.txt"):
        mine.write_text("mine")
        done = limited.run(*few, "--keep", "--restart", cwd=tmp_path, patch=FORKED)
        refused(done, 5, "mine")
        assert mine.read_text() == "mine" and (kept / "blr_manifest.json").exists()
        assert (tmp_path / "out/points/svd-cf2.json").exists()
        mine.unlink()
    before = (kept / "blr_manifest.json").stat().st_ino
    assert limited.run(*few, "--keep", "--restart", cwd=tmp_path, patch=FORKED).code == 0
    assert (kept / "blr_manifest.json").stat().st_ino != before, "made again"
