"""What runs say that differ from the ones before them."""

from __future__ import annotations

from typing import Any

from blr.compressor.workspace.journal import changes

EXPORT: dict[str, Any] = {"source": "a", "export": {"batch": 1, "gpu": "h200"}, "densified": []}
HEAL = {"source": "b", "teacher": "c", "texts": ["d"], "heal": {"lr": 0.003}}


def test_a_setting_is_named() -> None:
    other = {**EXPORT, "export": {"batch": 2, "gpu": "h200"}}
    assert changes(EXPORT, EXPORT) == []
    assert changes(EXPORT, other) == ["export.batch was 1, now 2"]


def test_what_a_digest_stands_for_is_said_to_have_changed() -> None:
    """Nobody knows a file by its digest."""
    one, other = "0" * 64, "1" * 64
    assert changes({"source": one}, {"source": other}) == ["source has changed"]
    assert changes({"texts": [one, one]}, {"texts": [other]}) == ["texts has changed"]
    assert changes({"text": None}, {"text": one}) == ["text was none, now 000000000000..."]


def test_another_command_is_named_and_not_all_that_only_one_of_them_has() -> None:
    assert changes(HEAL, EXPORT) == ["command was heal, now export"]
    assert changes({"source": "b", "recipe": {}}, HEAL) == ["command was compress, now heal"]
