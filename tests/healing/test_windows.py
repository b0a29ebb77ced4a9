"""Streams of windows: every one once an epoch, held-back tokens never, the same at any time."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blr.compressor.base.errors import InputError, UsageError
from blr.compressor.healing import data
from blr.compressor.healing.data import Data, Reading, TextPart, _shares, batch_windows, text_digests
from blr.compressor.loading.load import load_tokenizer
from blr.compressor.recipe.settings import HealOptions, check_options
from blr.compressor.text import reading as reading_of_text
from blr.compressor.text.windows import PLAIN_READS, Stream, text_stream

WINDOW = 8


def one_text(tokens: int = 400) -> Stream:
    return text_stream(torch.arange(tokens, dtype=torch.int32), WINDOW, 3, "text")


def samples() -> Stream:
    rows = 1000 + torch.arange(40 * (WINDOW + 4), dtype=torch.int32).view(40, -1)
    return Stream(rows, WINDOW, 3)


@pytest.mark.parametrize("make", [one_text, samples])
def test_an_epoch_visits_every_window_once_and_none_held_back(make: object) -> None:
    stream: Stream = make()  # type: ignore[operator]
    epochs = [stream.take(epoch * len(stream), len(stream)) for epoch in range(6)]
    for windows in epochs:
        assert windows.shape == (len(stream), WINDOW)
        assert len(set(windows.flatten().tolist())) == windows.numel()
        assert not set(windows.flatten().tolist()) & set(stream.held.flatten().tolist())
        assert bool((windows.diff() == 1).all())
    starts = [set(windows[:, 0].tolist()) for windows in epochs]
    assert len({frozenset(s) for s in starts}) > 1, "every epoch begins its windows at the same places"


@pytest.mark.parametrize("make", [one_text, samples])
def test_a_window_does_not_depend_on_what_was_taken_before(make: object) -> None:
    stream: Stream = make()  # type: ignore[operator]
    whole = stream.take(0, 3 * len(stream))
    parts = [stream.take(first, 5) for first in range(0, 3 * len(stream) - 5, 5)]
    assert torch.equal(torch.cat(parts), whole[: 5 * len(parts)])


@pytest.mark.parametrize("make", [one_text, samples])
def test_what_is_read_often_is_varied(make: object) -> None:
    """By tokens of the text, none held back, the same whoever asks for a window."""
    plain: Stream = make()  # type: ignore[operator]
    varied: Stream = make()  # type: ignore[operator]
    varied.vary, count = 0.25, len(plain)
    assert torch.equal(varied.take(0, PLAIN_READS * count), plain.take(0, PLAIN_READS * count))
    first = PLAIN_READS * count
    found, usual = varied.take(first, 5 * count), plain.take(first, 5 * count)
    assert float((found != usual).float().mean()) == pytest.approx(0.25, abs=0.04)
    assert set(found.flatten().tolist()) <= set(plain.rows.flatten().tolist())
    assert torch.equal(varied.take(first + 3, 4), found[3:7])


def test_a_short_text_is_refused() -> None:
    with pytest.raises(InputError, match="23 tokens, expected at least three windows of 8"):
        one_text(23)
    assert len(one_text(24)) == 1 and one_text(24).held.shape == (1, WINDOW)


@pytest.mark.parametrize(
    ("texts", "own", "batch", "expected"),
    [
        ({"a": 10}, 0.0, 8, [8]),
        ({"self": 10}, 1.0, 8, [8]),
        ({"a": 10, "self": 10}, 2 / 3, 9, [3, 6]),
        ({"a": 30, "b": 10, "self": 5}, 0.5, 8, [3, 1, 4]),
        ({"a": 1000, "b": 1, "self": 5}, 0.5, 8, [3, 1, 4]),
        ({"a": 1, "b": 1000}, 0.0, 2, [1, 1]),
    ],
)
def test_shares_of_a_batch(texts: dict[str, int], own: float, batch: int, expected: list[int]) -> None:
    streams = {name: [None] * size for name, size in texts.items()}
    assert _shares(streams, own, batch) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "enough"),
    [
        ({"batch": 7}, "raise it or lower --window"),
        ({"batch": 8, "data": ("a",)}, "1 of --text and the teacher's own; give --batch 16 or more"),
        ({"batch": 24, "data": ("a", "b"), "mix": 2 / 3}, "--batch 40 or more"),
        ({"batch": 8, "data": ("a", "b"), "mix": 0.0}, "2 of --text; give --batch 16 or more"),
    ],
    ids=str,
)
def test_a_batch_without_room_for_a_text_is_refused(options: dict[str, Any], enough: str) -> None:
    """Before any of them is read or written; what is said to be enough is."""
    given = check_options(HealOptions("c", "d", window=WINDOW, **options))
    with pytest.raises(UsageError, match=enough):
        batch_windows(given, Reading(None, WINDOW, 64), False)
    if found := re.search(r"--batch (\d+)", enough):
        given = replace(given, batch=int(found[1]))
        assert batch_windows(given, Reading(None, WINDOW, 64), False) == int(found[1]) // WINDOW


def test_a_text_given_twice_is_refused(tmp_path: Path) -> None:
    """By what it holds: it would be two of the texts that share a batch."""
    first, copy, other = (str(tmp_path / name) for name in ("first", "copy", "other"))
    for name, text in ((first, "a"), (copy, "a"), (other, "b")):
        Path(name).write_text(text)
    assert len(set(text_digests([first, other]))) == 2
    for names, said in (
        ([first, other, first], f"--text {first}: given twice; give every text once"),
        ([first, copy], f"--text {copy}: the same text as {first}; give every text once"),
    ):
        with pytest.raises(UsageError, match=re.escape(said)):
            text_digests(names)


def test_every_share_of_the_rows_has_some_of_each_part() -> None:
    mixed = Data([TextPart("a", one_text(), 2), TextPart("self", samples(), 4)], "")
    rows = mixed.take(5)
    assert rows.shape == (mixed.batch, WINDOW) == (6, WINDOW)
    own = [int(row[0]) >= 1000 for row in rows]
    assert [sum(own[:3]), sum(own[3:])] == [2, 2]
    assert mixed.steps(2) == round(2 * len(one_text()) / 2)


@pytest.mark.parametrize("seed", [-(2**63), -1, 2**62, 2**63 - 1])
def test_any_seed_of_64_bits_gives_windows(seed: int) -> None:
    """Also where they are varied."""
    stream = Stream(torch.arange(100)[None], WINDOW, seed, 0.5)
    count = (PLAIN_READS + 1) * len(stream)
    assert stream.take(0, count).shape == (count, WINDOW)


def test_tokens_that_the_model_has_not_are_refused(dense: Path, tmp_path: Path) -> None:
    """Also one, where only a late batch would meet it."""
    text, tokenizer = tmp_path / "text.txt", load_tokenizer(dense)
    options = HealOptions("dense", data=(str(text),), window=WINDOW)
    for place in (0, 50, 99):
        text.write_text("a" * place + "~" + "a" * (99 - place))
        with pytest.raises(
            InputError, match="makes token 126 of it, and the model has 126 tokens; take"
        ):
            Reading(tokenizer, WINDOW, 64, vocabulary=126).texts(options)
        assert Reading(tokenizer, WINDOW, 64, vocabulary=127).texts(options)


class Endless:
    """The package `datasets`, with a set that has no end."""

    rows = 0

    @classmethod
    def load_dataset(cls, name: str, **_: object) -> Iterator[dict[str, str]]:
        while True:
            cls.rows += 1
            yield {"text": f"row {cls.rows} of {name}, which goes on and on"}


@pytest.mark.parametrize("briefly", [False, True])
def test_of_a_data_set_the_beginning_is_read(
    briefly: bool, dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", Endless)
    monkeypatch.setattr(data, "SET_TOKENS", 1000)
    monkeypatch.setattr(reading_of_text, "PIECE", 100)
    monkeypatch.setattr(Endless, "rows", 0)
    options = HealOptions("dense", data=("some/endless-set",), window=WINDOW)
    reading = Reading(load_tokenizer(dense), WINDOW, 64)
    (stream,) = reading.texts(options, briefly).values()
    tokens = 3 * WINDOW if briefly else 1000
    assert stream.rows.numel() + stream.held.numel() == tokens
    assert Endless.rows * 40 < tokens + 300, "far more is read than is taken"
    assert reading.shortened(options) == ["some/endless-set: its first 1,000 tokens at most"]
