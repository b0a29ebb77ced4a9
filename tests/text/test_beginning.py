"""Windows begin as the tokenizer begins a text, wherever blr reads one; no loss counts the beginning."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from calibrating import block_model
from heal_models import QUIET, compress_pico, save_characters, save_dense, write_text
from pico import save_pico
from running import Invoke
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, LlamaTokenizer

from blr.compressor.base.errors import InputError
from blr.compressor.checkpoint.source import open_source
from blr.compressor.commands.compress import Settings, compress
from blr.compressor.commands.evaluate import perplexity, pooled, read_tokens
from blr.compressor.commands.heal import heal
from blr.compressor.commands.text_scores import text_scores
from blr.compressor.fitting import engine
from blr.compressor.fitting.block_passes import Batch
from blr.compressor.fitting.refit import Finishing
from blr.compressor.fitting.sensitivity import _loss
from blr.compressor.healing.data import Reading, make_data
from blr.compressor.healing.objective import Objective
from blr.compressor.loading.load import load_model, load_tokenizer
from blr.compressor.loading.sentences import Sentences
from blr.compressor.output.loss import computing, file_text, own_text
from blr.compressor.recipe.schema import Recipe
from blr.compressor.recipe.settings import HealOptions, check_options
from blr.compressor.text.own import OwnText, write_own_text
from blr.compressor.text.reading import Calibration, beginning_of, read_calibration
from blr.compressor.text.windows import Stream
from blr.compressor.workspace.journal import Journal

NONE, BOS, END, BOTH, SEVERAL = "$A", "{$A", "$A}", "{$A}", "{|$A"
BEGINNINGS = {NONE: (), BOS: (123,), END: (), BOTH: (123,), SEVERAL: (123, 124)}
ENCODER = {"task": "AutoModel", "dtype": "float32", "device": "cpu"}
ALL = pytest.mark.parametrize("around", BEGINNINGS)


def tokenizer_of(folder: Path, around: str, **settings: object) -> Any:
    save_characters(folder, around=around, **settings)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A pico decoder whose tokenizer puts `around` around texts."""
    found: dict[str, Path] = {}

    def make(around: str) -> Path:
        if around not in found:
            folder = tmp_path_factory.mktemp("dense") / "dense"
            found[around] = save_dense(folder, around=around)
        return found[around]

    return make


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt", 1500)


@ALL
def test_a_beginning_is_what_the_tokenizer_puts_before_a_text(around: str, tmp_path: Path) -> None:
    assert beginning_of(tokenizer_of(tmp_path, around)) == BEGINNINGS[around]


def test_what_is_called_bos_does_not_decide(tmp_path: Path) -> None:
    """A token that is named, and one that the tokenizer puts there, are not always the same."""
    named = tokenizer_of(tmp_path / "other", BOS, bos_token="~")
    assert named.bos_token_id == 126 and beginning_of(named) == (123,)
    assert beginning_of(tokenizer_of(tmp_path / "none", NONE, bos_token="~")) == ()


@pytest.mark.parametrize("adds", [False, True])
def test_settings_of_the_tokenizer_decide(adds: bool, tmp_path: Path) -> None:
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{n:02X}>": n + 3 for n in range(256)}}
    tokenizer = LlamaTokenizer(vocab=vocabulary, merges=[], add_bos_token=adds)
    tokenizer.save_pretrained(tmp_path)
    assert beginning_of(AutoTokenizer.from_pretrained(tmp_path)) == ((1,) if adds else ())


@ALL
def test_every_window_of_a_calibration_begins_so(around: str, text: Path, tmp_path: Path) -> None:
    p, beginning = len(BEGINNINGS[around]), list(BEGINNINGS[around])
    plain, found = (
        read_calibration(str(text), tokenizer_of(tmp_path / n, a), samples=20, seq_len=16, packed=True)
        for n, a in (("plain", NONE), ("found", around))
    )
    rows = torch.cat(found.ids)
    assert rows.shape == (20, 16) and found.tokens == 20 * 16
    assert rows[:, :p].tolist() == [beginning] * 20
    written = list(map(ord, text.read_text()))
    assert rows[:, p:].flatten().tolist() == written[: 20 * (16 - p)], "the text goes on behind it"
    assert found.idle == max(p - 1, 0)
    assert (found.digest == plain.digest) == (p == 0), "a run goes on only from the same windows"


