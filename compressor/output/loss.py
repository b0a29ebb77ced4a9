"""What a decoder loses against the model it was made from: perplexity before and after, and agreement.

One definition for every command. The loss is the logarithm of the perplexity after over the perplexity
before: a difference of cross entropies, in nats a token, on the same windows, each token but the first
of a window predicted from those before it in its window, as `blr eval` does (where a tokenizer begins
texts with a token of its own, windows begin with it, and it is not predicted). Agreement is the share of
predicted tokens for which both models find the same token the most likely. The divergence from the dense
model is measured on as many of the windows as its probabilities can be kept of.

On text of the user's, the predicted token is the one in the text. On text that the model wrote itself,
every token that it might have written there counts, as likely as it finds it: the perplexity before is
then that of its own choice, and the loss is the Kullback-Leibler divergence of the two distributions.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from blr.compressor.base.errors import InputError, NumericsError
from blr.compressor.base.exhaustion import raise_exhausted
from blr.compressor.base.quoting import first_line, printable
from blr.compressor.checkpoint.context import context_of, of_text
from blr.compressor.checkpoint.remote import remote_shard
from blr.compressor.checkpoint.source import Source
from blr.compressor.fitting.engine import read_text
from blr.compressor.loading.checked import OURS
from blr.compressor.loading.load import load_tokenizer
from blr.compressor.loading.loader import is_small, load_written, streamed_model, whole_model
from blr.compressor.loading.native import continues_text, read_context
from blr.compressor.loading.smoke_run import NO_CHECK, plain_tokens, run
from blr.compressor.loading.tokenizer import check_ids
from blr.compressor.output.loss_messages import Divergence, LossFacts
from blr.compressor.recipe.schema import Recipe
from blr.compressor.text.own import OwnText, continued
from blr.compressor.text.reading import (
    HELD_SHARE,
    HELD_TOKENS,
    Beginning,
    beginning_of,
    begun,
    idle_predictions,
    read_documents,
    read_first_text,
    room_in,
)
from blr.compressor.text.windows import Stream, check_known, tokenize

WINDOW = 512  # tokens, as of `blr eval`
WHOLE = 1 << 24  # bytes of a text file that is read to its end
WORK = 2e12  # parameters times tokens of a pass: about a minute of a few cores
LEAST = 128  # tokens that say anything
OWN = 1024  # tokens of the model's own text
LENGTHS = {True: 64, False: 16}  # of its samples, by whether the model is small: every token is a pass
OWN_BYTES = 1 << 32  # of weights, which every pass reads: larger models write none
OWN_LOGITS = 1 << 26  # of the dense model that are kept
TAIL = (50, 90, 99, 99.9, 100)  # percentiles of the divergence that are told
WORST = 3  # windows that are named
LOGITS = 1 << 26  # of all windows that run at once
MOST_NATS = 600.0  # of a mean loss that a perplexity is told of: exp of 710 is beyond a float


@dataclass(frozen=True)
class Text:
    """Tokens in `windows` [n, w], each with the `beginning` of a text, described by `what`. `first` is
    their place in a longer text; `own` text was written by the model."""

    windows: Tensor
    what: str
    beginning: Beginning = ()
    first: int | None = None
    own: bool = False

    @property
    def tokens(self) -> int:
        return self.windows.numel() - len(self.windows) * len(self.beginning)


def most_tokens(source: Source) -> int:
    """The most tokens that a pass of the model may read; 0 for a model too large for any use."""
    most = min(HELD_TOKENS, int(WORK / max(source.parameters, 1)))
    return most if most >= LEAST else 0


def calibration_text(source: Source, recipe: Recipe, name: str | None, offline: bool) -> Text | None:
    """The part of a decoder's calibration text that judges it: the end of a file, which `blr heal`
    reports as well, else what lies behind the tokens that fits read. None if there is none, if the text
    is the model's own or too short. Raises as `fitting.engine.read_text`."""
    if name is None:
        return None
    seq_len = min(recipe.seq_len, read_context(source))
    tokenizer, found = read_text(source, recipe.samples, seq_len, name, True, offline)
    if found is None or found.held is None:
        return None
    beginning, tail, length = beginning_of(tokenizer), found.held, found.first + len(found.held)
    if os.path.exists(name) and os.path.getsize(name) <= WHOLE:
        tokens = tokenize(read_documents(name), tokenizer)
        tail, length = tokens[found.first :], len(tokens)
        tail = _end(tail, length, _room(source, beginning))
    return _held_text({name: (tail, length)}, source, beginning)


def healing_text(streams: Mapping[str, Stream], source: Source, beginning: Beginning) -> Text | None:
    """The ends of the texts that train a decoder; None without a text, or if they are too short."""
    room, parts = _room(source, beginning), dict[str, tuple[Tensor, int]]()
    for name, stream in streams.items():
        tail = stream.held[:, len(beginning) :].flatten()
        parts[name] = _end(tail, stream.length, room), stream.length
    return _held_text(parts, source, beginning) if parts else None


