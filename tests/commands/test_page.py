"""The page of a sweep."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from blr.compressor.commands.sweep.page import page


@pytest.mark.parametrize("name", ['a\x01<&">\n.txt', "t\udcff.txt"])
def test_it_is_well_formed_whatever_a_text_is_called(name: str) -> None:
    """Behind hours of work: it could not be read, or not be written."""
    command = f"blr compress m --calibration '{name}' -o svd-cf2"
    point = {"name": "svd-cf2", "kind": "svd", "plain": False, "bits": 8.0, "losses": [0.5], "kl": [0.4]}
    point |= {"speed": None, "spread": None, "of_plain": [None], "seconds": 1.0, "commands": [command]}
    result = {"model": "m", "texts": [name], "gpu": "h200", "points": [point], "frontier": ["svd-cf2"]}
    result |= {"dense": [2.0], "failed": [{"name": "int4", "why": f"{name}: no"}]}
    written = page(result).encode()
    ElementTree.fromstring(written.decode().partition("\n")[2])


def test_speeds_that_do_not_differ_are_no_chart() -> None:
    """As of a small model, where launches decide: whatever is stored."""
    point = {"kind": "svd", "plain": False, "spread": None, "of_plain": [None], "seconds": 1.0}
    point |= {"losses": [0.5], "kl": [0.4], "commands": []}
    names = ("svd-cf2", "svd-cf4")
    points = [{**point, "name": n, "bits": 8.0} for n in names]
    result = {"model": "m", "texts": ["t"], "gpu": "h200", "frontier": [], "dense": [2.0], "failed": []}
    for speeds, charts in (((6172.0, 6172.0), 2), ((None, None), 2), ((400.0, 300.0), 3)):
        made = [{**p, "speed": s} for p, s in zip(points, speeds, strict=True)]
        assert page(result | {"points": made}).count("<svg") == charts
