"""A teacher that the student did not come from is refused: told by tensors and tokens of both models."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import log
from pathlib import Path

import pytest
import torch
from heal_models import QUIET, save_characters, save_dense
from pico import MODELS, VOCAB, save_model
from running import Invoke
from safetensors.torch import load_file, save_file

from blr.compressor.base.errors import InputError, UsageError
from blr.compressor.commands.heal import heal
from blr.compressor.exporting.origin import open_checkpoint
from blr.compressor.healing import teacher as kinship
from blr.compressor.healing.teacher import first_loss, named_teacher, strangeness
from blr.compressor.recipe.settings import HealOptions
from blr.compressor.workspace.manifest import read_manifest

Change = Callable[[torch.Tensor], torch.Tensor]
TABLE = "model.embed_tokens.weight"
SHORT = {"window": 16, "batch": 64, "own_tokens": 400, "steps": 1, "device": "cpu", "check": False}
OPTIONS = HealOptions("compressed", "dense", **SHORT)
FORCED = HealOptions("compressed", "dense", **SHORT, force=True)
COMMAND = ("--window", 16, "--batch", 64, "--own-tokens", 400, "--steps", 1, "--device", "cpu")


def with_table(folder: Path, change: Change, name: str = TABLE) -> Path:
    """A dense model whose embeddings are `change` of what the student's are, called `name`."""
    dense = save_dense(folder / "other")
    tensors = load_file(dense / "model.safetensors")
    table = change(tensors.pop(TABLE))
    save_file({**tensors, name: table}, dense / "model.safetensors")
    return dense


def said_of(student: Path, teacher: Path) -> str | None:
    return strangeness(open_checkpoint(student), open_checkpoint(teacher))


def random_like(table: torch.Tensor) -> torch.Tensor:
    return torch.randn(table.shape, generator=torch.Generator().manual_seed(5))


def trained_further(table: torch.Tensor) -> torch.Tensor:
    return table + 0.2 * table.std() * random_like(table)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_other_random_embeddings_are_told(scale: float, compressed: Path, tmp_path: Path) -> None:
    said = said_of(compressed, with_table(tmp_path, lambda table: scale * random_like(table)))
    assert said is not None and TABLE in said


@pytest.mark.parametrize(
    "change",
    [lambda table: table, lambda table: table.bfloat16(), trained_further],
    ids=["the same", "in another dtype", "trained further"],
)
def test_a_teacher_that_may_be_right_is_not(change: Change, compressed: Path, tmp_path: Path) -> None:
    assert said_of(compressed, with_table(tmp_path, change)) is None


@pytest.mark.parametrize("name", ["lm_head.weight", "language_model.embed_tokens.weight"])
def test_nor_one_that_stores_them_under_another_name(
    name: str, compressed: Path, tmp_path: Path
) -> None:
    """A tied table is the head's as well; names may have a prefix."""
    stored = with_table(tmp_path, lambda table: table, name)
    entries = open_checkpoint(compressed)
    other = open_checkpoint(save_dense(tmp_path / "plain"))
    tensors = load_file(stored / "model.safetensors")
    assert name in tensors and TABLE not in tensors
    named = {**other.source.entries, name: other.source.entries[TABLE]}
    del named[TABLE]
    object.__setattr__(other.source, "entries", named)
    assert strangeness(entries, other) is None


def of_other_weights(folder: Path) -> Path:
    return with_table(folder, random_like)


def of_other_family(folder: Path) -> Path:
    """A GPT-2 of as many tokens and as wide."""
    return save_dense(folder / "other", "gpt2")


def of_other_width(folder: Path) -> Path:
    name, settings, model = MODELS["llama-tied"]
    save_model(name, {**settings, "hidden_size": 48, "head_dim": 12}, model, folder / "other")
    save_characters(folder / "other")
    return folder / "other"


