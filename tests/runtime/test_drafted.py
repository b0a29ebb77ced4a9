"""A draft changes the speed of a decoder, not what it says."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers
from pico import VOCAB, save_pico
from torch import Tensor
from torch.nn.functional import one_hot

from blr.compressor import register
from blr.compressor.base.errors import NumericsError
from blr.compressor.runtime import plan
from blr.compressor.runtime.decoder import Decoder
from blr.compressor.runtime.drafted import DRAFTS, Acceptance, accept
from blr.compressor.runtime.drafted import DraftedDecoder as Drafted
from blr.compressor.runtime.proposals import Lookup
from blr.compressor.runtime.sampling import Collector, Sampler
from blr.kernels.common.available import has_triton
from blr.kernels.decode.gemv.segments import in_turn

register()

needs_triton = pytest.mark.skipif(not has_triton(), reason="needs triton")


class DraftedDecoder(Drafted):
    """Drafts however slow they are."""

    def __init__(self, *models: Any, **options: Any) -> None:
        super().__init__(*models, **{"choices": DRAFTS, **options})


def changed(model: Any, amount: float, seed: int = 1) -> Any:
    """A model whose weights differ a little, as those of a compressed one."""
    generator = torch.Generator().manual_seed(seed)
    other = type(model)(model.config).eval()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        for weight in other.parameters():
            weight += amount * weight.std() * torch.randn(weight.shape, generator=generator)
    return other


@pytest.fixture(scope="module")
def trained(tiny: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def drafts(trained: Any) -> dict[str, Any]:
    """Models that a dense one agrees with always, often and never."""
    return {"same": trained, "near": changed(trained, 0.1), "far": changed(trained, 3.0)}


@pytest.fixture(scope="module")
def text(tiny: Path, sample: Path) -> Tensor:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    return tokenizer(sample.read_text("utf-8"), return_tensors="pt")["input_ids"]


def ragged(text: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Prompts from several places of a text, of different lengths, padded on the left."""
    ids = torch.stack([text[0, 7 * row : 7 * row + 12] for row in range(rows)])
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : row % 7] = 0
    return ids * mask, mask


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("kind", ["same", "near", "far"])
def test_greedy_tokens_are_those_of_the_model_alone(
    kind: str, rows: int, trained: Any, drafts: dict[str, Any], text: Tensor
) -> None:
    ids, mask = ragged(text, rows)
    options: dict[str, Any] = {"batch": rows, "context": 60, "ops": "torch"}
    drafted = DraftedDecoder(trained, drafts[kind], **options)
    found = drafted.generate(ids, mask, max_new_tokens=48)  # up to the end of the cache
    assert found == Decoder(trained, **options).generate(ids, mask, max_new_tokens=48)
    share = drafted.acceptance.total / drafted.acceptance.drafts
    low, high = {"same": (0.99, 1.0), "near": (0.2, 0.99), "far": (0.0, 0.2)}[kind]
    assert low <= share <= high


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("repeated", [False, True])
def test_text_so_far_as_a_draft(rows: int, repeated: bool, trained: Any, text: Tensor) -> None:
    """Greedy tokens are those of the model alone, up to the end of the cache."""
    ids, mask = ragged(text, rows)
    if repeated:
        ids, mask = torch.cat((ids, ids), 1), torch.cat((mask, torch.ones_like(ids)), 1)
    options: dict[str, Any] = {"batch": rows, "context": 60, "ops": "torch"}
    drafted = DraftedDecoder(trained, None, **options)
    new = 60 - ids.shape[1]
    found = drafted.generate(ids, mask, max_new_tokens=new)
    assert found == Decoder(trained, **options).generate(ids, mask, max_new_tokens=new)
    assert drafted.acceptance.rounds > 0