def test_a_window_has_room_for_text(text: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, SEVERAL)
    with pytest.raises(InputError, match=r"a window of 2 tokens, .* begins every text with 2; expected"):
        read_calibration(str(text), tokenizer, samples=4, seq_len=2, packed=True)


@pytest.mark.parametrize("rows", [torch.arange(95)[None], torch.arange(96).view(8, 12)])
@pytest.mark.parametrize("beginning", [(), (100,), (100, 101, 102)])
def test_every_window_of_a_stream_begins_so(rows: Tensor, beginning: tuple[int, ...]) -> None:
    """Those that are held back, and those whose tokens are varied, too."""
    p = len(beginning)
    stream = Stream(rows, 10, 3, 0.9, beginning)
    for windows in (stream.held, stream.take(0, 6 * len(stream))):
        assert windows.shape[1] == 10 and windows.dtype == torch.int64
        assert windows[:, :p].tolist() == [list(beginning)] * len(windows)
        assert int(windows[:, p:].max()) < 100
    assert (stream.held[:, p:].diff() == 1).all(), "they are of one piece"
    assert stream.row_tokens == 10


@pytest.mark.parametrize("stride", [16, 5])
@ALL
def test_perplexity_is_that_of_the_text_behind_the_beginning(
    around: str, stride: int, made: Callable[[str], Path], text: Path
) -> None:
    folder, beginning = made(around), BEGINNINGS[around]
    model = load_model(folder, "AutoModelForCausalLM", dtype="float32", device="cpu")
    ids = read_tokens(text, load_tokenizer(folder), 100)
    found = perplexity(text_scores(model, ids, 16, stride, 4, QUIET, beginning))
    losses, p = dict[int, float](), len(beginning)
    for start in range(0, 100, min(stride, 16 - p)):
        row = torch.cat([torch.tensor(beginning, dtype=torch.long), ids[start : start + 16 - p]])
        with torch.no_grad():
            told = model(row[None]).logits[0].log_softmax(-1)
        for n in range(max(p, 1), len(row)):
            losses.setdefault(start + n - p, -float(told[n - 1, row[n]]))
    expected = math.exp(sum(losses.values()) / len(losses))
    assert found["perplexity"] == pytest.approx(expected, rel=1e-4)
    assert found["tokens"] == len(losses)
    assert not p or found["tokens"] == 100, "with something before it, every token is counted"


@pytest.mark.parametrize(
    ("around", "options", "said"),
    [
        (NONE, (), "every token, in windows of 16, but the first of each"),
        (NONE, ("--stride", "4"), "every token, in windows of 16, but the first of the text"),
        (
            SEVERAL,
            (),
            "every token of the text, in windows of 16 that each begin with { |, which is not counted",
        ),
    ],
    ids=["none", "stride", "several"],
)
def test_eval_says_how_it_counts(
    around: str, options: tuple[str, ...], said: str, made: Callable[[str], Path], text: Path,
    invoke: Invoke,
) -> None:  # fmt: skip
    command = ("eval", made(around), "--text", text, "--window", 16, "--max-tokens", 90, *options)
    assert f"counted: {said}" in invoke(*command)[1].splitlines()
    found = json.loads(invoke(*command, "--format", "json")[1])
    assert (found["counted"], found["beginning"]) == (said, list(BEGINNINGS[around]))


def test_a_window_beyond_the_context_is_a_limit_of_the_model(
    made: Callable[[str], Path], text: Path, invoke: Invoke
) -> None:
    """Exit code 9, as of `generate`."""
    code, _, said = invoke("eval", made(NONE), "--text", text, "--window", 100_000)
    assert code == 9
    assert "window 100000 is longer than the model's context of" in said