def of_other_tokens(folder: Path) -> Path:
    other = save_dense(folder / "other")
    save_characters(other, range(VOCAB - 1, -1, -1))
    return other


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (of_other_weights, f"other: {TABLE} is not the compressed model's nor near it"),
        (of_other_family, f"other: {TABLE} is not the compressed model's nor near it"),
        (of_other_width, f"other: no matrix of the sizes .* of the compressed model's {TABLE}"),
        (of_other_tokens, "other: a tokenizer that gives other ids than the compressed model's"),
    ],
)
def test_a_stranger_is_refused_unless_forced(
    make: Callable[[Path], Path], said: str, compressed: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    stranger = make(tmp_path)
    with pytest.raises(InputError, match=rf"{said}.*; expected .* --teacher, or pass --force") as raised:
        heal(compressed, stranger, tmp_path / "out", OPTIONS, QUIET)
    assert "\n" not in str(raised.value) and not list(tmp_path.glob("out*"))
    capsys.readouterr()
    heal(compressed, stranger, tmp_path / "out", FORCED, QUIET)
    assert said.split(":")[1].split()[0] in capsys.readouterr().err.splitlines()[0]
    assert (tmp_path / "out").exists()


def test_the_first_loss_is_a_hint_only() -> None:
    config, half = {"vocab_size": 1000}, 0.5 * log(1000)
    (line,) = first_loss({"self": {"kl": half + 0.1}}, config)
    assert "3.6 nats a token" in line and "--teacher" in line and "--text" in line
    assert first_loss({"self": {"kl": half - 0.1}}, config) == []
    assert first_loss({"t": {"distance": 0.9, "states": 9.0}}, config) == [], "of an encoder"


def test_which_is_not_given_where_the_bytes_are_known(
    compressed: Path, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(kinship, "LOST", 0.0)
    for teacher, lines in ((dense, 0), (with_table(tmp_path, trained_further), 1)):
        heal(compressed, teacher, tmp_path / f"healed-{lines}", OPTIONS, QUIET)
        said = capsys.readouterr().err.splitlines()
        assert ["before training" in line for line in said] == [True] * lines
    digests = [read_manifest(tmp_path / f"healed-{n}")["teacher"]["sha256"] for n in (0, 1)]
    assert digests[0] == read_manifest(compressed)["input_sha256"] != digests[1]


def test_the_teacher_is_that_of_the_manifest(
    compressed: Path, dense: Path, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a healed output as well, beside it and in the current folder."""
    assert named_teacher(compressed).folder == dense.resolve()
    code, out, err = invoke("heal", compressed, *COMMAND, "-o", tmp_path / "out", "--format", "json")
    assert code == 0, err
    assert f"teacher: {dense.resolve()}, as the manifest says" in err and json.loads(out)["steps"] == 1
    assert read_manifest(tmp_path / "out")["teacher"]["name"] == "dense"
    with pytest.raises(UsageError, match="made of dense, which is no folder here or beside it; give"):
        named_teacher(tmp_path / "out")
    monkeypatch.chdir(dense.parent)
    assert named_teacher(tmp_path / "out").folder == dense.resolve()


def test_it_is_asked_for_where_no_manifest_names_it(
    compressed: Path, tmp_path: Path, invoke: Invoke
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in compressed.iterdir():
        if path.name != "blr_manifest.json":
            (copy / path.name).symlink_to(path)
    code, _, err = invoke("heal", copy, *COMMAND, "-o", tmp_path / "out")
    assert code == 2 and err.count("\n") == 1 and "no manifest that names" in err and "--teacher" in err


@pytest.mark.parametrize("name", ["../dense", "/etc", "a/b/c", ""])
def test_a_name_that_leads_elsewhere_is_not_followed(
    name: str, compressed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = {"source": {"name": name, "revision": None}}
    monkeypatch.setattr("blr.compressor.healing.teacher.read_manifest", lambda folder: source)
    with pytest.raises(UsageError, match="--teacher"):
        named_teacher(compressed)