def test_text_so_far_proposes_what_followed_the_same_tokens() -> None:
    """Of the last place, two tokens alike before one, and round again from the end of the text."""
    place = SimpleNamespace(batch=4, context=12, model=SimpleNamespace(device=torch.device("cpu")))
    place.state = SimpleNamespace(buffers={"logits": torch.zeros(4, 10)})
    lookup = Lookup(cast(Decoder, place))
    rows = [[1, 2, 3, 4, 5, 2, 9, 1], [0, 0, 6, 7, 6, 7, 8, 6], [1, 2, 3, 4, 5, 6, 7, 8]]
    lookup.read(torch.tensor(rows), torch.tensor([8, 6, 8]))
    moving = torch.tensor([[1, 6, 8], [2, 7, 0], [8, 8, 8]])
    greedy = Sampler()
    tokens, likely = lookup.bind(3, 12)(moving, 3, greedy, None)
    assert tokens.T[:2].tolist() == [[3, 4, 5], [8, 6, 7]] and likely is None
    lookup.note(moving[2], torch.tensor([[3, 8, 0], [4, 6, 0], [9, 9, 9]]))
    moving = torch.tensor([[3, 8, 0], [4, 6, 0], [10, 10, 10]])
    tokens, _ = lookup.bind(3, 12)(moving, 3, greedy, None)
    assert tokens.T.tolist() == [[5, 2, 9], [7, 8, 6], [0, 0, 0]]


def test_draws_with_the_text_so_far_follow_the_model() -> None:
    """Chi-square of 50,000 draws: a proposed token was certain."""
    draws, size = 50_000, 6
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(size, generator=generator).square()
    p /= p.sum()
    likely = one_hot(torch.full((1, draws), 2), size).float()
    chances = torch.rand(1, draws, generator=generator)
    noise = torch.empty(draws, size).exponential_(generator=generator)
    drafts = torch.full((1, draws), 2)
    tokens, _ = accept(p.expand(2, draws, size), likely, drafts, chances, noise)
    assert chi_square(tokens[0], p) < LIMIT[size - 1]


def test_a_cache_in_int8(trained: Any, drafts: dict[str, Any], text: Tensor) -> None:
    options: dict[str, Any] = {"batch": 2, "context": 60, "ops": "torch", "cache": "int8"}
    ids, mask = ragged(text, 2)
    found = DraftedDecoder(trained, drafts["near"], **options).generate(ids, mask, max_new_tokens=40)
    assert found == Decoder(trained, **options).generate(ids, mask, max_new_tokens=40)


@pytest.mark.parametrize("length", [1, 2])
def test_prompts_of_one_and_two_tokens(length: int, trained: Any, drafts: dict[str, Any]) -> None:
    ids = torch.tensor([[5, 9]])[:, :length]
    options: dict[str, Any] = {"context": 40, "ops": "torch"}
    found = DraftedDecoder(trained, drafts["near"], **options).generate(ids, max_new_tokens=30)
    assert found == Decoder(trained, **options).generate(ids, max_new_tokens=30)


def test_stop_tokens_and_streaming_are_as_without_a_draft(
    trained: Any, drafts: dict[str, Any], text: Tensor
) -> None:
    ids, mask = ragged(text, 3)
    options: dict[str, Any] = {"batch": 3, "context": 64, "ops": "torch"}
    plain = Decoder(trained, **options).generate(ids, mask, max_new_tokens=40)
    told: list[tuple[int, int]] = []
    found = DraftedDecoder(trained, drafts["near"], **options).generate(
        ids,
        mask,
        max_new_tokens=40,
        stop_ids=[plain[0][9]],
        on_token=lambda row, token: told.append((row, token)),
    )
    for row, tokens in enumerate(plain):
        stop = tokens.index(plain[0][9]) + 1 if plain[0][9] in tokens else 40
        assert found[row] == tokens[:stop] == [token for at, token in told if at == row]


@pytest.mark.parametrize("kind", ["near", None])
def test_draws_are_the_same_under_a_seed(
    kind: str | None, trained: Any, drafts: dict[str, Any], text: Tensor
) -> None:
    drafted = DraftedDecoder(trained, kind and drafts[kind], batch=2, context=60, ops="torch")
    ids, mask = ragged(text, 2)
    draws = [
        drafted.generate(ids, mask, max_new_tokens=20, temperature=0.9, top_k=50, top_p=0.9, seed=seed)
        for seed in (3, 3, 4)
    ]
    assert draws[0] == draws[1] != draws[2]


