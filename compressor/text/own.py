"""Lets a model write text itself: nobody needs a corpus, and no domain is favoured.

Sources: LLM-QAT (arXiv 2305.17888), self-calibration (arXiv 2410.17170).
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from blr.compressor.base.exhaustion import raise_exhausted
from blr.compressor.base.progress import OWN, Progress
from blr.compressor.loading.tokenizer import check_ids
from blr.compressor.modeling.settings import CACHE_NAMES, cache_name
from blr.compressor.text.decoding import StaticReading, distance
from blr.compressor.text.reading import beginning_of
from blr.compressor.text.shelf import Shelf, shelf_folder
from blr.compressor.text.windows import SEEDS
from blr.compressor.workspace.journal import Journal, layer_key

ROOM = 8  # tokens of a sample beyond the window, so that windows can start at different places
ALGORITHM = 4  # to be raised when samples change, so that older journals are not used
MARK = "\u2983"  # stands for a user's words in a chat template
CPU_BATCH, GPU_BATCH = 32, 4096  # most samples at once
GPU_BYTES = 32 << 30  # for cache and logits of a batch; it is written in parts if less is free
LOGITS = 40  # bytes for each logit: a pass's own, the graph's, and the probabilities to draw from
SAME = 0.3  # largest relative distance of equal logits with a cache and without; bfloat16 causes .01
FREE = 0.8  # share of the free memory that a part may take


@dataclass(frozen=True)
class OwnText:
    """What determines the text: `tokens` in samples of `length`, the `seed`, and `author`, the digest
    of the model's weights."""

    tokens: int
    length: int
    seed: int
    author: str


