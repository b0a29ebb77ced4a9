"""The decoding runtime says on a GPU what transformers says, in every mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bundled import METHODS, compressed
from fresh import SAMPLE
from rows import Row, bounded, relative, row, tokens_row
from tolerances import TOLERANCES
from torch import Tensor

from blr.compressor.loading.load import load_model, load_tokenizer
from blr.compressor.runtime.decoder import Decoder
from blr.compressor.runtime.drafted import DRAFTS, DraftedDecoder

pytestmark = pytest.mark.gpu
Judge = Callable[[Iterable[Row]], None]

PROMPT = 100  # tokens
BORDERS = (1, 63, 64, 120, 127, 128, 129, 140, 250, 511, 512, 513, 1020, 1023, 1024, 1030)
MODE = "graph"


class Case:
    """A checkpoint on a device, with a text that its positions hold.

    checkpoint: of `METHODS`, or a folder.
    """

    def __init__(self, checkpoint: str | Path, device: str, work: Path) -> None:
        self.device = device
        self.folder = compressed(work, checkpoint) if checkpoint in METHODS else Path(checkpoint)
        self.group = f"{self.folder.name} {MODE}"
        self.ops = "triton" if device == "cuda" else "torch"
        self.model = self.load("float32")
        self.context = min(self.model.config.max_position_embeddings, 2048)
        self.ids = prompt_ids(self.folder, self.model.config.vocab_size, self.context)
        self.batches = (1, 2, 3, 8)

    def load(self, dtype: str, device: str | None = None) -> Any:
        place = {"dtype": dtype, "device": device or self.device}
        model = load_model(self.folder, "AutoModelForCausalLM", **place)
        return model

    def decoder(self, model: Any = None, **options: Any) -> Decoder:
        given = {"mode": MODE, "ops": self.ops, "context": self.context, **options}
        return Decoder(model or self.model, **given)


@pytest.fixture
def case(checkpoint: str | Path, device: str, work: Path) -> Case:
    return Case(checkpoint, device, work)


def prompt_ids(folder: Path, vocabulary: int, length: int) -> Tensor:
    """[1, length] tokens of the sample text, repeated as needed; random ones without a tokenizer."""
    if (folder / "tokenizer_config.json").exists():
        ids = load_tokenizer(folder)(SAMPLE.read_text("utf-8"), return_tensors="pt")["input_ids"]
    else:
        ids = torch.randint(5, vocabulary, (1, length), generator=torch.Generator().manual_seed(0))
    return ids.repeat(1, -(-length // ids.shape[1]))[:, :length]


def native(model: Any, ids: Tensor, new: int, mask: Tensor | None = None) -> list[list[int]]:
    """Greedy tokens by transformers."""
    mask = torch.ones_like(ids) if mask is None else mask
    arguments = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    moved = {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}
    return model.generate(**moved, **arguments)[:, ids.shape[1] :].tolist()


def margin(model: Any, ids: Tensor, found: list[int], wanted: list[int]) -> str:
    """How close the two best logits are where two continuations part."""
    at = next(
        (n for n, pair in enumerate(zip(found, wanted, strict=False)) if len(set(pair)) == 2), None
    )
    if at is None:
        return ""
    text = torch.cat((ids[0], torch.tensor(wanted[:at], dtype=torch.int64)))[None].to(model.device)
    with torch.no_grad():
        best = model(text).logits[0, -1].float().topk(2).values
    return f"where the best two logits are {float(best[0] - best[1]):.2e} apart"


def test_transformers_says_the_same_on_both_devices(
    checkpoint: str | Path, device: str, work: Path
) -> None:
    """The structured layers alone, without the runtime."""
    folder, ids = compressed(work, checkpoint) if checkpoint in METHODS else checkpoint, range(1, 13)
    models = [
        load_model(folder, "AutoModelForCausalLM", dtype="float32", device=d) for d in ("cpu", device)
    ]
    expected, found = (native(model, torch.tensor([ids]), 32) for model in models)
    assert found == expected


def test_tokens(case: Case, judge: Judge) -> None:
    """Greedy tokens in float32, as many as 256: again, launched one by one, with fixed splits, and
    transformers' on both devices."""
    judge(compare_tokens(case))


def compare_tokens(case: Case) -> Iterator[Row]:
    ids, model = case.ids[:, :PROMPT], case.model
    new = min(256, case.context - PROMPT)
    decoder = case.decoder(batch=case.batches[-1])
    found, wanted = decoder.generate(ids, max_new_tokens=new), native(model, ids, new)
    why = margin(model, ids, found[0], wanted[0])
    distinct = f"{len(set(found[0]))} distinct, pdl {decoder.pdl}"
    yield tokens_row(case.group, f"{MODE} = transformers", found, wanted, why or distinct)
    again = decoder.generate(ids, max_new_tokens=new)
    yield tokens_row(case.group, f"{MODE} = {MODE} again", again, found)
    other = case.decoder(mode="eager").generate(ids, max_new_tokens=new)
    yield tokens_row(case.group, "eager = transformers", other, wanted)
    on_cpu = native(case.load("float32", "cpu"), ids, new)
    why = margin(model, ids, found[0], on_cpu[0])
    yield tokens_row(case.group, f"{MODE} = transformers on the CPU", found, on_cpu, why)


