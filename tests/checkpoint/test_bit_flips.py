"""Every file of every kind of output is covered by its manifest, and the manifest by itself: any
flipped bit is found by what `blr verify` runs. Journals of interrupted runs likewise."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from exporting import compress_to, export_to
from flipping import every_flip_is_found
from heal_models import QUIET, compress_pico, save_dense, write_text
from pico import save_pico

from blr.compressor.commands.heal import heal
from blr.compressor.recipe.settings import HealOptions
from blr.compressor.workspace.journal import Journal, layer_key

Make = Callable[[Path], Path]


def _compressed(model: str, **settings: object) -> Make:
    return lambda folder: compress_to(
        save_pico(model, folder / "dense"), folder / "compressed", **settings
    )


def _exported(make: Make, **options: object) -> Make:
    return lambda folder: export_to(make(folder), folder / "exported", **options)


def _healed(folder: Path) -> Path:
    dense = save_dense(folder / "dense")
    small = compress_pico(dense, folder / "compressed", "svd")
    options = {"window": 16, "batch": 64, "steps": 2, "device": "cpu"}
    data = (str(write_text(folder / "text.txt", 1000)),)
    heal(
        small, dense, folder / "healed", HealOptions("compressed", "dense", data=data, **options), QUIET
    )
    return folder / "healed"


SVD = _compressed("llama", method="svd", cf=1.25)
KINDS: dict[str, Make] = {
    "svd": SVD,
    "monarch": _compressed("llama", method="monarch", cf=1.25, blocks=4),
    "blast": _compressed("llama", method="blast", cf=1.25, blocks=4, rounds=2),
    "ks": _compressed("llama", method="ks", cf=1.25),
    "corrected": _compressed("llama", method="svd", base="int2", rank=4, group=32),
    "export": _exported(SVD),
    "int4 export": _exported(SVD, quantize="int4", quantize_head="int8"),
    "dense export": _exported(lambda folder: save_pico("llama-tied", folder / "dense")),
    "healed": _healed,
    "dense again": _exported(SVD, kind="dense"),
    "encoder export": _exported(_compressed("bert", method="svd", cf=1.25)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_flipped_bit_is_found(kind: str, tmp_path: Path) -> None:
    every_flip_is_found(KINDS[kind](tmp_path))


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """Two layers of equal shape."""
    kept = Journal(tmp_path)
    for name in "ab":
        torch.manual_seed(ord(name))
        tensors = {"U": torch.randn(4, 2), "V": torch.randn(3, 2)}
        record = {"type": name, "error": 0.25, "notes": ["naïve"], "spec": {"rank": 2}}
        kept.store(layer_key(module=name), tensors, record)
    return kept


def test_a_flipped_bit_in_a_journal_is_a_layer_to_do_again(journal: Journal) -> None:
    key = layer_key(module="a")
    whole, read = journal.load(key), journal.tensors(key)
    path = journal.folder / f"{key}.safetensors"
    data, done_again = path.read_bytes(), 0
    for bit in range(0, 8 * len(data), 5):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        assert journal.load(key) in (None, whole), bit  # the same: \\u00EF for \\u00ef
        done_again += journal.load(key) is None
    path.write_bytes(data)
    assert journal.load(key) == whole and whole is not None
    assert done_again > 0.99 * 8 * len(data) / 5
    assert whole[1]["notes"] == ["naïve"] and read["U"].shape == (4, 2)


def test_layers_that_changed_places_are_done_again(journal: Journal) -> None:
    one, two = (journal.folder / f"{layer_key(module=name)}.safetensors" for name in "ab")
    shutil.move(one, journal.folder / "aside")
    shutil.move(two, one)
    shutil.move(journal.folder / "aside", two)
    assert [journal.load(layer_key(module=name)) for name in "ab"] == [None, None]
