"""What goes wrong around a healing run, as a user meets it: one line, a code, and work that is kept."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from heal_models import QUIET
from killer import Killer, Outcome

from blr.compressor.exporting.job import export
from blr.compressor.exporting.options import ExportOptions
from blr.compressor.workspace.manifest import read_manifest, verify_files

OPTIONS = ("--quiet", "--window", 16, "--batch", 64, "--own-tokens", 400, "--lr", 0.01, "--steps", 6)


def heal(
    killer: Killer, student: object, teacher: object, cwd: Path, *more: object, **fate: object
) -> Outcome:
    command = ("heal", student, "--teacher", teacher, *OPTIONS, "--save-minutes", 0, "-o", "out", *more)
    return killer.run(*command, cwd=cwd, **fate)


def one_line(done: Outcome, code: int, said: str) -> None:
    lines = done.stderr.strip().splitlines()
    assert done.code == code, done.stderr
    assert len(lines) == 1 and re.search(said, lines[0]), done.stderr


def test_stopped_by_ctrl_c_it_tells_how_to_go_on(
    killer: Killer, compressed: Path, dense: Path, tmp_path: Path
) -> None:
    whole = heal(killer, compressed, dense, tmp_path, "--overwrite")
    stores = [n for n, event in enumerate(whole.events) if event == "store"]
    (tmp_path / "second").mkdir()
    done = heal(killer, compressed, dense, tmp_path / "second", stop_at=stores[3], stop=signal.SIGINT)
    assert done.code == 130 and "Traceback" not in done.stderr
    assert "what was saved so far is kept in" in done.stderr
    again = heal(killer, compressed, dense, tmp_path / "second", "--device", "cpu")  # as --gpus needs it
    assert again.code == 0 and len(again.events) < len(whole.events)


def test_a_full_disk_ends_it_and_more_room_resumes_it(
    killer: Killer, compressed: Path, dense: Path, tmp_path: Path
) -> None:
    done = heal(killer, compressed, dense, tmp_path, file_limit=40_000, blind=True)
    one_line(done, 6, "out")
    assert not (tmp_path / "out").exists()
    assert heal(killer, compressed, dense, tmp_path).code == 0
    assert verify_files(tmp_path / "out", read_manifest(tmp_path / "out")) == []


def test_twice_into_one_output(killer: Killer, compressed: Path, dense: Path, tmp_path: Path) -> None:
    assert heal(killer, compressed, dense, tmp_path).code == 0
    one_line(heal(killer, compressed, dense, tmp_path), 5, "out: .*--overwrite")
    assert heal(killer, compressed, dense, tmp_path, "--overwrite").code == 0


def test_a_healed_checkpoint_heals_again(
    killer: Killer, compressed: Path, dense: Path, tmp_path: Path
) -> None:
    assert heal(killer, compressed, dense, tmp_path).code == 0
    (tmp_path / "out").rename(tmp_path / "first")
    assert heal(killer, "first", dense, tmp_path).code == 0
    output = tmp_path / "out"
    assert verify_files(output, read_manifest(output)) == []
    card = (output / "README.md").read_text()
    assert card.count("## Healed") == 2
    assert card.count("what is unchanged stand above as they were before healing") == 1


def test_texts_and_outputs_given_twice(
    killer: Killer, compressed: Path, dense: Path, text: Path, tmp_path: Path
) -> None:
    """Told before anything is written, and before what else they would be refused for."""
    twice = ("--batch", 16, "--data", text, "--data", text)
    one_line(heal(killer, compressed, dense, tmp_path, *twice), 2, "text.txt: given twice; give every")
    for place in (compressed, dense):
        one_line(heal(killer, compressed, dense, tmp_path, "-o", place), 5, "the model itself")
    assert not list(tmp_path.iterdir())


def test_what_is_no_compressed_checkpoint(
    killer: Killer, compressed: Path, dense: Path, tmp_path: Path
) -> None:
    export(compressed, tmp_path / "fast", ExportOptions("fast"), QUIET)
    (tmp_path / "empty").mkdir()
    for student, teacher, code, said in (
        ("fast", dense, 4, "an export already"),
        (dense, dense, 4, "nothing to heal"),
        ("empty", dense, 4, "config.json"),
        ("./nowhere", dense, 4, "nowhere"),
        (compressed, "empty", 4, "config.json"),
        (compressed, "fast", 4, "an export already"),
        (compressed, compressed, 4, "compressed by blr; expected the dense checkpoint"),
    ):
        one_line(heal(killer, student, teacher, tmp_path), code, said)
    assert not list(tmp_path.glob("out*"))


TOLD: dict[str, tuple[str, Any]] = {
    "report without layers": ("report.json", {"a": 1}),
    "layers as number": ("report.json", {"layers": 3, "types": [], "totals": {}}),
    "layers as texts": ("report.json", {"layers": ["x"], "types": [], "totals": {}}),
    "records as texts": ("blr_layers.json", "x"),
    "bits as text": ("blr_layers.json", {"bits": "x"}),
    "error as list": ("blr_layers.json", {"error": [1]}),
}


@pytest.mark.parametrize("case", TOLD)
def test_reports_that_no_blr_wrote_are_refused_before_the_training(
    case: str, compressed: Path, dense: Path, killer: Killer, tmp_path: Path
) -> None:
    """Without its manifest a folder may have been changed since."""
    name, value = TOLD[case]
    model = Path(shutil.copytree(compressed, tmp_path / "model"))
    (model / "blr_manifest.json").unlink()
    told = json.loads((model / name).read_text())
    if name == "blr_layers.json":
        value = {m: {**told[m], **value} if isinstance(value, dict) else value for m in told}
    (model / name).write_text(json.dumps(value))
    one_line(heal(killer, "model", dense, tmp_path), 4, "found what cannot be gone on from")
    assert not list(tmp_path.glob("out*"))