def write_own_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    wanted: OwnText,
    journal: Journal,
    progress: Progress,
    share: tuple[int, int] = (0, 1),
    wait: Callable[[], None] = lambda: None,
) -> Tensor:
    """Samples [n, length] (int32) that `model` writes; batches that `journal` has are not written
    again. `share` is this process's number and the number of processes; `wait` returns once all are
    done.

    Every sample begins as the tokenizer begins a text, and goes on from a random token. With a chat
    template every other batch begins with the opening of a user's turn instead.
    """
    samples = -(-wanted.tokens // wanted.length)
    size = min(batch_size(model, wanted.length), 1 << (samples - 1).bit_length())
    openings = _openings(tokenizer)
    count = -(-samples // size)
    written_as = [ALGORITHM, wanted.author, wanted.length, wanted.seed]
    keys = [
        layer_key(own=[*written_as, n, size], opening=openings[n % len(openings)]) for n in range(count)
    ]
    fits = partial(_fits, model, (size, wanted.length))

    def is_kept(key: str) -> bool:
        known = journal.load(key)
        return known is not None and "ids" in known[0] and fits(journal.tensors(key)["ids"])

    mine = [n for n in range(share[0], count, share[1]) if not is_kept(keys[n])]
    reading = StaticReading(model, wanted.length)

    def written(n: int) -> Tensor:
        prompts = _prompts(model, tokenizer, openings[n % len(openings)], size, wanted, n)
        return continued(model, prompts, n, wanted, reading)

    if mine:
        progress.say(f"the model writes {wanted.tokens:,} tokens of its own first")
        shelf, under = Shelf(shelf_folder(), fits), _surroundings(model, tokenizer)
        with reading, progress.layers(len(mine), OWN) as advance:
            named = {n: layer_key(text=keys[n], **under) for n in mine}
            for n, ids in shelf.batches(named, written, lambda: advance(""), progress.say):
                journal.store(keys[n], {"ids": ids}, {})
        if shelf.read:
            progress.say(f"{shelf.read} of {len(mine)} batches as it wrote them before ({shelf.folder})")
    wait()
    journal.await_all(keys)
    rows = torch.cat([journal.tensors(key)["ids"] for key in keys])
    return rows[:samples]


def _fits(model: Any, shape: tuple[int, int], ids: Tensor) -> bool:
    if ids.dtype != torch.int32 or tuple(ids.shape) != shape:
        return False
    return int(ids.min()) >= 0 and int(ids.max()) < model.get_input_embeddings().weight.shape[0]


def _surroundings(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    """Whatever a batch depends on besides its key: the model without its weights, and the device."""
    device = model.device
    config = json.loads(model.config.to_json_string(use_diff=False))
    for name in ("_name_or_path", "transformers_version"):
        config.pop(name, None)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"config": config, "dtype": str(model.dtype), "tokens": len(tokenizer), "where": where}


def batch_size(model: PreTrainedModel, length: int) -> int:
    """The number of samples written at once: a power of two that follows from the model and the kind of
    device."""
    if model.device.type == "cpu":
        return CPU_BATCH
    return min(GPU_BATCH, _rows_in(GPU_BYTES, model, length))


def _rows_in(room: float, model: PreTrainedModel, length: int) -> int:
    """The largest power of two of samples whose cache and logits take at most `room` bytes; at least
    one."""
    config = model.config.get_text_config(decoder=True)
    cache = 2 * config.num_hidden_layers * _width(config) * length * model.dtype.itemsize
    most = int(room // (cache + LOGITS * config.vocab_size))
    return 1 << max(most.bit_length() - 1, 0)


def _width(config: PreTrainedConfig) -> int:
    """The width of a layer's keys; that of the hidden state if the config does not tell."""
    try:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    except (AttributeError, RuntimeError, ValueError):
        return int(config.hidden_size)
    return int(heads * head)


def _openings(tokenizer: Any) -> list[list[int]]:
    """The tokens that samples can begin with, before a random one: a text's beginning, a user's turn."""
    beginning = list(beginning_of(tokenizer))
    if not getattr(tokenizer, "chat_template", None):
        return [beginning]
    said = [{"role": "user", "content": MARK}]
    before, mark, _ = tokenizer.apply_chat_template(said, tokenize=False).partition(MARK)
    ids = tokenizer(before, add_special_tokens=False)["input_ids"] if mark else []
    if not ids:
        return [beginning]
    begins = ids[: len(beginning)] == beginning  # most templates write it themselves
    return [beginning, ids if begins else beginning + ids]


def _generator(device: torch.device | str, wanted: OwnText, number: int) -> torch.Generator:
    return torch.Generator(device).manual_seed((wanted.seed * 1_000_003 + number) % SEEDS)


def _prompts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, opening: list[int], size: int,
    wanted: OwnText, number: int,
) -> Tensor:  # fmt: skip
    """Prompts [size, p]: the opening and a random token that is not a special one."""
    count = min(len(tokenizer), model.config.get_text_config(decoder=True).vocab_size)
    special = torch.tensor(sorted({i for i in tokenizer.all_special_ids if i < count}), dtype=torch.long)
    plain = torch.ones(count, dtype=torch.bool)
    plain[special] = False
    plain = plain.nonzero()[:, 0]
    picks = torch.randint(len(plain), (size, 1), generator=_generator("cpu", wanted, number))
    start = torch.tensor([opening], dtype=torch.long).expand(size, -1)
    check_ids(model, start)
    return torch.cat([start, plain[picks]], 1).to(model.device)


@torch.inference_mode()
def continued(
    model: PreTrainedModel, ids: Tensor, number: int, wanted: OwnText,
    reading: StaticReading | None = None,
) -> Tensor:  # fmt: skip
    """Continue prompts `ids` [m, p] to [m, length] (int32, on the CPU), in parts that fit in memory.
    `reading` is kept for the next batch."""
    if reading is None:
        with StaticReading(model, wanted.length) as reading:
            return continued(model, ids, number, wanted, reading)
    rows, device = reading.rows or CPU_BATCH, model.device
    if reading.rows is None and device.type == "cuda":
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + idle
        rows = _rows_in(FREE * free, model, wanted.length)
    # cuDNN's attention would plan anew for every length of the cache, which takes longer than it runs
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        while True:
            generator = _generator(model.device, wanted, number)
            try:
                parts = ids.split(rows)
                return torch.cat([_continued(model, p, generator, wanted, reading) for p in parts])
            except torch.OutOfMemoryError:
                if rows == 1:
                    raise
            rows = min(rows, len(ids)) // 2 or 1
            reading.free()
            torch.cuda.empty_cache()


def _continued(
    model: PreTrainedModel, ids: Tensor, generator: torch.Generator, wanted: OwnText,
    reading: StaticReading,
) -> Tensor:  # fmt: skip
    reader, p = reading.reader(len(ids)), ids.shape[1]
    if reader is None:
        return _continued_as_it_is(model, ids, generator, wanted)
    tokens, fresh = ids.new_empty(len(ids), max(wanted.length, p)), ids
    tokens[:, :p] = ids
    for n in range(p, wanted.length):
        fresh = draw(reader.read(fresh), generator)
        tokens[:, n : n + 1] = fresh
    return tokens[:, : wanted.length].to("cpu", torch.int32)


def _continued_as_it_is(
    model: PreTrainedModel, ids: Tensor, generator: torch.Generator, wanted: OwnText
) -> Tensor:
    """Continue prompts with transformers' own growing cache, or none."""
    cached = _cached(model, ids[:1]) and _fresh_cache(model)
    asked = {**(cached or {}), "use_cache": bool(cached), "logits_to_keep": 1}
    tokens = fresh = ids
    for _ in range(wanted.length - ids.shape[1]):
        out = model(input_ids=fresh if cached else tokens, **asked)
        fresh = draw(out.logits[:, -1].float().softmax(-1), generator)
        tokens = torch.cat([tokens, fresh], 1)
    return tokens[:, : wanted.length].to("cpu", torch.int32)


def _fresh_cache(model: PreTrainedModel) -> dict[str, object]:
    return {cache_name(model): DynamicCache(config=model.config)}


def _cached(model: PreTrainedModel, ids: Tensor) -> bool:
    """Whether `model` continues from a cache as if it had read everything at once. RWKV leaves the
    cache empty, MiniMax refuses it, CPM-Ant takes an empty one for its first words: these read all of
    the text for every token."""
    given = _fresh_cache(model)
    try:
        out = model(input_ids=ids, **given, use_cache=True, logits_to_keep=1)
        if not any(
            getattr(out, name, None) is cache for name in CACHE_NAMES for cache in given.values()
        ):
            return False
        found = model(input_ids=ids[:, -1:], **given, use_cache=True, logits_to_keep=1).logits[:, -1:]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model raises at a cache that it does not take
        raise_exhausted(error)
        return False
    twice = torch.cat([ids, ids[:, -1:]], 1)
    expected = model(input_ids=twice, use_cache=False, logits_to_keep=1).logits[:, -1:]
    return found.shape == expected.shape and bool(distance(found, expected) < SAME)


def draw(p: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a token [m, 1] for each row of probabilities [m, v] (float32), which are overwritten; none
    less likely than 1 in v (truncation at a probability, arXiv 2210.15191). On prose that keeps .985 of
    SmolLM2's probability, without sorting. It is torch.multinomial without its checks, which read all
    rows three more times."""
    least = 0.999 / p.shape[1]  # where all are equally likely, rounding leaves some
    torch.threshold_(p, least, 0.0)
    p /= torch.empty_like(p).exponential_(generator=generator)
    return p.argmax(-1, keepdim=True)
