"""The page of a sweep."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from blr.compressor.commands.sweep.page import (
    FailedPoint,
    MadePoint,
    SweepResult,
    page,
    table_rows,
)

POINT = MadePoint(
    *("svd-cf2", "svd", False, 0.0, 8.0, (0.5,), None, ()), seconds=1.0, kl=(0.4,), of_plain=(None,)
)


@pytest.mark.parametrize("name", ['a\x01<&">\n.txt', "t\udcff.txt"])
def test_it_is_well_formed_whatever_a_text_is_called(name: str) -> None:
    """Behind hours of work: it could not be read, or not be written."""
    point = replace(POINT, commands=(f"blr compress m --calibration '{name}' -o svd-cf2",))
    failed = [FailedPoint("int4", f"{name}: no", 1, "")]
    result = SweepResult("m", [name], [2.0], "h200", [point], failed, ["svd-cf2"])
    written = page(result).encode()
    ElementTree.fromstring(written.decode().partition("\n")[2])


def test_speeds_that_do_not_differ_are_no_chart() -> None:
    """As of a small model, where launches decide: whatever is stored."""
    for speeds, charts in (((6172.0, 6172.0), 2), ((None, None), 2), ((400.0, 300.0), 3)):
        made = [replace(POINT, name=f"svd-cf{n}", speed=speed) for n, speed in enumerate(speeds)]
        assert page(SweepResult("m", ["t"], [2.0], "h200", made, [], [])).count("<svg") == charts


def test_texts_of_one_file_name_are_told_apart() -> None:
    """In columns and headings, by their folders; alone a text has its file's name."""
    point = replace(POINT, losses=(0.5, 0.6), of_plain=(None, None), kl=(0.4, 0.4))
    for texts, head in ((["a/t.txt", "b/t.txt"], "a/t.txt"), (["a/t.txt", "b/u.txt"], "t.txt")):
        result = SweepResult("m", texts, [2.0, 2.0], "h200", [point], [], [])
        assert f"loss in {head}" in table_rows(result)[0]
        assert f"<h2>Loss in {head}</h2>" in page(result)
