"""Own text: drawn from the likelier tokens, the same for the same seed, written once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from heal_models import QUIET

from blr.compressor.healing import data
from blr.compressor.healing.data import Reading
from blr.compressor.loading.load import load_model, load_tokenizer
from blr.compressor.modeling.settings import cache_name
from blr.compressor.recipe.settings import HealOptions, check_options
from blr.compressor.text import own
from blr.compressor.text.own import ROOM, OwnText, draw, write_own_text
from blr.compressor.workspace.journal import Journal

CACHE = cache_name(transformers.LlamaForCausalLM)
WANTED = OwnText(tokens=200, length=20, seed=0, author="a")


@pytest.fixture(scope="module")
def model(dense: Path) -> Any:
    return load_model(dense, "AutoModelForCausalLM", dtype="float32", device="cpu")


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "CPU_BATCH", 4)


def test_no_token_is_drawn_that_is_less_likely_than_by_chance() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(2000, -1)
    drawn = draw(logits.softmax(-1), torch.Generator().manual_seed(0))[:, 0]
    assert sorted(drawn.unique().tolist()) == [0, 1]
    assert float((drawn == 0).float().mean()) == pytest.approx(0.5 / 0.8, abs=0.05)
    even = draw(torch.zeros(2000, 4).softmax(-1), torch.Generator().manual_seed(0))
    assert sorted(even.unique().tolist()) == [0, 1, 2, 3]


def test_the_text_is_the_models_own(model: Any, dense: Path, tmp_path: Path) -> None:
    rows = write_own_text(model, load_tokenizer(dense), WANTED, Kept(tmp_path), QUIET)
    assert rows.shape == (10, 20) and rows.dtype == torch.int32
    with torch.no_grad():
        losses = [
            float(model(ids, labels=ids).loss) for ids in (rows.long(), torch.randint(128, (10, 20)))
        ]
    assert losses[0] < losses[1]


def test_what_is_written_is_not_written_again(
    model: Any, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, calls = Kept(tmp_path), []
    write = own.continued
    monkeypatch.setattr(own, "continued", lambda *a: calls.append(a[2]) or write(*a))
    tokenizer = load_tokenizer(dense)
    first = write_own_text(model, tokenizer, WANTED, journal, QUIET)
    assert calls == [0, 1, 2]
    next(journal.folder.iterdir()).unlink()
    assert torch.equal(write_own_text(model, tokenizer, WANTED, journal, QUIET), first)
    assert len(calls) == 4
    other = write_own_text(model, tokenizer, OwnText(200, 20, 1, "a"), journal, QUIET)
    assert not torch.equal(other, first) and len(calls) == 7


def test_another_run_reads_what_this_model_wrote(
    model: Any, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLR_TEXT_DIR", str(tmp_path / "shelf"))
    calls, write, tokenizer = [], own.continued, load_tokenizer(dense)
    monkeypatch.setattr(own, "continued", lambda *a: calls.append(a[2]) or write(*a))
    first, again = (
        write_own_text(model, tokenizer, WANTED, Kept(tmp_path / name), QUIET) for name in "ab"
    )
    assert torch.equal(first, again) and calls == [0, 1, 2]
    monkeypatch.setattr(model.config, "rope_theta", 7.0, raising=False)  # it answers otherwise now
    write_own_text(model, tokenizer, WANTED, Kept(tmp_path / "c"), QUIET)
    assert len(calls) == 6


def test_where_memory_runs_out_a_batch_is_written_in_parts(
    model: Any, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[int] = []
    write = own._continued

    def of_little_room(model: Any, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        parts.append(len(ids))
        if len(ids) > 2:
            raise torch.OutOfMemoryError
        return write(model, ids, *rest)

    whole = write_own_text(model, load_tokenizer(dense), WANTED, Kept(tmp_path / "whole"), QUIET)
    monkeypatch.setattr(own, "_continued", of_little_room)
    rows = write_own_text(model, load_tokenizer(dense), WANTED, Kept(tmp_path / "parts"), QUIET)
    assert parts == 3 * [4, 2, 2]
    assert rows.shape == whole.shape and torch.equal(rows[:, 0], whole[:, 0])


def test_a_chat_model_opens_every_other_batch_as_its_user(
    model: Any, dense: Path, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(dense)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    rows = write_own_text(model, tokenizer, WANTED, Kept(tmp_path), QUIET)
    opened = ["".join(map(chr, row[:6].tolist())) == "<user>" for row in rows]
    assert opened == [False] * 4 + [True] * 4 + [False] * 2


@pytest.mark.parametrize(
    ("config", "width"),
    [
        (transformers.LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2), 32),
        (transformers.Qwen3Config(num_attention_heads=4, num_key_value_heads=2, head_dim=128), 256),
        (transformers.MambaConfig(hidden_size=64), 64),
        (transformers.Gemma3Config(text_config={"num_key_value_heads": 2, "head_dim": 32}), 64),
    ],
    ids=["llama", "qwen3", "no heads", "of several kinds of input"],
)
def test_batches_are_sized_for_every_kind_of_model(config: Any, width: int) -> None:
    """On a GPU: on a CPU they are all of one size."""
    text = config.get_text_config(decoder=True)
    sample = 2 * text.num_hidden_layers * width * 20 * 2 + 40 * text.vocab_size  # bytes
    model = SimpleNamespace(config=config, dtype=torch.bfloat16)
    assert own._rows_in(5 * sample, model, 20) == 4
    assert own._rows_in(sample / 2, model, 20) == 1


class Forgetful(transformers.LlamaForCausalLM):
    """One that keeps nothing of what it has read, as models do that have a state of their own."""

    def forward(self, input_ids: torch.Tensor, **ignored: Any) -> Any:
        return super().forward(input_ids, use_cache=False)


class Refusing(transformers.LlamaForCausalLM):
    """One that takes caches of its own alone, as MiniMax."""

    def forward(self, input_ids: torch.Tensor, past_key_values: Any = None, **ignored: Any) -> Any:
        if past_key_values is not None:
            raise ValueError("a cache of another kind")
        return super().forward(input_ids, use_cache=False)


class Beginning(transformers.LlamaForCausalLM):
    """One that begins anew with words of its own wherever it is given a cache, as CPM-Ant."""

    def forward(self, input_ids: torch.Tensor, past_key_values: Any = None, **ignored: Any) -> Any:
        if past_key_values is not None:
            input_ids = input_ids[:, -1:] * 0 + 5
        return super().forward(input_ids, **{CACHE: past_key_values})


KEEPS = {transformers.LlamaForCausalLM: True, Forgetful: False, Refusing: False, Beginning: False}


@pytest.mark.parametrize(("kind", "keeps"), KEEPS.items())
@torch.no_grad()
def test_every_token_follows_from_all_before_it(kind: Any, keeps: bool) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 32}
    torch.manual_seed(0)
    model = kind(transformers.LlamaConfig(**sizes, num_attention_heads=2)).eval()
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.3)
    ids = torch.arange(4)[:, None]
    assert own._cached(model, ids) == keeps
    found = own.continued(model, ids, 0, WANTED).long().clone()
    generator = torch.Generator().manual_seed(0)
    for n in range(1, WANTED.length):
        logits = model(input_ids=found[:, :n]).logits[:, -1]
        assert torch.equal(draw(logits.softmax(-1), generator)[:, 0], found[:, n])


class Kept(Journal):
    """One in a folder that is there."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "journal")
        self.folder.mkdir(parents=True)


