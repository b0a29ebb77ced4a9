"""Records of an output that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from limited import Limited, refused


def record(**changes: Any) -> dict[str, Any]:
    spec = {"structure": "svd", "in_features": 8, "out_features": 8, "rank": 2}
    return {"spec": spec, "type": "q_proj", "error": 0.5, "notes": [], **changes}


RECORDS: dict[str, Any] = {
    "list": [],
    "number": {"a": 3},
    "empty-record": {"a": {}},
    "error-text": {"a": record(error="0.5")},
    "error-nan": {"a": record(error=float("nan"))},
    "error-huge": {"a": record(error=10**400)},
    "error-list": {"a": record(error=[0.5])},
    "type-number": {"a": record(type=3)},
    "type-list": {"a": record(type=["q"])},
    "notes-text": {"a": record(notes="n")},
    "notes-numbers": {"a": record(notes=[1])},
    "spec-list": {"a": record(spec=[1])},
    "spec-null": {"a": record(spec=None)},
    "spec-unknown": {"a": record(spec={"structure": "x"})},
    "spec-structure-list": {"a": record(spec={"structure": ["svd"]})},
    "spec-text-sizes": {"a": record(spec={**record()["spec"], "rank": "2"})},
    "spec-negative": {"a": record(spec={**record()["spec"], "rank": -2})},
    "spec-zero": {"a": record(spec={**record()["spec"], "in_features": 0})},
    "spec-float": {"a": record(spec={**record()["spec"], "out_features": 8.5})},
    "spec-huge": {"a": record(spec={**record()["spec"], "rank": 10**300})},
    "spec-boolean": {"a": record(spec={**record()["spec"], "rank": True})},
    "patterns-number": {
        "a": record(spec={"structure": "ks", "in_features": 8, "out_features": 8, "patterns": 3})
    },
    "patterns-flat": {
        "a": record(spec={"structure": "ks", "in_features": 8, "out_features": 8, "patterns": [[1, 2]]})
    },
    "name-control": {"a\u001b[31m": record()},
    "name-newline": {"a\nb": record()},
    "name-long": {"a" * 5000: record()},
}


@pytest.mark.parametrize("case", RECORDS)
def test_records_of_wrong_types(case: str, limited: Limited, tmp_path: Path) -> None:
    (tmp_path / "blr_layers.json").write_text(json.dumps(RECORDS[case]))
    (tmp_path / "config.json").write_text('{"model_type": "blr_llama", "blr": {}}')
    refused(limited.run("inspect", ".", cwd=tmp_path), 4, "not an output of blr compress")


@pytest.mark.parametrize("text", ["\u001b[2J", "a\nb", "\u202e", "\ud800"], ids=ascii)
def test_records_with_control_characters(text: str, limited: Limited, tmp_path: Path) -> None:
    (tmp_path / "blr_layers.json").write_text(json.dumps({"a": record(type=text, notes=[text])}))
    (tmp_path / "config.json").write_text('{"model_type": "blr_llama", "blr": {}}')
    ended = limited.run("inspect", ".", cwd=tmp_path)
    assert ended.code == 0 and all(line.isprintable() for line in ended.out.splitlines())
