"""Own text is written once for all runs of a user, shared out between runs; nothing rests on it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from blr.compressor.checkpoint.journal import layer_key
from blr.compressor.text import shelf as module
from blr.compressor.text.shelf import Shelf, shelf_folder

KEYS = {n: layer_key(batch=n) for n in (2, 5, 7)}
HOLD = """
import sys
from pathlib import Path
from blr.compressor.text.shelf import _locked
assert _locked(Path(sys.argv[1]), sys.argv[2], False) > 0
print("held", flush=True)
sys.stdin.read()
"""


class Writer:
    """Writes a batch of its number, and keeps which."""

    def __init__(self) -> None:
        self.wrote: list[int] = []

    def __call__(self, n: int) -> Tensor:
        self.wrote.append(n)
        return torch.full((2, 3), n, dtype=torch.int32)


def taken(shelf: Shelf, writer: Writer) -> dict[int, Tensor]:
    begun: list[int] = []
    found = dict(shelf.batches(KEYS, writer, lambda: begun.append(1), pytest.fail))
    assert len(begun) == len(KEYS)
    assert all(torch.equal(ids, Writer()(n)) for n, ids in found.items())
    return found


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that writes the batch 5 until its standard input is closed."""
    command = [sys.executable, "-c", HOLD, str(tmp_path), KEYS[5]]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout and process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_what_lies_there_is_not_written_again(tmp_path: Path) -> None:
    writer, second = Writer(), Shelf(tmp_path)
    first = taken(Shelf(tmp_path), writer)
    assert taken(second, writer).keys() == first.keys() == KEYS.keys()
    assert writer.wrote == [2, 5, 7] and second.read == 3


def test_a_damaged_batch_is_written_again(tmp_path: Path) -> None:
    writer, path = Writer(), tmp_path / f"{KEYS[5]}.safetensors"
    taken(Shelf(tmp_path), writer)
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    taken(Shelf(tmp_path), writer)
    assert writer.wrote == [2, 5, 7, 5]


def test_what_another_process_writes_comes_last(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    writer, order, said = Writer(), list[int](), list[str]()
    for n, _ in Shelf(tmp_path).batches(KEYS, writer, lambda: None, said.append):
        order.append(n)
        if len(order) == 2:  # it ends without having written it
            assert holder.stdin
            holder.stdin.close()
    assert order == writer.wrote == [2, 7, 5]
    assert len(said) == 1 and "another run" in said[0]


@pytest.mark.parametrize("folder", ["a file", "/dev/null/x", "/proc/1/x", "/" + "a" * 5000, None])
def test_without_a_shelf_text_is_written(folder: str | None, tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("")
    for _ in range(2):
        writer = Writer()
        taken(Shelf(tmp_path / folder if folder else None), writer)
        assert writer.wrote == [2, 5, 7]


def test_what_was_read_longest_ago_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf, ids = Shelf(tmp_path), torch.zeros(64, 64, dtype=torch.int32)
    monkeypatch.setattr(module, "MOST", 5 * ids.nbytes // 2)
    ages = iter(range(100))
    monkeypatch.setattr(module, "_read_at", lambda path: order[path.stem])
    order: dict[str, int] = {}
    for n in (2, 5, 7):
        order[KEYS[n]] = next(ages)
        if n == 7:
            order[KEYS[2]] = next(ages)  # read again
        shelf.store(KEYS[n], ids)
    assert [n for n in KEYS if shelf.load(KEYS[n]) is not None] == [2, 7]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"BLR_TEXT_DIR": "off"}, None),
        ({"BLR_TEXT_DIR": "~nosuchuser/x"}, None),
        ({"XDG_CACHE_HOME": "here"}, None),
        ({"BLR_TEXT_DIR": "/there"}, Path("/there")),
        ({"XDG_CACHE_HOME": "/cache"}, Path("/cache/blr/own-text")),
        ({"HOME": "/home/me"}, Path("/home/me/.cache/blr/own-text")),
    ],
)
def test_where_it_is(
    environment: dict[str, str], expected: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BLR_TEXT_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert shelf_folder() == expected
