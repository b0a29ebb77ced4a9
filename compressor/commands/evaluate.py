"""Quality of a model: perplexity of decoders, STS correlation of sentence encoders."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from blr.compressor.base.errors import CapabilityError, InputError, NumericsError
from blr.compressor.base.progress import Progress
from blr.compressor.base.quoting import is_numeral, quote
from blr.compressor.checkpoint.config import read_config
from blr.compressor.checkpoint.context import context_of
from blr.compressor.checkpoint.extras import MODULES
from blr.compressor.checkpoint.regular import read_start, read_text
from blr.compressor.integrations.lm_eval import Asked, run_tasks
from blr.compressor.loading.load import EMBEDS, GENERATES, load_model, load_tokenizer
from blr.compressor.loading.sentences import Sentences, read_sentences
from blr.compressor.loading.tokenizer import check_ids, encode_padded, taken_by
from blr.compressor.recipe.eval_settings import USUAL_WINDOW, EvalSettings
from blr.compressor.text.reading import Beginning, beginning_of, begun, read_whole_text, room_in

MAX_BYTES = 64 * 2**20  # of a text; all of it is tokenized at once
MAX_LOSS = 700  # nats; exp of more is beyond a float, and no vocabulary has so many tokens
Pair: TypeAlias = tuple[str, str, float]  # two sentences and their score


@dataclass(frozen=True)
class Perplexity:
    """`perplexity` over `tokens` predicted ones; the `beginning` of each window is not counted."""

    perplexity: float
    tokens: int
    window: int
    beginning: Beginning = ()


@dataclass(frozen=True)
class Spearman:
    """Rank correlation, in percent, of cosine similarities with gold scores over `pairs` pairs."""

    spearman: float
    pairs: int


def evaluate_folder(folder: Path, asked: EvalSettings, progress: Progress) -> dict[str, object]:
    """Measure what `asked` says, JSON-ready; texts and pairs are checked before the model is loaded."""
    pairs = read_pairs(asked.sts) if asked.sts else []
    if asked.sts:
        name = str((read_config(folder).get("architectures") or [""])[0])
        if name.endswith(("ForCausalLM", "LMHeadModel")) and not (folder / MODULES).exists():
            raise CapabilityError(
                f"{folder}: {name} continues text; expected an encoder of sentences for --sts; "
                "take --text"
            )
    data, trust = [*asked.text, *filter(None, [asked.sts])], asked.trust_remote_code
    tokenizer = load_tokenizer(folder, trust=trust, text=read_start(data[0]) if data else "")
    part = asked.max_tokens, asked.skip_tokens or 0
    tokens = [read_tokens(path, tokenizer, *part) for path in asked.text]
    task, how = EMBEDS if asked.sts else GENERATES, {"trust": trust, "verify": asked.verify}
    model = load_model(folder, task, dtype=asked.dtype, device=asked.device, progress=progress, **how)
    if pairs:
        head = read_sentences(folder)
        return asdict(sts_spearman(model, tokenizer, pairs, asked.batch, progress, head))
    result = _of_texts(model, tokenizer, tokens, asked, progress) if tokens else {}
    if asked.tasks:
        wanted = Asked(asked.task_names, asked.tasks_path, asked.shots, asked.limit)
        result |= asdict(run_tasks(model, tokenizer, wanted, asked.batch))
    return result


def _of_texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tokens: list[Tensor],
    asked: EvalSettings,
    progress: Progress,
) -> dict[str, Any]:
    """The result on one text, or those on several."""
    size = asked.window or min(USUAL_WINDOW, context_of(model.config.to_dict()))
    begins = beginning_of(tokenizer)
    how = size, asked.stride or size, asked.batch, progress, begins
    counted = _counted(size, asked.stride, list(tokenizer.convert_ids_to_tokens(list(begins))))
    found = [
        {"text": str(path), **asdict(perplexity(model, ids, *how)), "counted": counted}
        for path, ids in zip(asked.text, tokens, strict=True)
    ]
    return found[0] if len(found) == 1 else {"texts": found}


def _counted(window: int, stride: int | None, begins: list[str]) -> str:
    """A sentence on how tokens of a text are counted."""
    if begins:
        told = f"every token of the text, in windows of {window}"
        return f"{told} that each begin with {' '.join(map(str, begins))}, which is not counted"
    first = "the text" if stride is not None and stride < window else "each"
    return f"every token, in windows of {window}, but the first of {first}"


def read_tokens(
    path: Path, tokenizer: PreTrainedTokenizerBase, max_tokens: int | None = None, skip: int = 0
) -> Tensor:
    """Token ids [n] of a text, without the first `skip`, cut to `max_tokens`. Raises InputError."""
    text = read_whole_text(path, MAX_BYTES)
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][skip:][:max_tokens]
    if len(ids) < 2:
        raise InputError(f"{path}: {len(ids)} tokens, expected at least 2; give a longer text")
    return torch.tensor(ids)


@torch.inference_mode()
def perplexity(
    model: PreTrainedModel,
    ids: Tensor,
    window: int,
    stride: int,
    batch: int,
    progress: Progress,
    beginning: Beginning = (),
) -> Perplexity:
    """exp of the mean negative log-likelihood of `ids` [n], in windows every `stride` tokens.

    A token is scored in the first window that has something before it. Raises InputError for a window
    that does not fit or unknown ids, NumericsError for a loss that is not finite.
    """
    limit = context_of(model.config.to_dict())
    if window > limit:
        remedy = "take a shorter one, or leave --window out"
        raise InputError(f"window {window} is longer than the model's context of {limit}; {remedy}")
    check_ids(model, torch.cat([ids.new_tensor(beginning), ids]))
    room = room_in(window, beginning)
    stride = min(stride, room)
    starts = list(range(0, max(len(ids) - room, 0) + 1, stride))
    if starts[-1] + room < len(ids):
        starts.append(starts[-1] + stride)
    total, count = 0.0, 0
    groups = [starts[n : n + batch] for n in range(0, len(starts), batch)]
    with progress.layers(len(groups), "evaluating") as advance:
        for group in groups:
            advance("")
            for rows, fresh in _stack(ids, group, room, stride, bool(beginning)):
                losses = _losses(model, begun(rows, beginning))[:, -fresh:]
                total, count = total + float(losses.double().sum()), count + losses.numel()
    loss = total / count
    if not loss < MAX_LOSS:  # NaN is not
        raise NumericsError(
            f"the mean negative log-likelihood is {loss:g}: expected a finite number below {MAX_LOSS}; "
            "evaluate in --dtype float32, or repair the checkpoint"
        )
    return Perplexity(math.exp(loss), count, window, beginning)


def _stack(
    ids: Tensor, starts: list[int], room: int, stride: int, begins: bool
) -> list[tuple[Tensor, int]]:
    """Rows of equal length and count of new tokens together, as ([m, w], new)."""
    groups: dict[tuple[int, int], list[Tensor]] = {}
    for start in starts:
        row = ids[start : start + room]
        alone = start == 0 or stride == room
        fresh = len(row) - (not begins) if alone else len(row) - (room - stride)
        if fresh > 0:
            groups.setdefault((len(row), fresh), []).append(row)
    return [(torch.stack(rows), fresh) for (_, fresh), rows in groups.items()]


def _losses(model: PreTrainedModel, rows: Tensor) -> Tensor:
    """Negative log-likelihood [m, w-1] of every token but the first of each row."""
    rows = rows.to(model.device)
    logits = model(rows, use_cache=False).logits[:, :-1].float()
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none"
    ).view(len(rows), -1)


@torch.inference_mode()
def sts_spearman(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[Pair],
    batch: int,
    progress: Progress,
    head: Sentences | None = None,
) -> Spearman:
    """Spearman correlation on `pairs`, whose sentences `head` embeds (None: by their mean states)."""
    sentences = [s for first, second, _ in pairs for s in (first, second)]
    head = head or Sentences()
    embeddings = embed(model, tokenizer, sentences, batch, progress, head).double()
    cosine = torch.nn.functional.cosine_similarity(embeddings[0::2], embeddings[1::2])
    gold = torch.tensor([score for *_, score in pairs], dtype=torch.float64)
    return Spearman(rank_correlation(cosine, gold), len(pairs))


def rank_correlation(cosine: Tensor, gold: Tensor) -> float:
    """Spearman's, in percent. Raises NumericsError where it is not defined."""
    found = 100 * float(torch.corrcoef(torch.stack([_ranks(cosine), _ranks(gold)]))[0, 1])
    if math.isfinite(found) and bool(torch.isfinite(cosine).all()):
        return found
    bad, values, scores = int((~torch.isfinite(cosine)).sum()), len(cosine.unique()), len(gold.unique())
    raise NumericsError(
        f"no rank correlation of {values} different cosine similarities ({bad} of {len(cosine)} NaN) "
        f"with {scores} different scores: expected finite ones that vary; evaluate in --dtype float32, "
        "or give pairs with other scores"
    )