TEMPLATE = "{% for m in messages %}<{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("template", [None, TEMPLATE, "{{" + "'{'}}" + TEMPLATE], ids=str)
@ALL
def test_own_text_begins_so(
    around: str, template: str | None, made: Callable[[str], Path], tmp_path: Path
) -> None:
    """Chats too, whether their template writes it or not; it is there once."""
    folder, beginning = made(around), list(BEGINNINGS[around])
    model = load_model(folder, "AutoModelForCausalLM", dtype="float32", device="cpu")
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = template
    rows = write_own_text(model, tokenizer, OwnText(40 * 12, 12, 0, "a"), Journal(tmp_path), QUIET)
    assert rows[:, : len(beginning)].tolist() == [beginning] * 40
    if template is not None and around == BOS:
        assert {tuple(row[:2].tolist()) for row in rows[32:]} == {(123, ord("<"))}


@pytest.mark.parametrize("mix", [0.0, 0.5])
def test_a_calibration_of_own_text_begins_so(
    mix: float, made: Callable[[str], Path], text: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    seen, read = list[Calibration](), engine._read
    monkeypatch.setattr(engine, "_read", lambda *a: seen.append(read(*a)) or seen[-1])
    recipe = Recipe(method="svd", cf=1.5, samples=8, seq_len=16, mix=mix)
    settings = Settings("dense", device="cpu", calibration=str(text) if mix else "self")
    compress(made(SEVERAL), recipe, tmp_path / "out", settings, QUIET)
    rows = torch.cat(seen[0].ids)
    assert rows.shape == (8, 16) and rows[:, :2].tolist() == [[123, 124]] * 8
    assert seen[0].idle == 1 and not (rows[:, 2:4] == torch.tensor([123, 124])).all(1).any()


def test_healing_reads_windows_that_begin_so(made: Callable[[str], Path], text: Path) -> None:
    options = check_options(HealOptions("c", "d", data=(str(text),), window=16, batch=64, steps=2))
    found = {}
    for around in (NONE, BOS):
        tokenizer = load_tokenizer(made(around))
        beginning = beginning_of(tokenizer)

        def write(tokens: int, length: int, beginning: tuple[int, ...] = beginning) -> Tensor:
            rows = torch.randint(50, (8, length), dtype=torch.int32)
            rows[:, : len(beginning)] = torch.tensor(beginning, dtype=torch.int32)
            return rows

        torch.manual_seed(0)
        reading = Reading(tokenizer, 16, 64, beginning=beginning)
        found[around] = make_data(reading, options, 1000, False, write)
    plain, begun = found[NONE], found[BOS]
    assert (begun.take(0)[:, 0] == 123).all() and not (plain.take(0) == 123).any()
    assert not (begun.take(0)[:, 1:] == 123).any() and begun.take(0).shape == (4, 16)
    assert plain.digest != begun.digest and begun.tokens == plain.tokens == 64


def test_healing_counts_no_prediction_of_a_beginning(made: Callable[[str], Path]) -> None:
    dense = made(SEVERAL)
    student, teacher = (
        load_model(folder, "AutoModelForCausalLM", dtype="float32", device="cpu")
        for folder in (compress_pico(dense, dense.parent / "counted"), dense)
    )
    pair: Any = SimpleNamespace(student=student, teacher=teacher, device=torch.device("cpu"))
    windows = torch.arange(2, 26).view(2, 12)
    options = HealOptions("c", loss="lm")
    found = Objective(pair, options, windows[:1], idle=1)
    with torch.no_grad():
        told = student(windows).logits.log_softmax(-1)[:, 1:-1]
        losses = -told.gather(-1, windows[:, 2:, None])
        assert float(found(windows)) == pytest.approx(float(losses.sum()), rel=1e-4)
    assert found.scored(12) == 10
    assert found.merit(windows)["student"] == pytest.approx(float(losses.mean()), rel=1e-4)


def test_a_healing_of_such_a_model_runs(made: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    dense = made(SEVERAL)
    smaller = compress_pico(dense, tmp_path / "smaller")
    options = HealOptions("c", "d", data=(str(text),), window=16, batch=64, steps=8, device="cpu")
    summary = heal(smaller, dense, tmp_path / "out", check_options(options), QUIET)
    assert summary.after["text.txt"]["kl"] <= summary.before["text.txt"]["kl"]


def test_fits_count_no_prediction_of_a_beginning(tmp_path: Path) -> None:
    """What a layer's outputs matter for, and what the last pass trains all blocks for."""
    model = block_model("llama", tmp_path)
    ids = torch.arange(2, 26).view(2, 12)
    (batch,) = model.start(Calibration([ids], [torch.ones_like(ids)], idle=3))
    assert isinstance(batch, Batch) and batch.idle == 3
    hidden = batch.hidden.clone().requires_grad_(True)
    _loss(model, hidden, batch, torch.Generator().manual_seed(0)).backward()
    assert hidden.grad is not None
    assert (hidden.grad[:, :3] == 0).all() and (hidden.grad[:, 3:].abs().sum(-1) > 0).all()
    steps: Any = SimpleNamespace(model=model, block=model.load_block(0), device=torch.device("cpu"))
    target = hidden.detach()
    other = torch.cat([torch.randn_like(target[:, :3]), target[:, 3:]], 1)
    losses = [Finishing._loss(steps, batch, target, to, 24) for to in (target, other)]
    assert losses[0] > 0 and torch.equal(*losses)


@ALL
def test_what_an_output_is_judged_by_begins_so(
    around: str, made: Callable[[str], Path], text: Path
) -> None:
    source, beginning = open_source(made(around)), list(BEGINNINGS[around])
    for found in (own_text(computing(source), source), file_text(text, source)):
        rows = found.windows
        assert rows[:, : len(beginning)].tolist() == [beginning] * len(rows)
        assert rows.shape[1] == 64 and found.tokens == len(rows) * (64 - len(beginning))


def test_a_beginning_that_the_model_has_not_is_told(tmp_path: Path) -> None:
    """Where it writes its own text; what it reads is compared as a whole."""
    folder = save_dense(tmp_path / "dense", around=BOS)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    kept = {name: t[:100].clone() if len(t) == 128 else t for name, t in tensors.items()}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    model = load_model(folder, "AutoModelForCausalLM", dtype="float32", device="cpu")
    with pytest.raises(InputError, match="found token 123 of its tokenizer for a model with 100"):
        own_text(computing(source := open_source(folder)), source)
    with pytest.raises(InputError, match="found token 123 of its tokenizer for a model with 100"):
        write_own_text(model, load_tokenizer(folder), OwnText(99, 9, 0, "a"), Journal(tmp_path), QUIET)


def test_an_export_of_a_model_without_a_tokenizer_is_judged(tmp_path: Path) -> None:
    source = open_source(save_pico("llama", tmp_path))
    assert own_text(computing(source), source).windows.shape == (16, 64)


def test_sentences_are_read_with_all_that_is_put_around_them(tmp_path: Path) -> None:
    """In a calibration, in healing, and where embeddings are judged."""
    tokenizer = tokenizer_of(tmp_path, BOTH, pad_token="~")
    lines = [f"{chr(97 + n)} sentence" for n in range(20)]
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(lines))
    found = read_calibration(str(path), tokenizer, samples=20, seq_len=32, packed=False)
    stream = Reading(tokenizer, 12, 12, Sentences()).sentence_stream(lines, 0, "text")
    assert found.idle == 0
    for rows in (*found.ids, stream.rows, stream.held):
        assert (rows[:, 0] == 123).all() and (rows[:, 11] == 125).all() and rows.shape[1] == 12
    model, seen = load_model(save_pico("bert", tmp_path), **ENCODER), list[Tensor]()
    model.register_forward_pre_hook(
        lambda _, args, given: seen.append(given["input_ids"]), with_kwargs=True
    )
    pooled(model, tokenizer, Sentences(), lines)
    assert (seen[0][:, 0] == 123).all() and (seen[0][:, 11] == 125).all()
