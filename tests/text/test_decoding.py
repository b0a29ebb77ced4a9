"""A cache written in place gives the tokens of transformers' own, for models that allow it; graphs are
believed where they give what the modules give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from pico import MODELS, MORE, small
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from blr.compressor.base.errors import CapabilityError
from blr.compressor.text import decoding, own
from blr.compressor.text.decoding import StaticReader, StaticReading, can_be_static
from blr.compressor.text.own import OwnText, continued, draw

LENGTH, BUCKET = 30, 8
WANTED = OwnText(tokens=100, length=LENGTH, seed=0, author="a")
SIZES = {
    **{"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_layers": 2, "num_heads": 4},
    **{"attention_types": [[["global", "local"], 1]], "window_size": 9, "n_embd": 32},
    **{"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "max_position_embeddings": 64},
}
ALLOWED = ("llama", "qwen2", "gpt2", "opt", "qwen3-moe")
REFUSED = ("mistral", "gemma3", "gpt_neo", "mamba", "jamba", "bloom", "rwkv")  # the first two by windows


@pytest.fixture(autouse=True)
def of_small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "BUCKET", BUCKET)
    monkeypatch.setattr(decoding, "DEVICES", ("cpu",))


def pico(name: str, **changed: Any) -> Any:
    """A model whose tokens depend on all before them."""
    torch.manual_seed(0)
    known = {**MODELS, **MORE}.get(name)
    if known is None:
        config = small(transformers.CONFIG_MAPPING[name](), SIZES)
        model = transformers.AutoModelForCausalLM.from_config(config)
    else:
        config = getattr(transformers, known[0])(**{**known[1], **changed})
        model = getattr(transformers, known[2])(config)
    for parameter in model.parameters():
        parameter.requires_grad_(False).add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def prompts(rows: int = 5, length: int = 3) -> Tensor:
    return torch.randint(5, 100, (rows, length), generator=torch.Generator().manual_seed(1))


def as_it_is(model: Any, ids: Tensor, wanted: OwnText = WANTED) -> Tensor:
    with torch.inference_mode():
        return own._continued_as_it_is(model, ids, torch.Generator().manual_seed(0), wanted)


@pytest.mark.parametrize("name", ALLOWED)
def test_tokens_are_those_of_transformers_cache(name: str) -> None:
    model, reading = pico(name), StaticReading(pico(name), LENGTH)
    for length in (1, 3, BUCKET, BUCKET + 1):
        ids = prompts(length=length)
        found = continued(model, ids, 0, WANTED, reading)
        assert reading.rows == 5 and found.dtype == torch.int32
        assert torch.equal(found, as_it_is(model, ids))


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_read_as_they_are(name: str) -> None:
    model = pico(name)
    with StaticReading(model, LENGTH) as reading:
        found = continued(model, prompts(), 0, WANTED, reading)
        assert reading.allowed is False and reading.rows is None
    assert torch.equal(found, as_it_is(model, prompts()))


@pytest.mark.parametrize(("window", "allowed"), [(LENGTH, True), (LENGTH - 1, False)])
def test_a_window_is_none_for_shorter_samples(window: int, allowed: bool) -> None:
    model = pico("mistral", sliding_window=window)
    assert can_be_static(model, LENGTH) == allowed
    assert torch.equal(continued(model, prompts(), 0, WANTED), as_it_is(model, prompts()))


def test_on_a_cpu_models_are_read_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "DEVICES", ("cuda",))
    assert StaticReading(pico("llama"), LENGTH).reader(2) is None


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("shared", [1, 3])
def test_queries_that_share_a_key_attend_as_if_it_were_copied(tokens: int, shared: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 2 * shared, tokens, 8)
    key, value = torch.randn(2, 2, 2, 5, 8)
    mask = torch.where(torch.randn(1, 1, tokens, 5) > 1, torch.finfo(torch.float32).min, 0.0)
    wide = (states.repeat_interleave(shared, 1) for states in (key, value))
    expected = scaled_dot_product_attention(query, *wide, attn_mask=mask, scale=0.3).transpose(1, 2)
    found, _ = decoding._attend(None, query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(found, expected)


def test_attention_is_packed_only_meanwhile() -> None:
    model = pico("llama")
    with pytest.raises(ZeroDivisionError), decoding.packed_heads(model):
        assert model.config._attn_implementation == decoding.PACKED
        _ = 1 / 0
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("length", [1, 2, BUCKET, BUCKET + 1])
def test_samples_may_be_short(length: int) -> None:
    model, wanted = pico("llama"), OwnText(10, length, 0, "a")
    assert can_be_static(model, length) == (length > 1)
    found = continued(model, prompts(), 0, wanted)
    assert torch.equal(found, as_it_is(model, prompts(), wanted)) and found.shape == (5, length)


def test_a_reader_serves_batch_after_batch() -> None:
    model = pico("llama")
    with StaticReading(model, LENGTH) as reading:
        first = continued(model, prompts(), 0, WANTED, reading)
        held = reading.held
        assert (
            held is not None and held.cache[decoding.cache_name(model)].layers[0].keys.shape[2] == LENGTH
        )
        continued(model, prompts(length=7), 1, WANTED, reading)
        assert torch.equal(continued(model, prompts(), 0, WANTED, reading), first)
        assert reading.held is held
        continued(model, prompts(4), 0, WANTED, reading)
        assert reading.rows == 4
    assert reading.held is None


def test_where_memory_runs_out_samples_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, parts = pico("llama"), []
    read = StaticReader.read

    def of_little_room(self: StaticReader, fresh: Tensor) -> Tensor:
        parts.append(self.rows)
        if self.rows > 2 and self.filled > 9:
            raise torch.OutOfMemoryError
        return read(self, fresh)

    monkeypatch.setattr(StaticReader, "read", of_little_room)
    with StaticReading(model, LENGTH) as reading:
        found = continued(model, prompts(4), 0, WANTED, reading)
        assert reading.rows == 2 and sorted(set(parts)) == [2, 4]
        assert torch.equal(continued(model, prompts(4), 0, WANTED, reading), found)


def test_want_of_memory_refuses_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for error, raised in (
        (torch.OutOfMemoryError("of a GPU"), torch.OutOfMemoryError),
        (RuntimeError("can't start new thread"), CapabilityError),
    ):
        monkeypatch.setattr(decoding, "_tried", raising(error))
        with pytest.raises(raised):
            can_be_static(pico("llama"), LENGTH)
    monkeypatch.setattr(decoding, "_tried", raising(RuntimeError("a mask of another shape")))
    assert not can_be_static(pico("llama"), LENGTH)


def raising(error: Exception) -> Callable[..., Any]:
    def function(*_: Any) -> Any:
        raise error

    return function


class Graph:
    """What a captured graph is to a reader: repeats a pass over the same tensors; `frozen`: with the
    token of its capture, as if a model's own code had kept it on the host."""

    frozen = False

    def __init__(self, reader: StaticReader) -> None:
        self.reader, self.reach = reader, reader.place.reach
        self.token, self.replays = reader.token.clone(), 0

    def __call__(self) -> None:
        self.replays += 1
        assert self.reader.place.reach == self.reach
        self.reader._pass(self.token if self.frozen else self.reader.token)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """Graphs that readers captured."""
    graphs: list[Graph] = []

    def capture(self: StaticReader, reach: int) -> None:
        graphs.append(Graph(self))
        self.graphs[reach] = graphs[-1]

    monkeypatch.setattr(StaticReader, "_capture", capture)
    return graphs