def test_batches(case: Case, judge: Judge) -> None:
    """Rows of different lengths, padded on the left and on the right."""
    judge(compare_batches(case))


def compare_batches(case: Case) -> Iterator[Row]:
    decoder = case.decoder(batch=case.batches[-1])
    for rows in case.batches:
        lengths = [60 - 7 * row for row in range(rows)]
        batch, mask = torch.zeros(2, rows, 60, dtype=torch.int64)
        for row_, n in enumerate(lengths):
            batch[row_, 60 - n :], mask[row_, 60 - n :] = case.ids[0, row_ : row_ + n], 1
        wanted = native(case.model, batch, 48, mask)
        found = decoder.generate(batch, mask, max_new_tokens=48)
        yield tokens_row(case.group, f"batch {rows}, left padding", found, wanted)
        right = [
            torch.stack([t[row_].roll(n - 60) for row_, n in enumerate(lengths)]) for t in (batch, mask)
        ]
        moved = decoder.generate(*right, max_new_tokens=48)
        yield tokens_row(case.group, f"batch {rows}, right padding", moved, found)


def test_drafts_change_no_token(checkpoint: str | Path, case: Case, judge: Judge) -> None:
    """In bfloat16, whose sums differ with their order: those of a check are those of single tokens."""
    if checkpoint != "dense":
        pytest.skip("of dense models")
    judge(compare_drafted(case))


def compare_drafted(case: Case) -> Iterator[Row]:
    half, draft = case.load("bfloat16"), case.load("bfloat16")
    generator = torch.Generator(case.device).manual_seed(0)
    with torch.no_grad():
        for w in draft.parameters():
            w += 0.1 * w.std() * torch.randn(w.shape, generator=generator, device=w.device)
    plain = case.decoder(half, batch=case.batches[-1])
    options = {"batch": case.batches[-1], "context": case.context, "ops": case.ops, "choices": DRAFTS}
    drafted = DraftedDecoder(half, draft, **options)
    for rows in case.batches:
        ids = torch.cat([case.ids[:, 9 * row_ : 9 * row_ + PROMPT] for row_ in range(rows)])
        wanted = plain.generate(ids, max_new_tokens=64)
        found = drafted.generate(ids, max_new_tokens=64)
        share = f"{drafted.acceptance.total} of {drafted.acceptance.drafts} drafts accepted"
        yield tokens_row(case.group, f"drafted, batch {rows}", found, wanted, share)


def test_borders(case: Case, judge: Judge) -> None:
    """Prompts whose continuation crosses buckets, splits and chunks; logits of a given text."""
    judge(compare_borders(case))


def compare_borders(case: Case) -> Iterator[Row]:
    decoder = case.decoder(batch=case.batches[-1])
    for length in BORDERS:
        new = min(16, case.context - length)
        if new < 1:
            continue
        part = case.ids[:, :length]
        wanted = native(case.model, part, new)
        found = decoder.generate(part, max_new_tokens=new)
        why = margin(case.model, part, found[0], wanted[0])
        yield tokens_row(case.group, f"prompt of {length}", found, wanted, why)
    yield logits_row(case, "logits", case.model, decoder, case.ids[:, : PROMPT + 64], torch.float32)


def logits_row(case: Case, name: str, model: Any, decoder: Any, ids: Tensor, dtype: torch.dtype) -> Row:
    """Logits of the last 64 tokens of a given text, one by one, against the same weights in float32."""
    length = ids.shape[1] - 64
    with torch.no_grad():
        truth = model(ids.to(model.device)).logits[0, length - 1 : -1].float()
    steps = [decoder.prefill(ids[:, :length])[0]]
    steps += [decoder.step(ids[:, at])[0] for at in range(length, ids.shape[1] - 1)]
    allowed = TOLERANCES[dtype] * model.config.num_hidden_layers**0.5
    return bounded(case.group, f"{name} in {dtype}", relative(torch.stack(steps), truth), allowed)


def test_half_precision(case: Case, judge: Judge) -> None:
    """Logits in bfloat16 against the same rounded weights in float32; sampling follows the seed."""
    judge(compare_half(case))


def compare_half(case: Case) -> Iterator[Row]:
    half, exact = case.load("bfloat16"), case.model
    exact.load_state_dict({n: t.float() for n, t in half.state_dict().items()})
    context = min(case.context, 512)
    ids = case.ids[:, : min(164, context)]
    for rows in (1, 4):
        decoder = case.decoder(half, context=context, batch=rows)
        yield logits_row(case, f"batch {rows}", exact, Repeated(decoder, rows), ids, torch.bfloat16)
    options = {"max_new_tokens": 32, "temperature": 0.8, "top_k": 50, "top_p": 0.9}
    runs = [decoder.generate(ids, seed=seed, **options) for seed in (1, 1, 2)]
    yield row(runs[0] == runs[1] != runs[2], case.group, "sampling follows the seed")


class Repeated:
    """A decoder that takes the same prompt in every row, to check batches by their first row."""

    def __init__(self, decoder: Decoder, rows: int) -> None:
        self._decoder, self._rows = decoder, rows

    def prefill(self, ids: Tensor) -> Tensor:
        return self._decoder.prefill(ids.repeat(self._rows, 1))

    def step(self, tokens: Tensor) -> Tensor:
        return self._decoder.step(tokens.repeat(self._rows))
