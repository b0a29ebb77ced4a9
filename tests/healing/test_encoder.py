"""Encoders heal: their sentence embeddings come nearer to the dense model's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from heal_models import QUIET, compress_pico, save_characters
from pico import save_pico
from safetensors.torch import load_file
from torch.nn.functional import cosine_similarity

from blr.compressor.base.errors import BlrError
from blr.compressor.commands.heal import heal
from blr.compressor.healing.data import Reading
from blr.compressor.healing.objective import PADDING, Embedding
from blr.compressor.healing.student_and_teacher import load_pair, load_teacher
from blr.compressor.healing.summary import HealSummary
from blr.compressor.loading.load import load_model, load_tokenizer
from blr.compressor.loading.sentences import Sentences, read_sentences
from blr.compressor.recipe.settings import HealOptions

SHORT = {"window": 16, "batch": 128, "steps": 30, "rate": 0.01, "device": "cpu"}
EMBEDS = "AutoModel"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_pico("bert", tmp_path_factory.mktemp("encoder") / "dense")
    save_characters(folder)
    return folder


@pytest.fixture(scope="module")
def smaller(encoder: Path) -> Path:
    return compress_pico(encoder, encoder.parent / "compressed", "svd")


@pytest.fixture(scope="module")
def sentences(encoder: Path) -> Path:
    lines = [chr(97 + n % 26) * (1 + n % 3) + chr(97 + n % 7) * (n % 9) for n in range(80)]
    path = encoder.parent / "sentences.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


def run(smaller: Path, encoder: Path, output: Path, **options: Any) -> HealSummary:
    return heal(smaller, encoder, output, HealOptions("c", "d", **{**SHORT, **options}), QUIET)


def test_embeddings_come_nearer(smaller: Path, encoder: Path, sentences: Path, tmp_path: Path) -> None:
    summary = run(smaller, encoder, tmp_path / "out", data=(str(sentences),))
    before, after = summary.before["sentences.txt"], summary.after["sentences.txt"]
    assert after["distance"] < 0.8 * before["distance"] and after["states"] < before["states"]
    assert summary.tokens < summary.steps * 8 * 16, "padding is no token"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "1 − cosine of the sentence embeddings" in card and "| sentences.txt |" in card
    assert "1 − cosine of embeddings" in (tmp_path / "out" / "report.html").read_text()
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored.keys() == load_file(smaller / "model.safetensors").keys()
    lines = [json.loads(x) for x in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["held"] == summary.before


def test_no_sentence_is_both_trained_on_and_held_back(encoder: Path) -> None:
    tokenizer = load_tokenizer(encoder)
    lines = [chr(97 + n % 26) * (1 + n // 26) for n in range(50)]
    stream = Reading(tokenizer, 16, 16, Sentences()).sentence_stream([*lines, *lines], 0, "text")
    rows = [{tuple(row.tolist()) for row in part} for part in (stream.rows, stream.held)]
    assert rows[0] and rows[1] and not rows[0] & rows[1]


def test_padding_changes_nothing(smaller: Path, encoder: Path) -> None:
    teacher = load_teacher(encoder, torch.device("cpu"), EMBEDS)
    goal = Embedding(load_pair(smaller, teacher, ("factors",), Sentences()), Sentences(), 1.0)
    short = torch.randint(5, 90, (3, 6))
    padded = torch.cat([short, torch.full((3, 4), PADDING)], 1)
    both = torch.cat([padded, torch.randint(5, 90, (1, 10))])
    expected = goal(short)
    torch.testing.assert_close(goal(padded), expected)
    torch.testing.assert_close(goal(both) - goal(both[3:]), expected)


def test_the_distance_is_that_of_the_embeddings(smaller: Path, encoder: Path, sentences: Path) -> None:
    teacher, head = load_teacher(encoder, torch.device("cpu"), EMBEDS), read_sentences(encoder)
    pair = load_pair(smaller, teacher, ("factors",), head)
    lines = sentences.read_text().splitlines()
    stream = Reading(load_tokenizer(encoder), 16, 16, head).sentence_stream(lines, 0, "x")
    found = Embedding(pair, head, 1.0).merit(stream.held)["distance"]
    student = load_model(smaller, EMBEDS, dtype="float32", device="cpu")
    dense = load_model(encoder, EMBEDS, dtype="float32", device="cpu")
    rows = stream.held
    total = 0.0
    with torch.no_grad():
        for row in rows:
            ids = row[row != PADDING][None]
            ours, theirs = (m(ids).last_hidden_state.mean(1) for m in (student, dense))
            total += 1 - float(cosine_similarity(ours, theirs))
    assert found == pytest.approx(total / len(rows), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ({}, 2, "an encoder writes no text of its own; add --text FILE, a sentence a line"),
        ({"data": ("self",)}, 2, "an encoder writes no text of its own"),
        ({"loss": "lm", "text": 80}, 2, "--loss and --top-k are for decoders"),
        ({"vary": 0.1, "text": 80}, 2, "--vary is for decoders"),
        ({"text": 3}, 4, "3 different sentences, expected at least 20"),
    ],
)
def test_refusals(
    options: dict[str, Any], code: int, said: str, smaller: Path, encoder: Path, tmp_path: Path
) -> None:
    if lines := options.get("text"):
        text = "".join(f"{'a' * number}\n" for number in range(1, lines + 1))
        (tmp_path / "text.txt").write_text(text * 2)
        options = {**options, "data": (str(tmp_path / "text.txt"),)}
        del options["text"]
    with pytest.raises(BlrError, match=said) as raised:
        run(smaller, encoder, tmp_path / "out", **options)
    assert raised.value.exit_code == code and not (tmp_path / "out").exists()


def test_other_models_are_refused(tmp_path: Path) -> None:
    dense = save_pico("vit", tmp_path / "dense")
    smaller = compress_pico(dense, tmp_path / "compressed", "svd")
    with pytest.raises(BlrError, match="neither a causal language model nor a plain encoder") as raised:
        run(smaller, dense, tmp_path / "out")
    assert raised.value.exit_code == 9
