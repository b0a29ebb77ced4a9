"""`compress --heal`: compressed and trained in one run and one workspace."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from heal_models import QUIET, write_text

from blr.compressor.base.errors import BlrError
from blr.compressor.cli.options import completed
from blr.compressor.commands import compress_run as after
from blr.compressor.commands.compress import Settings, Summary, compress
from blr.compressor.fitting import factorize
from blr.compressor.healing import data, trainer
from blr.compressor.planning import sizing
from blr.compressor.recipe.schema import Recipe
from blr.compressor.recipe.settings import HealOptions, check_options
from blr.compressor.text import own
from blr.compressor.workspace.manifest import read_manifest, verify_files

SHORT = HealOptions(
    "dense", "dense", window=16, batch=64, own_tokens=400, steps=20, rate=0.01, device="cpu"
)
RECIPE = Recipe(method="svd", cf=1.5, seq_len=16, samples=8)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "CPU_BATCH", 8)
    monkeypatch.setattr(data, "CPU_OWN", 400)
    monkeypatch.setattr(after, "options_of", lambda settings: check_options(SHORT))


def run(dense: Path, output: Path, **settings: object) -> Summary:
    return compress(dense, RECIPE, output, Settings("dense", heal=1.0, **settings), QUIET)


def test_the_output_is_healed_and_says_both(dense: Path, tmp_path: Path) -> None:
    summary = run(dense, tmp_path / "out")
    assert summary.healed is not None and summary.healed.best_step > 0
    assert summary.healed.after["self"]["kl"] < 0.9 * summary.healed.before["self"]["kl"]
    assert summary.check is not None and summary.check["distance"] > 0
    output = tmp_path / "out"
    assert verify_files(output, read_manifest(output)) == []
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    assert "unhealed" not in {path.name for path in output.iterdir()}
    card = (output / "README.md").read_text()
    assert "mean relative error of the weights" in card and "## Healed" in card
    assert "healing" in json.loads((output / "report.json").read_text())
    assert read_manifest(output)["source"]["name"] == "dense"


def test_a_draft_is_healed_for_what_is_accepted(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its form is chosen; the summary has the predicted and the measured share."""
    assert Settings("dense").for_draft is False
    monkeypatch.setattr(sizing, "FORMS", sizing.FORMS[-1:])
    monkeypatch.setattr(after, "options_of", lambda _: check_options(replace(SHORT, loss="variation")))
    settings = Settings("dense", heal=1.0, for_draft=True)
    summary = compress(dense, Recipe(seq_len=16, samples=8), tmp_path / "out", settings, QUIET)
    assert summary is not None and "int2" in summary.became
    assert summary.healed is not None
    before, found = (part["self"]["variation"] for part in (summary.healed.before, summary.healed.after))
    assert 0 < found < before < 1
    assert "total variation" in (tmp_path / "out" / "README.md").read_text()


def test_a_run_stopped_in_training_fits_nothing_again(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(trainer.Trainer, "step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(dense, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(factorize, "factorize_layers", interrupt)
    assert run(dense, tmp_path / "out").healed is not None
    assert verify_files(tmp_path / "out", read_manifest(tmp_path / "out")) == []


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_text_too_short_to_train_on_is_refused_before_any_fit(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = write_text(tmp_path / "short.txt", characters=40)
    monkeypatch.setattr(factorize, "factorize_layers", interrupt)
    options = check_options(HealOptions("dense", data=(str(text),), window=16))
    monkeypatch.setattr(after, "options_of", lambda settings: options)
    with pytest.raises(BlrError, match="40 tokens, expected at least three windows of 16"):
        run(dense, tmp_path / "out", calibration=str(text))


def test_the_text_of_the_calibration_is_that_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert after.options_of(Settings("dense", heal=2.0, for_draft=True)).loss == "variation"
    for text, expected, share in ((None, (), 1.0), ("self", (), 1.0), ("a.txt", ("a.txt",), 2 / 3)):
        options = after.options_of(Settings("dense", heal=2.0, calibration=text))
        assert (options.data, options.mix, options.minutes) == (expected, share, 2.0)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["m", "--heal"], ["m", "--heal=3"]),
        (["--heal", "m"], ["--heal=3", "m"]),
        (["--heal", "-q"], ["--heal=3", "-q"]),
        (["--heal", "8", "m"], ["--heal", "8", "m"]),
        (["--heal=8", "m"], ["--heal=8", "m"]),
        (["--heal", "-1"], ["--heal", "-1"]),
    ],
)
def test_minutes_may_be_left_out(given: list[str], expected: list[str]) -> None:
    assert completed(given) == expected
