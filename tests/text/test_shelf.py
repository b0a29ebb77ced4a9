"""Own text is written once for all runs of a user; nothing rests on it."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from blr.compressor.text import shelf as module
from blr.compressor.text.shelf import START, Shelf, shelf_folder
from blr.compressor.workspace.journal import layer_key

KEYS = {n: layer_key(batch=n) for n in (2, 5, 7)}


class Writer:
    """Writes a batch of its number, and keeps which."""

    def __init__(self) -> None:
        self.wrote: list[int] = []

    def __call__(self, n: int) -> Tensor:
        self.wrote.append(n)
        return torch.full((2, 3), n, dtype=torch.int32)


def taken(shelf: Shelf, writer: Writer) -> dict[int, Tensor]:
    found = {n: shelf.batch(key, partial(writer, n)) for n, key in KEYS.items()}
    assert all(torch.equal(ids, Writer()(n)) for n, ids in found.items())
    return found


def test_what_lies_there_is_not_written_again(tmp_path: Path) -> None:
    writer, second = Writer(), Shelf(tmp_path)
    first = taken(Shelf(tmp_path), writer)
    assert taken(second, writer).keys() == first.keys() == KEYS.keys()
    assert writer.wrote == [2, 5, 7] and second.read == 3


def test_a_damaged_batch_is_written_again(tmp_path: Path) -> None:
    writer, path = Writer(), tmp_path / f"{START}{KEYS[5]}.safetensors"
    taken(Shelf(tmp_path), writer)
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    taken(Shelf(tmp_path), writer)
    assert writer.wrote == [2, 5, 7, 5]


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
    for age, n in enumerate((2, 5)):
        shelf.store(KEYS[n], ids)
        os.utime(tmp_path / f"{START}{KEYS[n]}.safetensors", (age, age))
    os.utime(tmp_path / f"{START}{KEYS[2]}.safetensors", (9, 9))  # read again
    shelf.store(KEYS[7], ids)
    assert [n for n in KEYS if shelf.load(KEYS[n]) is not None] == [2, 7]


def theirs(folder: Path) -> dict[str, bytes]:
    """Files that a user has in a folder that is then named as the shelf, all of them old."""
    found = {
        "model.safetensors": bytes(5000),
        f"{'a' * 64}.safetensors": bytes(5000),
        "notes.tmp": b"mine",
        f"{'b' * 64}.safetensors.0123456789ab.tmp": b"mine",
        "deep/notes.tmp": b"mine",
    }
    for name, data in found.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
        os.utime(folder / name, (0, 0))
    return found


@pytest.mark.parametrize("most", [0, 100, 10**6])
def test_files_of_the_user_stay_whatever_their_names(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST", most)
    kept = theirs(tmp_path)
    taken(Shelf(tmp_path), Writer())
    assert {name: (tmp_path / name).read_bytes() for name in kept} == kept
    ours = {path.name for path in tmp_path.glob("*.safetensors")} - set(kept)
    assert len(ours) == (3 if most > 1000 else 0)


def test_a_batch_of_another_shape_is_written_again(tmp_path: Path) -> None:
    """Whoever can write there can make one that is whole."""
    shelf = Shelf(tmp_path, lambda ids: ids.shape == (2, 3))
    taken(shelf, Writer())
    Shelf(tmp_path).store(KEYS[5], torch.zeros(1, 3, dtype=torch.int32))
    writer = Writer()
    taken(shelf, writer)
    assert writer.wrote == [5]


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