def capturing_reading(model: Any, rows: int) -> StaticReading:
    reading = StaticReading(model, LENGTH)
    reading.allowed, reading.held = True, StaticReader(model, rows, LENGTH, captures=True)
    return reading


def test_each_bucket_has_a_graph_that_serves_all_batches(made: list[Graph]) -> None:
    model = pico("llama")
    reading = capturing_reading(model, 5)
    for number in range(2):
        assert torch.equal(continued(model, prompts(), 0, WANTED, reading), as_it_is(model, prompts()))
        assert [graph.reach for graph in made] == [8, 16, 24, LENGTH]
        # of positions 3 to 28, the first of each bucket not by a graph the first time
        assert sum(graph.replays for graph in made) == (26 - 4 if number == 0 else 22 + 26)


def test_a_graph_that_repeats_what_the_host_knew_is_given_up(
    made: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Graph, "frozen", True)
    model = pico("llama")
    reading = capturing_reading(model, 5)
    for _ in range(2):
        assert torch.equal(continued(model, prompts(), 0, WANTED, reading), as_it_is(model, prompts()))
        assert [graph.replays for graph in made] == [2]
        assert reading.held is not None and not reading.held.captures and not reading.held.graphs


@pytest.mark.parametrize("said", ["operation not permitted", "CUDA out of memory."])
def test_what_cannot_be_captured_is_read_by_calls(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = pico("llama")
    reading = capturing_reading(model, 1)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", raising(RuntimeError(said)))
    if "memory" in said:
        with pytest.raises(torch.OutOfMemoryError):
            continued(model, prompts(1), 0, WANTED, reading)
    else:
        found = continued(model, prompts(1), 0, WANTED, reading)
        assert torch.equal(found, as_it_is(model, prompts(1)))
    assert reading.held is None or not reading.held.captures


def test_what_is_drawn_is_what_torch_draws() -> None:
    p = torch.rand(50, 300, generator=torch.Generator().manual_seed(0)).softmax(-1)
    likely = p.masked_fill(p < 0.999 / 300, 0.0)
    expected = torch.multinomial(likely, 1, generator=torch.Generator().manual_seed(2))
    assert torch.equal(draw(p, torch.Generator().manual_seed(2)), expected)