def test_accepted_and_drawn_tokens_follow_the_model() -> None:
    """Chi-square of 50,000 draws of two tokens each, of which the draft proposes the first."""
    draws, size = 50_000, 6
    generator = torch.Generator().manual_seed(0)
    random = torch.rand(3, size, generator=generator)
    first, second, q = (p / p.sum() for p in random.square())
    wanted = torch.stack((first, second))[:, None].expand(2, draws, size)
    likely = q.expand(1, draws, size)
    drafts = torch.multinomial(q, draws, replacement=True, generator=generator)[None]
    chances = torch.rand(1, draws, generator=generator)
    noise = torch.empty(draws, size).exponential_(generator=generator)
    tokens, count = accept(wanted, likely, drafts, chances, noise)
    assert 0.3 < count.float().mean() < 1
    assert chi_square(tokens[0], first) < LIMIT[size - 1]
    assert chi_square(tokens[1, count == 1], second) < LIMIT[size - 1]


def test_draws_of_a_whole_decoder_follow_the_model(tmp_path: Path) -> None:
    """Chi-square of the second token of 4,000 sequences, given the most frequent first one."""
    model = transformers.AutoModelForCausalLM.from_pretrained(save_pico("llama", tmp_path)).eval()
    draft, ids = changed(model, 0.5), torch.full((8, 3), 7)
    decoder = DraftedDecoder(model, draft, batch=8, context=8, ops="torch")
    options: dict[str, Any] = {"max_new_tokens": 3, "temperature": 1.0, "top_k": 5}
    drawn = [row for seed in range(500) for row in decoder.generate(ids, seed=seed, **options)]
    first = max({row[0] for row in drawn}, key=[row[0] for row in drawn].count)
    after = torch.tensor([row[1] for row in drawn if row[0] == first])
    logits = model(torch.tensor([[7, 7, 7, first]])).logits[:, -1].detach()
    expected = Sampler(1.0, top_k=5).distribution(logits)[0]
    assert len(after) > 500 and chi_square(after, expected) < LIMIT[4]


LIMIT = {4: 18.5, 5: 20.5}  # of chi-square by degrees of freedom, exceeded once in a thousand


def chi_square(tokens: Tensor, expected: Tensor) -> float:
    found = tokens.bincount(minlength=len(expected))
    wanted = expected * len(tokens)
    seen = wanted > 0
    assert int(found[~seen].sum()) == 0
    return float(((found - wanted).square() / wanted)[seen].sum())


