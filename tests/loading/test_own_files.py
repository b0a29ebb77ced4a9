"""Folders where loading writes: what a user has put there is neither replaced nor removed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from exporting import compress_to
from pico import save_pico
from producing import snapshot

from blr.compressor.base.errors import BlrError
from blr.compressor.loading.resolve import _put
from blr.compressor.workspace.manifest import MANIFEST

Make = Callable[[Path], object]
MINE: dict[str, Make] = {
    "file": lambda path: path.write_text("mine"),
    "longer file": lambda path: path.write_text("theirs and more"),
    "link": lambda path: path.symlink_to(path.parent.parent / "elsewhere"),
    "link to nothing": lambda path: path.symlink_to("nowhere"),
    "FIFO": os.mkfifo,
    "folder": os.mkdir,
}


@pytest.mark.fast
@pytest.mark.parametrize("kind", MINE)
def test_files_of_a_stand_in_take_no_ones_place(kind: str, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("theirs")
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "config.json"
    MINE[kind](path)
    before = snapshot(tmp_path)["in/config.json"]
    with pytest.raises(BlrError, match=r"config\.json"):
        _put(path, b"theirs")
    assert snapshot(tmp_path)["in/config.json"] == before
    assert (tmp_path / "elsewhere").read_text() == "theirs" and len(os.listdir(tmp_path / "in")) == 1


@pytest.mark.fast
def test_files_of_a_stand_in_are_written_once(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "config.json"
    for _ in range(2):  # another process of the run does the same
        _put(path, b"theirs")
    assert path.read_bytes() == b"theirs" and os.listdir(path.parent) == ["config.json"]


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    return compress_to(save_pico("llama-tied", folder / "dense"), folder / "out", method="svd", cf=1.5)


@pytest.mark.parametrize("kind", ["file", "link", "FIFO", "folder", "none of ours"])
def test_a_model_that_is_saved_removes_no_manifest_but_ours(
    kind: str, output: Path, tmp_path: Path
) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(output)
    (tmp_path / "elsewhere").write_bytes((output / MANIFEST).read_bytes())
    (tmp_path / "saved").mkdir()
    path = tmp_path / "saved" / MANIFEST
    {**MINE, "none of ours": lambda path: path.write_text('{"format": 2, "files": {}}')}[kind](path)
    before = snapshot(tmp_path)[f"saved/{MANIFEST}"]
    config.save_pretrained(tmp_path / "saved")
    assert snapshot(tmp_path)[f"saved/{MANIFEST}"] == before
    assert (tmp_path / "elsewhere").exists()
    if kind == "file":
        path.write_bytes((output / MANIFEST).read_bytes())
        config.save_pretrained(tmp_path / "saved")
        assert not path.exists()
