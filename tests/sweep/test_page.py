"""The page of a sweep."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from blr.compressor.sweep.page import page


@pytest.mark.parametrize("name", ['a\x01<&">\n.txt', "t\udcff.txt"])
def test_it_is_well_formed_whatever_a_text_is_called(name: str) -> None:
    """Behind hours of work: it could not be read, or not be written."""
    command = f"blr compress m --calibration '{name}' -o svd-cf2"
    point = {"name": "svd-cf2", "kind": "svd", "plain": False, "bits": 8.0, "losses": [0.5]}
    point |= {"speed": None, "spread": None, "of_plain": [None], "seconds": 1.0, "commands": [command]}
    result = {"model": "m", "texts": [name], "gpu": "h200", "points": [point], "frontier": ["svd-cf2"]}
    result |= {"dense": [2.0], "failed": [{"name": "int4", "why": f"{name}: no"}]}
    written = page(result).encode()
    ElementTree.fromstring(written.decode().partition("\n")[2])