def _end(tail: Tensor, length: int, least: int) -> Tensor:
    """The last twentieth of a text of `length` tokens, or `least`, as far as its unread `tail` goes."""
    return tail[-max(int(length * HELD_SHARE), least) :]


def _held_text(
    parts: Mapping[str, tuple[Tensor, int]], source: Source, beginning: Beginning
) -> Text | None:
    """The last tokens of texts, as many as a pass may read, in windows of one length; of each text its
    unread end and its length are given. None for too few. Raises InputError for unknown tokens."""
    most = max(most_tokens(source) // len(parts), LEAST)
    room = min(_room(source, beginning), most, *(len(tail) for tail, _ in parts.values()))
    used = {n: tail[-(min(len(tail), most) // room * room) :] for n, (tail, _) in parts.items() if room}
    count = sum(map(len, used.values()))
    if count < LEAST:
        return None
    windows = torch.cat([_rows(tail, room, beginning) for tail in used.values()])
    name = " and ".join(used)
    check_known((windows,), of_text(source.config).get("vocab_size"), name)
    first = parts[name][1] - len(used[name]) if len(used) == 1 else None
    place = "" if first is None else f", from token {first:,} on"
    what = f"{count:,} held-back tokens of {printable(Path(name).name)}{place}"
    return Text(windows, what, beginning, first)


def _room(source: Source, beginning: Beginning) -> int:
    """The tokens of text in a window that judges."""
    return room_in(max(min(WINDOW, read_context(source)), 1 + len(beginning)), beginning)


def file_text(path: Path, source: Source) -> Text:
    """The beginning of a text. Raises InputError for one that cannot be read or is too short."""
    start = read_first_text(path)
    tokenizer = load_tokenizer(source.folder, text=start)
    ids = tokenizer(start, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < 2:
        raise InputError(f"{path}: {len(ids)} tokens, expected at least 2; give a longer text")
    beginning = beginning_of(tokenizer)
    tokens = torch.tensor(ids[: max(most_tokens(source), LEAST)])
    room = min(_room(source, beginning), len(tokens))
    windows = _rows(tokens, room, beginning)
    check_known((windows,), of_text(source.config).get("vocab_size"), str(path))
    what = f"the first {len(windows) * room:,} tokens of {printable(path.name)}"
    return Text(windows, what, beginning, 0)


def _rows(tokens: Tensor, room: int, beginning: Beginning) -> Tensor:
    """Windows [n, w] of `room` tokens of a text [n], each behind the `beginning`."""
    return begun(tokens[: len(tokens) // room * room].view(-1, room), beginning).long()


def own_text(model: PreTrainedModel, source: Source) -> Text:
    """Text that the model in `source` writes, in samples that go on from a random plain token."""
    config, beginning = model.config.get_text_config(), _beginning(source.folder)
    length = min(LENGTHS[is_small(source)] + len(beginning), context_of(model.config.to_dict()))
    room = length - len(beginning)
    count = max(min(OWN, OWN_LOGITS // config.vocab_size) // room, 1)
    usable = plain_tokens(model.config)
    generator = torch.Generator().manual_seed(0)
    starts = usable[torch.randint(len(usable), (count, 1), generator=generator)]
    prompts = begun(starts, beginning)
    check_ids(model, prompts)
    windows = continued(model, prompts, 0, OwnText(count * length, length, 0, "")).long()
    what = f"{count * room:,} tokens that the model wrote itself"
    return Text(windows, what, beginning, own=True)


def _beginning(folder: Path) -> Beginning:
    """What the tokenizer puts before a text; nothing without a tokenizer that loads."""
    try:
        return beginning_of(load_tokenizer(folder))
    except InputError:
        return ()


@dataclass(frozen=True)
class Predictions:
    """Predictions on a text: mean cross entropy, the likeliest token [n, w - 1] of every place,
    log-probabilities in the first windows (`logs`, of the dense model), divergences there (`kl` [m, w -
    1])."""

    loss: float
    best: Tensor
    logs: Tensor
    kl: Tensor


def divergence(windows: Sequence[Tensor], places: Sequence[int], decimals: int = 6) -> Divergence:
    """The mean of divergences with its standard error, their percentiles, and the worst windows, which
    begin at these of the `places`."""
    found = [window.double().clamp(min=0.0) for window in windows]
    every, means = torch.cat(found), torch.stack([window.mean() for window in found])
    worst = means.argsort(descending=True, stable=True)[:WORST].tolist()
    told = zip(TAIL, percentiles(every, TAIL), strict=True)
    return {
        "mean": round(float(every.mean()), decimals),
        "error": round(standard_error(every), decimals),
        "tokens": every.numel(),
        "percentiles": {f"{n:g}": round(value, decimals) for n, value in told},
        "worst": [{"token": places[n], "kl": round(float(means[n]), decimals)} for n in worst],
    }


def percentiles(values: Tensor, shares: Sequence[float]) -> list[float]:
    """The values [n] that so many percent do not exceed, between two of them by a straight line."""
    ordered = values.double().sort().values
    at = torch.tensor(shares, dtype=torch.float64) / 100 * (len(ordered) - 1)
    return torch.lerp(ordered[at.long()], ordered[at.ceil().long()], at.frac()).tolist()


def standard_error(values: Tensor) -> float:
    """Of the mean of independent values [n]; 0 for a single one."""
    return float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else 0.0


class Measure:
    """Compares outputs with the dense model on `text`; that model runs now. Raises NumericsError for
    results that are not finite."""

    def __init__(self, model: PreTrainedModel, text: Text, where: object) -> None:
        self.text = text
        self.dense = _answers(model, text, None, where)

    def __call__(self, model: PreTrainedModel, where: object) -> LossFacts:
        """The loss of `model`, in evaluation mode. Raises NumericsError as above."""
        text, found = self.text, _answers(model, self.text, self.dense.logs, where)
        before, after = (math.exp(min(x, MOST_NATS)) for x in (self.dense.loss, found.loss))
        window = text.windows.shape[1]
        room, first = room_in(window, text.beginning), text.first or 0
        kl = divergence([*found.kl], [first + n * room for n in range(len(found.kl))])
        return {
            "read": text.what,
            "loss": math.log(after / before),
            "agreement": float((found.best == self.dense.best).double().mean()),
            "perplexity": {"before": before, "after": after},
            "kl": kl,
            "tokens": text.tokens,
            "window": window,
            "first": text.first,
        }


def measure_of(source: Source, text: Text | None) -> Measure | LossFacts:
    """How the loss of outputs of `source` is measured, on `text` or on its own, or why it is not; empty
    for a model that continues no text. Raises NumericsError as `Measure`."""
    if not continues_text(source):
        return {}
    if why := _hindrance(source, text):
        return {"unmeasured": why}
    try:
        model = computing(source)
        return Measure(model, text or own_text(model, source), source.folder)
    except Exception as error:  # whatever a model raises that takes no plain text
        raise_exhausted(error)
        return {"unmeasured": f"the model does not read plain text ({first_line(error, 120)})"}


def _hindrance(source: Source, text: Text | None) -> str:
    """Why nothing can be measured in a bounded time; empty if it can."""
    if any(remote_shard(path) is not None for path in source.shards):
        return "the weights stay on the hub, and every pass fetches them all; blr eval measures it"
    if most_tokens(source) == 0:
        return "the model is too large to be run on a CPU within minutes; blr eval measures it"
    if text is None and source.nbytes > OWN_BYTES:
        return "no text was given, and the model is too large to write one within minutes"
    return ""


def computing(source: Source) -> PreTrainedModel:
    """The model in `source`, in float32 if it fits in memory, else block by block as stored."""
    if source.model_type.startswith(OURS):
        return load_written(source.folder, torch.float32)
    return whole_model(source).float() if is_small(source) else streamed_model(source)


@torch.no_grad()
def _answers(model: PreTrainedModel, text: Text, dense: Tensor | None, where: object) -> Predictions:
    """The predictions of a model; `dense` are expected log-probabilities, None for this model's own."""
    idle = idle_predictions(text.beginning)
    windows, parts = text.windows, list[tuple[Tensor, Tensor, Tensor, Tensor]]()
    size = windows.shape[1] * model.config.get_text_config().vocab_size
    rows = max(LOGITS // size, 1)
    kept = len(windows) if text.own else max(OWN_LOGITS // size, 1)
    for n, part in enumerate(windows.split(rows)):
        logs = run(model, {"input_ids": part})[:, idle:-1].log_softmax(-1)
        known = logs[: max(kept - n * rows, 0)]
        wanted = known if dense is None else dense[n * rows : n * rows + rows]
        losses = -logs.gather(-1, part[:, idle + 1 :, None])[..., 0]
        losses = _crossed(logs, wanted) if text.own else losses
        kl = _crossed(logs[: len(wanted)], wanted) - _crossed(wanted, wanted)
        parts.append((losses, logs.argmax(-1), (known if dense is None else known[:0]).clone(), kl))
    found, best, logs, kl = (torch.cat(column) for column in zip(*parts, strict=True))
    loss = float(found.double().mean())
    if not math.isfinite(loss):
        said = f"a loss of {loss} on {text.what}, expected a finite number"
        remedy = f"choose another dtype or a lower --cf ({NO_CHECK})"
        raise NumericsError(f"{where}: {said}; {remedy}")
    return Predictions(loss, best, logs, kl)


def _crossed(logs: Tensor, expected: Tensor) -> Tensor:
    """Cross entropies [m, w] with `expected` log-probabilities, in which -inf counts as 0."""
    return -torch.where(expected == -torch.inf, 0.0, expected.exp() * logs).sum(-1)