def read_pairs(path: Path) -> list[Pair]:
    """Sentence pairs and scores of a CSV file, with or without a header. Raises InputError."""
    text = read_text(path, MAX_BYTES)
    try:
        rows = [row for row in csv.reader(StringIO(text, newline="")) if row]
    except csv.Error as error:
        remedy = "write sentence, sentence, score in every row"
        raise InputError(f"{path}: not a readable CSV file ({error}); {remedy}") from None
    if rows and not is_numeral(rows[0][-1]):
        rows = rows[1:]
    for number, row in enumerate(rows, 1):
        if len(row) < 3 or not is_numeral(row[-1]) or not math.isfinite(float(row[-1])):
            raise InputError(
                f"{path}: row {number} is {quote(row, 120)[1:-1]}, expected sentence, sentence, score; "
                "repair the row"
            )
    if len(rows) < 2:
        raise InputError(
            f"{path}: {len(rows)} rows, expected two at least of sentence, sentence, score; give more"
        )
    return [(row[-3], row[-2], float(row[-1])) for row in rows]


def embed(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: list[str],
    batch: int,
    progress: Progress,
    head: Sentences,
) -> Tensor:
    """Sentence embeddings [n, d] as `head` pools them, computed in batches of similar length."""
    order = sorted(range(len(sentences)), key=lambda n: len(sentences[n]))
    groups = [order[n : n + batch] for n in range(0, len(order), batch)]
    rows: dict[int, Tensor] = {}
    with progress.layers(len(groups), "embedding") as advance:
        for group in groups:
            advance("")
            pooled = _pool(model, tokenizer, [sentences[n] for n in group], head)
            rows.update(zip(group, pooled, strict=True))
    return torch.stack([rows[n] for n in range(len(sentences))])


def _pool(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sentences: list[str], head: Sentences
) -> Tensor:
    limit = min(context_of(model.config.to_dict()), head.length or tokenizer.model_max_length)
    tokens = encode_padded(tokenizer, head.texts(sentences), limit).to(model.device)
    check_ids(model, tokens["input_ids"])
    hidden = model(**taken_by(model, tokens)).last_hidden_state  # [m, w, d]
    return head.embed(hidden, tokens["attention_mask"], head.unpooled(tokenizer)).cpu()


def _ranks(values: Tensor) -> Tensor:
    """Ranks from 0, ties sharing their mean rank."""
    _, inverse, counts = torch.unique(values, return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    return (ends - (counts.double() + 1) / 2)[inverse]