@needs_triton
def test_kernels_give_the_same(tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(save_pico("qwen3", tmp_path)).eval()
    draft, ids = changed(model, 0.05), torch.randint(2, VOCAB, (2, 5))
    options: dict[str, Any] = {"batch": 2, "context": 24}
    drafted = DraftedDecoder(model, draft, choices=(2,), **options)
    expected = Decoder(model, ops="torch", **options).generate(ids, max_new_tokens=4)
    assert drafted.generate(ids, max_new_tokens=4) == expected


@needs_triton
@pytest.mark.parametrize(
    "cache, rows, large", [("whole", 1, False), ("whole", 1, True), ("int8", 2, False)]
)
def test_a_check_has_the_numbers_of_single_tokens(
    cache: str, rows: int, large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, in any bucket, where one row is of CUDA cores and where it is of tensor cores."""
    monkeypatch.setattr(plan, "LARGE", 0 if large else 1e9)
    prompt, tokens = 254, 3
    decoder = half_decoder(tmp_path, batch=rows, cache=cache)
    state, ids = decoder.state, torch.randint(2, VOCAB, (rows, prompt + tokens))
    decoder.prefill(ids[:, :prompt])
    expected = torch.cat([decoder.step(ids[:, prompt + token]) for token in range(tokens)])
    held = state.kv.data.clone()
    decoder.prefill(ids[:, :prompt])
    state.start[: tokens * rows] = state.start[:rows].repeat(tokens)
    state.tokens[: tokens * rows] = ids[:, prompt:].T.flatten()
    state.pos[: tokens * rows] = prompt + torch.arange(tokens).repeat_interleave(rows)
    in_turn(decoder.launches(rows, 1024, decoder.plan.phases, tokens, alone=True))
    assert torch.equal(state.buffers["logits"][: tokens * rows], expected)
    assert torch.equal(state.kv.data, held)


@needs_triton
def test_a_check_has_the_tiles_of_single_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles say in which order tensor cores add; numbers are compared on a GPU (`tests/gpu`)."""
    from blr.kernels.decode.skinny import launch

    seen, shape = set(), launch.tile_shape
    monkeypatch.setattr(launch, "tile_shape", lambda *given: seen.add(given[-1]) or shape(*given))
    decoder = half_decoder(tmp_path, batch=5)
    in_turn(decoder.launches(5, 128, decoder.plan.phases, 3, alone=True))
    assert seen == {5}


def half_decoder(folder: Path, **options: Any) -> Decoder:
    """One layer in half precision, of up to 16 rows and 1024 slots."""
    place = save_pico("qwen3", folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float16).eval()
    model.config.update({"max_position_embeddings": 1024, "num_hidden_layers": 1})
    return Decoder(model, context=1024, tokens=16, mode="eager", **options)


def test_logits_that_are_no_numbers_are_refused(trained: Any) -> None:
    broken = changed(trained, 0.0)
    broken.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(NumericsError):
        DraftedDecoder(broken, trained, context=40, ops="torch").generate(
            torch.tensor([[5, 9]]), max_new_tokens=8
        )


def test_more_drafts_where_more_are_accepted() -> None:
    found = Acceptance()
    for _ in range(50):
        found.add(5, 5)
    assert found.best([0, 1, 2, 3, 5, 7], 0.2) == 7
    assert Acceptance().best([3, 5], 0.2) == 5
    assert Acceptance().best([3, 5], 0.2, now=3) == 3, "too little better for another graph"
    assert found.best([0, 1, 2, 3, 5, 7], 2.0) == 0, "a draft as slow as this never pays"
    for _ in range(50):
        found.add(0, 5)
    assert found.best([1, 2, 3, 5, 7], 0.2) == 1 and found.best([0, 1, 2], 0.2) == 0


def test_a_check_of_one_row_costs_more_for_each_token(trained: Any) -> None:
    """Of small layers: they are multiplied on CUDA cores, those of several rows on tensor cores."""
    drafted = Drafted(trained, trained, context=60, batch=2, ops="torch")
    assert drafted._cost_of(1) > drafted._cost_of(2) == drafted.cost


def test_a_draft_that_does_not_pay_is_not_asked(trained: Any, text: Tensor) -> None:
    drafted = Drafted(trained, trained, context=60, ops="torch")
    found = drafted.generate(text[:, :12], max_new_tokens=20)
    assert drafted.acceptance.rounds == 0
    assert found == Decoder(trained, context=60, ops="torch").generate(text[:, :12], max_new_tokens=20)


def test_a_draft_that_does_not_pay_reads_no_prompt(trained: Any, text: Tensor) -> None:
    drafted = Drafted(trained, trained, context=60, ops="torch")
    drafted.prefill(text[:, :12])
    assert drafted.draft.decoder.rows == 0 and drafted.rows == 1


def test_a_round_that_is_captured_leaves_the_place_of_the_next_step(
    trained: Any, text: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a round runs once before its graph is made."""

    def captured(self: Any, once: Any, moved: Any, held: object) -> Any:
        kept = [tensor.clone() for tensor in moved]
        once()
        for tensor, value in zip(moved, kept, strict=True):
            tensor.copy_(value)
        return once

    monkeypatch.setattr(Drafted, "captured", captured)
    drafted = DraftedDecoder(trained, trained, context=60, ops="torch", choices=(3,))
    alone = Decoder(trained, context=60, ops="torch")
    for decoder in (drafted, alone):
        decoder.prefill(text[:1, :12])
    with torch.no_grad():
        drafted.capture()
    token = text[0, 12:13]
    torch.testing.assert_close(drafted.step(token), alone.step(token))


def test_a_row_takes_no_more_tokens_than_its_limit() -> None:
    collector = Collector(2, 3, stop_ids=[9])
    assert collector.keep(0, [1, 9, 2]) and not collector.keep(0, [4])
    assert collector.left == 3 and collector.keep(1, [1, 2, 3, 4])
    assert collector.tokens == [[1, 9], [1, 2, 3]] and collector.done
