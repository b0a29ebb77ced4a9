"""The form of a draft: many tokens a second of it and its model together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from blr.compressor.base.errors import UsageError
from blr.compressor.checkpoint.source import open_source
from blr.compressor.planning import sizing as forms
from blr.compressor.planning.outline import open_or_outline
from blr.compressor.planning.pace import times_as_fast
from blr.compressor.planning.sizing import accepted_share, draft_form
from blr.compressor.recipe.schema import Recipe
from configs import LARGE


def test_few_bits_are_the_draft_of_an_8b(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another form where it is as near as int8 is, or where nothing else is."""
    (tmp_path / "config.json").write_text(json.dumps(LARGE | {"num_hidden_layers": 32}))
    source, kinds = open_or_outline(tmp_path)[0], [settings for settings, _ in forms.FORMS]
    recipe, said = draft_form(source, Recipe(gpu="h200"), False)
    assert recipe.quantize in ("int8", "int4") and "times as fast" in said and "h200" in said
    assert 1.3 < float(said.split(" times as fast")[0].split()[-1]) < 2
    monkeypatch.setattr(forms, "FORMS", tuple((settings, 0.001) for settings in kinds))
    assert draft_form(source, Recipe(gpu="h200"), False)[0].quantize == "int2"


def test_a_model_of_few_layers_gains_nothing(tiny: Path) -> None:
    said = draft_form(open_source(tiny), Recipe(gpu="h200"), False)[1]
    assert float(said.split(" times as fast")[0].split()[-1]) < 1


def test_a_form_that_is_asked_for_is_refused(tiny: Path) -> None:
    with pytest.raises(UsageError, match="--for-draft chooses the form; leave out base, rank"):
        draft_form(open_source(tiny), Recipe(base="int3", rank=16), False)


def test_more_accepted_drafts_are_faster() -> None:
    assert accepted_share(0.0) == 1 > accepted_share(0.1) > accepted_share(1.0) > 0
    assert times_as_fast(0.5, 0, 0.1) == 1
    assert times_as_fast(0.9, 3, 0.2) > times_as_fast(0.8, 3, 0.2) > times_as_fast(0.8, 3, 0.4)
