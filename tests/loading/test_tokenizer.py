"""Whether a tokenizer can be relied on is asked of a process of its own, once for the same bytes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from blr.compressor.base.errors import InputError
from blr.compressor.loading import tokenizer
from blr.compressor.loading.tokenizer import check_tokenizer


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that processes were started for, none of them known before."""
    found: list[Path] = []
    run = tokenizer._run

    def noted(path: Path, *arguments: Any) -> Any:
        found.append(path)
        return run(path, *arguments)

    monkeypatch.setattr(tokenizer, "_run", noted)
    monkeypatch.setattr(tokenizer, "_sound", set())
    return found


def test_one_that_passed_is_not_tried_again(tiny: Path, tmp_path: Path, tried: list[Path]) -> None:
    shutil.copy(tiny / "tokenizer.json", tmp_path)
    for folder in (tiny, tiny, tmp_path):
        check_tokenizer(folder)
    assert len(tried) == 1
    check_tokenizer(tiny, "another text")
    assert len(tried) == 2


def test_other_bytes_are(tiny: Path, tmp_path: Path, tried: list[Path]) -> None:
    check_tokenizer(tiny)
    (tmp_path / "tokenizer.json").write_bytes((tiny / "tokenizer.json").read_bytes()[:-1])
    for _ in range(2):  # what failed is not remembered
        with pytest.raises(InputError, match="the library does not read"):
            check_tokenizer(tmp_path)
    assert len(tried) == 3
