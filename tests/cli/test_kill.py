"""A run that is killed anywhere leaves no output or a whole one, and the same command finishes it.

Every kill is a SIGKILL in place of an fsync, rename, unlink or layer boundary, or at a random
moment. BLR_KILLS=all also tries the boundaries of the layers in the middle, which are all alike.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from itertools import groupby
from pathlib import Path

import pytest
import torch
from heal_models import save_dense, write_text
from killer import Killer, Outcome
from pico import save_pico
from producing import files
from safetensors.torch import load_file

from blr.compressor.workspace.manifest import read_manifest

LAYERS = 14
OPTIONS = ("--quiet", "--max-shard-size", "30KB")  # three shards and an index
RANDOM_KILLS = 8
KILLED = -9


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """A pico Llama with a tokenizer and a file in a subfolder."""
    folder = save_pico("llama", tmp_path_factory.mktemp("dense") / "llama")
    shutil.copy(tiny / "tokenizer_config.json", folder)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    return folder


class Case:
    """One folder in which the same command is run until it is done."""

    def __init__(self, killer: Killer, dense: Path, folder: Path, *options: object) -> None:
        self.killer, self.folder = killer, folder
        self.arguments = ("compress", dense, "--output", "out", *OPTIONS, *options)
        folder.mkdir()

    def run(self, **fate: float) -> Outcome:
        return self.killer.run(*self.arguments, cwd=self.folder, **fate)

    def files(self) -> dict[str, str]:
        """SHA-256 by name of the whole output; empty when there is none. Fails on a part of one."""
        output = self.folder / "out"
        return files(output) if output.exists() else {}

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture(scope="module")
def whole(killer: Killer, dense: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """An uninterrupted run: its outcome and the files it wrote."""
    case = Case(killer, dense, tmp_path_factory.mktemp("whole") / "case")
    outcome = case.run()
    assert outcome.code == 0, outcome.stderr
    assert outcome.fits == LAYERS and case.names() == ["out"]
    return outcome, case.files()


def boundaries(events: list[str]) -> list[int]:
    """The numbers to kill at: all, or all but those of the layers in the middle."""
    if os.environ.get("BLR_KILLS") == "all":
        return list(range(len(events)))
    fits = [number for number, event in enumerate(events) if event == "fit"]
    return [n for n in range(len(events)) if not fits[1] <= n < fits[-1]]


def finish(case: Case, first: Outcome, expected: dict[str, str], *before: dict[str, str]) -> str:
    """Run the command again after a kill; what is wrong, empty if nothing is."""
    if (left := case.files()) not in ({}, expected, *before):
        return f"another output was left: {sorted(left)}"
    complete = left == expected
    second = case.run()
    if complete and "--overwrite" not in case.arguments:
        return "" if second.code == 5 else f"exit code {second.code} over a complete output"
    if second.code:
        return f"exit code {second.code}: {second.stderr}"
    if case.files() != expected or case.names() != ["out"]:
        return f"differs from an uninterrupted run, beside it: {case.names()}"
    done = first.fits + second.fits
    return "" if done <= LAYERS + 1 else f"{done} layers computed"


def test_a_device_is_known_by_its_kind_whatever_it_was_called(
    killer: Killer, dense: Path, whole: tuple, tmp_path: Path
) -> None:
    """Several processes on a CPU need --device cpu, and go on with what one began without it."""
    uninterrupted, expected = whole
    stores = [number for number, event in enumerate(uninterrupted.events) if event == "store"]
    case = Case(killer, dense, tmp_path / "case")
    first = case.run(die_at=stores[-1])
    case.arguments += ("--device", "cpu")
    assert first.code == KILLED and finish(case, first, expected) == ""


@pytest.mark.sampled(8)
@pytest.mark.parametrize("first_of", range(8))
def test_killed_at_every_boundary(
    first_of: int, killer: Killer, dense: Path, whole: tuple, tmp_path: Path
) -> None:
    """Each case takes every eighth one."""
    uninterrupted, expected = whole
    numbers, problems = boundaries(uninterrupted.events), {}
    assert len(numbers) >= 40
    assert {"fsync", "rename", "unlink", "rmdir", "fit", "store"} == set(uninterrupted.events)
    for number in numbers[first_of::8]:
        case = Case(killer, dense, tmp_path / str(number))
        first = case.run(die_at=number)
        assert first.code == KILLED and len(first.events) == number
        if problem := finish(case, first, expected):
            problems[number, uninterrupted.events[number]] = problem
    assert not problems


def test_killed_at_random_moments(killer: Killer, dense: Path, whole: tuple, tmp_path: Path) -> None:
    uninterrupted, expected = whole
    moments, longest = random.Random(0), uninterrupted.seconds
    tried, problems = 0, {}
    for attempt in range(100):
        case = Case(killer, dense, tmp_path / str(attempt))
        after = moments.uniform(0.0, longest)
        first = case.run(after=after)
        if first.code == 0:
            longest = min(longest, first.seconds)
            continue
        assert first.code == KILLED
        if problem := finish(case, first, expected):
            problems[after, len(first.events)] = problem
        tried += 1
        if tried == RANDOM_KILLS:
            break
    assert tried == RANDOM_KILLS
    assert not problems


@pytest.mark.slow
def test_overwriting_killed_at_every_boundary_of_the_commit(
    killer: Killer, dense: Path, whole: tuple, tmp_path: Path
) -> None:
    _, expected = whole
    old = Case(killer, dense, tmp_path / "old", "--cf", "1.5")
    assert old.run().code == 0
    before = old.files()
    assert before != expected
    template = Case(killer, dense, tmp_path / "template", "--overwrite")
    shutil.copytree(old.folder / "out", template.folder / "out")
    events = template.run().events
    problems = {}
    for number in range(events.index("rmdir"), len(events)):
        case = Case(killer, dense, tmp_path / str(number), "--overwrite")
        shutil.copytree(old.folder / "out", case.folder / "out")
        first = case.run(die_at=number)
        assert first.code == KILLED
        if problem := finish(case, first, expected, before):
            problems[number, events[number]] = problem
    assert not problems


def test_killed_over_and_over_it_still_gets_done(
    killer: Killer, dense: Path, whole: tuple, tmp_path: Path
) -> None:
    """Each run is killed, a little later than the one before, as in a queue with time limits."""
    case = Case(killer, dense, tmp_path / "case")
    fits = []
    for limit in range(7, 200, 7):
        outcome = case.run(die_at=limit)
        fits.append(outcome.fits)
        if outcome.code == 0:
            break
    assert outcome.code == 0 and len(fits) > 5
    assert case.files() == whole[1] and case.names() == ["out"]
    assert sum(fits) < LAYERS + len(fits)


def test_pickled_source_killed(killer: Killer, dense: Path, tmp_path: Path) -> None:
    """Its weights are converted anew by every run, next to the journal that is kept."""
    source = shutil.copytree(dense, tmp_path / "llama")
    torch.save(load_file(source / "model.safetensors"), source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    uninterrupted = Case(killer, source, tmp_path / "whole", "--allow-pickle")
    events = uninterrupted.run().events
    fits = [number for number, event in enumerate(events) if event == "fit"]
    for number in (0, fits[0], fits[7], fits[-1] + 9, len(events) - 4):
        case = Case(killer, source, tmp_path / str(number), "--allow-pickle")
        first = case.run(die_at=number)
        assert first.code == KILLED
        assert finish(case, first, uninterrupted.files()) == ""


def test_calibrated_run_killed(killer: Killer, tmp_path: Path) -> None:
    """Fitted to activations, with a joint refit: each step is in the journal as well."""
    source, words = save_dense(tmp_path / "dense"), write_text(tmp_path / "text.txt")
    text = ("--calibration", words, "--samples", "4", "--seq-len", "64")
    options = (*text, "--refit", "1", "--finish", "1")
    uninterrupted = Case(killer, source, tmp_path / "whole", *options)
    events = uninterrupted.run().events
    steps = [number for number, event in enumerate(events) if event == "store"]
    for number in (steps[0], steps[len(steps) // 2], steps[-1] + 12):
        case = Case(killer, source, tmp_path / str(number), *options)
        first = case.run(die_at=number)
        assert first.code == KILLED
        second = case.run()
        assert second.code == 0, second.stderr
        assert case.files() == uninterrupted.files() and case.names() == ["out"]
        assert first.events.count("store") + second.events.count("store") <= len(steps) + 1


def test_a_run_that_finds_all_written_says_what_it_is(killer: Killer, tmp_path: Path) -> None:
    """Killed behind the last of its work: ranks that sensitivities gave, not those of headers alone."""
    source, words = save_dense(tmp_path / "dense"), write_text(tmp_path / "text.txt")
    text = ("--calibration", words, "--samples", "4", "--seq-len", "64")
    options = (*text, "--method", "svd", "--cf", "1.5", "--format", "json")
    uninterrupted = Case(killer, source, tmp_path / "whole", *options).run()
    commit = len(uninterrupted.events) - 1 - uninterrupted.events[::-1].index("rename")
    case = Case(killer, source, tmp_path / "case", *options)
    assert case.run(die_at=commit).code == KILLED
    second = case.run()
    assert second.code == 0 and second.fits == 0
    made, found = (json.loads(outcome.stdout) for outcome in (uninterrupted, second))
    for name in ("cf", "bits", "became", "parameters_after", "bytes_after", "output_errors"):
        assert found[name] == made[name], name


def test_a_run_after_a_kill_says_what_changed(killer: Killer, dense: Path, tmp_path: Path) -> None:
    case = Case(killer, dense, tmp_path / "case")
    assert case.run(die_at=40).code == KILLED
    changed = Case(killer, dense, tmp_path / "changed", "--cf", "3", "--seed", "1")
    changed.folder.rmdir()
    changed.folder = case.folder
    refused = changed.run()
    assert refused.code == 5 and refused.fits == 0
    assert "recipe.cf was 2.0, now 3.0" in refused.stderr
    assert "recipe.seed was 0, now 1" in refused.stderr and "--restart" in refused.stderr
    restarted = killer.run(*changed.arguments, "--restart", cwd=case.folder)
    assert restarted.code == 0 and restarted.fits == LAYERS


def test_another_number_of_threads_is_told(killer: Killer, dense: Path, tmp_path: Path) -> None:
    """Results depend on it in their last bits: finished layers are not computed again in silence."""
    case = Case(killer, dense, tmp_path / "case")
    assert case.run(die_at=40).code == KILLED
    more = killer.run(*case.arguments, "--threads", "2", cwd=case.folder)
    assert more.code == 5 and more.fits == 0
    assert "threads was 1, now 2" in more.stderr and "--restart" in more.stderr
    same = killer.run(*case.arguments, "--threads", "1", cwd=case.folder)
    assert same.code == 0 and same.fits < LAYERS


def test_weights_changed_after_a_kill_at_the_last_rename(
    killer: Killer, dense: Path, whole: tuple, tmp_path: Path
) -> None:
    """Everything is written, but from weights that are no longer those of the source."""
    source = shutil.copytree(dense, tmp_path / "llama")
    case = Case(killer, source, tmp_path / "case")
    last = max(n for n, event in enumerate(whole[0].events) if event == "rename")
    assert case.run(die_at=last).code == KILLED
    assert read_manifest(case.folder / "out.blr-partial")["run"]
    shard = source / "model.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1  # the sign of a norm's last weight
    shard.write_bytes(content)
    again = case.run()
    assert again.code == 0, again.stderr
    fresh = Case(killer, source, tmp_path / "fresh")
    assert fresh.run().code == 0
    assert case.files() == fresh.files() != whole[1]


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "folder"])
def test_damaged_journal_entry_is_computed_again(
    damage: str, killer: Killer, dense: Path, whole: tuple, tmp_path: Path
) -> None:
    uninterrupted, expected = whole
    case = Case(killer, dense, tmp_path / "case")
    stores = [n for n, event in enumerate(uninterrupted.events) if event == "store"]
    assert case.run(die_at=stores[5]).code == KILLED
    entries = sorted((case.folder / "out.blr-partial" / "journal").glob("*.safetensors"))
    assert len(entries) == 5
    content = bytearray(entries[2].read_bytes())
    content[-9] ^= 4
    if damage == "folder":
        entries[2].unlink()
        entries[2].mkdir()
    else:
        entries[2].write_bytes({"flip": content, "cut": content[:-9], "empty": b""}[damage])
    again = case.run()
    if damage == "folder":
        assert again.code == 5
        return
    assert again.code == 0 and again.fits == LAYERS - 4
    assert case.files() == expected and case.names() == ["out"]


def test_damaged_run_file_is_refused(killer: Killer, dense: Path, whole: tuple, tmp_path: Path) -> None:
    """It is the mark by which the folder is ours: without it, the user has to remove it."""
    case = Case(killer, dense, tmp_path / "case")
    assert case.run(die_at=40).code == KILLED
    partial = case.folder / "out.blr-partial"
    (partial / "run.json").write_text('{"recipe"')
    for refused in (case.run(), killer.run(*case.arguments, "--restart", cwd=case.folder)):
        assert refused.code == 5 and "run.json: in the way" in refused.stderr
        assert "damaged" in refused.stderr and any(partial.glob("journal/*.safetensors"))
    shutil.rmtree(partial)
    assert case.run().code == 0
    assert case.files() == whole[1]


def test_events_of_a_layer(whole: tuple) -> None:
    """A layer is computed, stored, flushed and renamed before the next one begins."""
    events = whole[0].events
    start = events.index("fit")
    one = events[start : events.index("fit", start + 1)]
    assert [event for event, _ in groupby(one)] == ["fit", "store", "fsync", "rename", "fsync"]


def test_manifest_holds_no_paths_or_times(whole: tuple, dense: Path) -> None:
    assert not any(str(dense.parent) in name for name in whole[1])
    assert not any("out" in Path(name).parts for name in whole[1])


CALIBRATED = pytest.param(True, marks=pytest.mark.slow, id="calibrated")


@pytest.mark.parametrize("calibrated", [pytest.param(False, id="plain"), CALIBRATED])
def test_run_in_few_bits_killed(
    calibrated: bool, killer: Killer, dense: Path, tiny: Path, sample: Path, tmp_path: Path
) -> None:
    """A base and its correction are one layer of the journal."""
    source = tiny if calibrated else dense
    options: tuple[object, ...] = ("--base", "int2", "--rank", "4", "--group", "32", "--force")
    if calibrated:
        options += ("--calibration", sample, "--samples", "4", "--seq-len", "64")
    uninterrupted = Case(killer, source, tmp_path / "whole", *options)
    events = uninterrupted.run().events
    steps = [number for number, event in enumerate(events) if event == "store"]
    for number in (steps[0], steps[len(steps) // 2], steps[-1] + 12):
        case = Case(killer, source, tmp_path / str(number), *options)
        assert case.run(die_at=number).code == KILLED
        assert case.run().code == 0
        assert case.files() == uninterrupted.files() and case.names() == ["out"]