STEP = 4 * (16 + ROOM)  # tokens of the test's batches
SMALL, LARGE = 135e6, 8e9  # parameters


@pytest.mark.parametrize(
    ("budget", "writer", "expected"),
    [
        ({"minutes": 3.0}, None, data.CPU_OWN),
        ({"minutes": 30.0}, None, data.CPU_OWN),
        ({"minutes": 0.3}, None, round(0.1 * data.CPU_OWN)),
        ({"minutes": 0.001}, None, 3 * (16 + ROOM)),  # to train on and to judge by
        ({"minutes": 0.3}, SMALL, round(18 * data.PACE / SMALL)),
        ({"minutes": 2.0}, SMALL, round(120 * data.PACE / SMALL / data.READS)),
        ({"minutes": 30.0}, SMALL, data.MOST_OWN),
        ({"minutes": 3.0}, LARGE, round(180 * data.PACE / LARGE)),
        ({"minutes": 0.3}, 1000.0, data.GPU_OWN),  # the host is what small models wait for
        ({"steps": 10}, None, 10 * STEP),
        ({"steps": 10}, SMALL, 10 * STEP),
        ({"steps": 10**5}, SMALL, data.GPU_OWN),
        ({"steps": 4 * 10**5}, SMALL, 10**5 * STEP),
        ({"steps": 10**6}, SMALL, data.MOST_OWN),
        ({"epochs": 1.0}, None, data.CPU_OWN),
        ({"minutes": 0.001, "own_tokens": 500}, None, 500),
    ],
    ids=str,
)
def test_no_more_is_written_than_the_budget_reads(
    budget: dict[str, Any], writer: float | None, expected: int
) -> None:
    asked: list[int] = []

    def write(tokens: int, length: int) -> torch.Tensor:
        asked.append(tokens)
        return torch.zeros(8, length, dtype=torch.int32)

    options = check_options(HealOptions("c", "d", window=16, batch=64, **budget))
    data.make_data(Reading(None, 16, 64), options, int(writer or SMALL), writer is not None, write)
    assert asked == [expected]
