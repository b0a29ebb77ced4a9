"""Loading other implementations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from blr.compressor.base.errors import UsageError
from blr.compressor.bench.peers import load_peer, load_peers

GOOD = """
def blr_peer():
    return {"svd": lambda x, U, V: x @ V @ U.mT, "ks.prepare": lambda *w: [t * 2 for t in w]}
"""


def save(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_file_and_a_package(tmp_path: Path) -> None:
    file = save(tmp_path / "fast.py", GOOD)
    save(tmp_path / "other" / "inside.py", GOOD)
    save(tmp_path / "other" / "__init__.py", "from .inside import blr_peer\n")
    peers = load_peers([file, tmp_path / "other", file])
    assert [peer.name for peer in peers] == ["fast", "other", "fast#2"]
    x, U, V = torch.ones(1, 2), torch.ones(3, 1), torch.ones(2, 1)
    assert torch.equal(peers[1].functions["svd"](x, U, V), torch.full((1, 3), 2.0))


def test_factors_are_prepared_by_structure(tmp_path: Path) -> None:
    peer = load_peer(save(tmp_path / "fast.py", GOOD))
    w = torch.ones(2)
    assert peer.prepared("svd", [w])[0] is w
    assert torch.equal(peer.prepared("ks", [w])[0], w * 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "expected a .py file or a folder with __init__.py"),
        ("x = 1", "no function blr_peer"),
        ("import nothing_of_this_name", "cannot be imported: ModuleNotFoundError"),
        ("def blr_peer(): return 1 / 0", "failed: ZeroDivisionError"),
        ("def blr_peer(): return {}", "must return a dict"),
        ("def blr_peer(): return {'butterfly': print}", "returned 'butterfly': expected functions"),
        ("def blr_peer(): return {'svd': 3}", "returned 'svd': expected functions"),
    ],
)
def test_what_cannot_be_used_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "peer.py"
    if text is not None:
        save(path, text)
    with pytest.raises(UsageError, match=message) as found:
        load_peer(path)
    assert str(path) in str(found.value)
