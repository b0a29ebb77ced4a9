"""Own text is written once for all runs of a user, shared out between runs; nothing rests on it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from blr.compressor.text import shelf as module
from blr.compressor.text.shelf import Shelf, shelf_folder
from blr.compressor.workspace.journal import layer_key

KEYS = {n: layer_key(batch=n) for n in (2, 5, 7)}
HOLD = """
import sys
from pathlib import Path
from blr.compressor.text.shelf import Shelf
claimed = Shelf(Path(sys.argv[1]))._claimed(sys.argv[2], False)
assert claimed.__enter__()
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
    for age, n in enumerate((2, 5)):
        shelf.store(KEYS[n], ids)
        os.utime(tmp_path / f"{KEYS[n]}.safetensors", (age, age))
    os.utime(tmp_path / f"{KEYS[2]}.safetensors", (9, 9))  # read again
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


@pytest.mark.parametrize("kind", ["file", "link", "link to nothing", "FIFO", "folder"])
def test_what_has_the_name_of_a_batch_or_of_the_list_is_neither_replaced_nor_removed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST", 0)
    (tmp_path / "elsewhere").write_bytes(b"mine")
    make: dict[str, Callable[[Path], object]] = {
        "file": lambda path: path.write_bytes(b"mine"),
        "link": lambda path: path.symlink_to(tmp_path / "elsewhere"),
        "link to nothing": lambda path: path.symlink_to(tmp_path / "nowhere"),
        "FIFO": os.mkfifo,
        "folder": os.mkdir,
    }
    for n, name in enumerate((f"{KEYS[5]}.safetensors", module.LIST, ".lock")):
        folder = tmp_path / str(n)
        folder.mkdir()
        make[kind](folder / name)
        before = os.lstat(folder / name)
        taken(Shelf(folder), Writer())
        after = os.lstat(folder / name)
        assert (after.st_ino, after.st_size, after.st_mode) == (
            before.st_ino,
            before.st_size,
            before.st_mode,
        )
    assert (tmp_path / "elsewhere").read_bytes() == b"mine" and not (tmp_path / "nowhere").exists()


def test_a_list_that_a_full_disk_left_empty_is_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / module.LIST).touch()
    taken(Shelf(tmp_path), Writer())
    assert (tmp_path / module.LIST).read_text().startswith(module.MARK)
    writer = Writer()
    taken(Shelf(tmp_path), writer)
    assert writer.wrote == []


def test_a_link_to_a_listed_batch_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user moved the batch away and put a link there: the link may go, what it leads to stays."""
    shelf, name = Shelf(tmp_path / "shelf"), f"{KEYS[2]}.safetensors"
    taken(shelf, Writer())
    (tmp_path / "shelf" / name).rename(tmp_path / name)
    (tmp_path / "shelf" / name).symlink_to(tmp_path / name)
    os.utime(tmp_path / name, (0, 0))
    monkeypatch.setattr(module, "MOST", 0)
    taken(Shelf(tmp_path / "shelf"), Writer())
    assert (tmp_path / name).stat().st_mtime == 0


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
