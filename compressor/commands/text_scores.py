"""How likely models find the tokens of a text, and how far an output is from its dense model there.

The hidden states from which a dense model predicts the tokens are all that must be kept to judge further
outputs. With its head they give its logits again, to the last bit, in a fraction of their bytes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from blr.compressor import __version__
from blr.compressor.base.disk import scratch_for, settle
from blr.compressor.base.errors import CapabilityError, InputError, NumericsError
from blr.compressor.base.progress import Progress
from blr.compressor.base.quoting import first_line
from blr.compressor.checkpoint.config import read_config
from blr.compressor.checkpoint.context import context_of, of_text
from blr.compressor.healing.objective import Readout, Replies, chunks
from blr.compressor.loading.tokenizer import check_ids
from blr.compressor.output.loss import divergence, standard_error
from blr.compressor.output.loss_messages import Divergence
from blr.compressor.text.reading import Beginning, begun, room_in
from blr.compressor.workspace.journal import canonical_json

MAX_LOSS = 700  # nats; exp of more is beyond a float, and no vocabulary has so many tokens
MOST_KEPT = 4 << 30  # bytes of the states of one text that are kept
FAR, CONTEXT = 5, 12  # tokens that are told of, and tokens shown before each
EXACT = 12  # decimals of divergences: an output in bfloat16 is 1e-5 nats away


class Likelihoods(NamedTuple):
    """Of rows of logits [n, v]: these less the largest of their row, the logarithm of the sum of their
    exponentials, the losses of the text's tokens and the likeliest tokens."""

    logits: Tensor
    log_sum: Tensor
    loss: Tensor
    best: Tensor


class TokenScores(NamedTuple):
    """For tokens [n], or windows of them [m, w]: their losses in nats and the likeliest tokens. Of two
    models also those of the dense one (`dense_loss`, `dense_best`) and KL(dense ‖ output)."""

    loss: Tensor
    best: Tensor
    dense_loss: Tensor
    dense_best: Tensor
    kl: Tensor

    @staticmethod
    def joined(found: Sequence[TokenScores]) -> TokenScores:
        """Of all their tokens."""
        return TokenScores(*map(torch.cat, zip(*found, strict=True)))


ScoredWindow = tuple[int, TokenScores]  # of the tokens of a window from this place in the text on


def likelihoods(logits: Tensor, targets: Tensor) -> Likelihoods:
    """In float32. The largest logit is taken off first: sums of what is left are exact enough for
    differences of 1e-7 nats."""
    most, best = logits.float().max(-1, keepdim=True)
    shifted = logits.float() - most
    log_sum = shifted.exp().sum(-1).log()
    return Likelihoods(shifted, log_sum, log_sum - _at(shifted, targets), best[:, 0])


def divergences(dense: Likelihoods, ours: Likelihoods) -> Tensor:
    """KL(dense ‖ ours) of every row [n]: 0 for equal ones."""
    p = (dense.logits - dense.log_sum[:, None]).exp_()
    gap = (dense.logits - ours.logits).masked_fill_(p == 0, 0.0)  # of -inf and -inf
    return (p.mul_(gap).sum(-1) - (dense.log_sum - ours.log_sum)).clamp_min(0.0)


def scores(
    hidden: Tensor, head: Readout, targets: Tensor, dense: tuple[Tensor, Readout] | None
) -> TokenScores:
    """Scores of the tokens `targets` [n] by the states before them [n, d], logits a few at a time."""
    parts = list[TokenScores]()
    for at in chunks(hidden, head.weight):
        ours = likelihoods(head.logits(hidden[at]), targets[at])
        theirs = ours if dense is None else likelihoods(dense[1].logits(dense[0][at]), targets[at])
        kl = torch.zeros_like(ours.loss) if dense is None else divergences(theirs, ours)
        parts.append(TokenScores(ours.loss, ours.best, theirs.loss, theirs.best, kl))
    return TokenScores.joined(parts)


def _at(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.gather(-1, targets[:, None])[:, 0]


def divided(model: PreTrainedModel, ids: Tensor, beginning: Beginning) -> Replies:
    """A decoder in two parts, tried on the beginning of a text."""
    return Replies(model, begun(ids[None, :1], beginning).to(model.device), blocks=False)


@torch.inference_mode()
def text_scores(
    model: PreTrainedModel,
    ids: Tensor,
    window: int,
    stride: int,
    batch: int,
    progress: Progress,
    beginning: Beginning = (),
    dense: DenseStates | None = None,
) -> list[ScoredWindow]:
    """Scores of the tokens `ids` [n] in windows every `stride` tokens, beside those of a `dense` model.
    Each is scored in the first window that has something before it. Raises CapabilityError for a window
    beyond the context, InputError for unknown ids, NumericsError for a loss that is not finite."""
    limit = context_of(model.config.to_dict())
    if window > limit:
        remedy = "take a shorter one, or leave --window out"
        raise CapabilityError(f"window {window} is longer than the model's context of {limit}; {remedy}")
    check_ids(model, torch.cat([ids.new_tensor(beginning), ids]))
    room, found = room_in(window, beginning), list[ScoredWindow]()
    stride = min(stride, room)
    starts = list(range(0, max(len(ids) - room, 0) + 1, stride))
    if starts[-1] + room < len(ids):
        starts.append(starts[-1] + stride)
    groups = [starts[n : n + batch] for n in range(0, len(starts), batch)]
    reader = divided(model, ids, beginning)
    with progress.layers(len(groups), "evaluating") as advance:
        for group in groups:
            advance("")
            for rows, fresh, places in _stack(ids, group, room, stride, bool(beginning)):
                rows = begun(rows, beginning).to(model.device)
                theirs = None if dense is None else dense.states(rows, fresh)
                states, targets = predicting(reader, rows, fresh), rows[:, -fresh:].flatten()
                parts = (x.view(-1, fresh).cpu() for x in scores(states, reader.head, targets, theirs))
                found += zip(places, map(TokenScores._make, zip(*parts, strict=True)), strict=True)
    every = TokenScores.joined([window for _, window in found])
    for loss, whose in ((every.loss, ""), (every.dense_loss, " of the dense model")):
        if not (mean := float(loss.double().mean())) < MAX_LOSS:  # NaN is not
            raise NumericsError(
                f"the mean negative log-likelihood{whose} is {mean:g}: expected a finite number below "
                f"{MAX_LOSS}; evaluate in --dtype float32, or repair the checkpoint"
            )
    return found


def _stack(
    ids: Tensor, starts: list[int], room: int, stride: int, begins: bool
) -> list[tuple[Tensor, int, list[int]]]:
    """Rows of equal length and count of new tokens: ([m, w], new, places of the first new ones)."""
    groups: dict[tuple[int, int], list[int]] = {}
    for start in starts:
        length = min(room, len(ids) - start)
        alone = start == 0 or stride == room
        fresh = length - (not begins) if alone else length - (room - stride)
        if fresh > 0:
            groups.setdefault((length, fresh), []).append(start)
    return [
        (torch.stack([ids[s : s + n] for s in found]), fresh, [s + n - fresh for s in found])
        for (n, fresh), found in groups.items()
    ]


def predicting(model: Replies, rows: Tensor, fresh: int) -> Tensor:
    """The states [m fresh, d] that predict the last `fresh` tokens of rows [m, w]."""
    return model.run(rows)[0][:, -fresh - 1 : -1].flatten(0, 1)


def kept_at(folder: Path, checkpoint: Path, *key: object) -> Path:
    """Where the states of a dense checkpoint lie that depend on `key`, too. Its files are known by their
    places, sizes and times; the system sets st_ctime at each change, also of the other times."""
    files = {path.name: path.stat() for path in sorted(checkpoint.iterdir()) if path.is_file()}
    stats = [(n, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for n, s in files.items()]
    by = (__version__, torch.__version__, transformers.__version__)
    return folder / f"{hashlib.sha256(canonical_json([stats, by, key])).hexdigest()}.safetensors"


class DenseStates:
    """States of the windows of a text of `tokens`, in their order: read from `path` where they lie, else
    computed by the model that `load` gives, and kept there. None: kept nowhere."""

    def __init__(self, load: Callable[[], Replies], path: Path | None, tokens: int) -> None:
        self.path, self.tokens = path, tokens
        self.kept = _read(path) if path is not None else {}
        self.model = None if self.kept else load()
        self.at, self.new = 0, list[Tensor]()

    def states(self, rows: Tensor, fresh: int) -> tuple[Tensor, Readout]:
        """What predicts the last `fresh` tokens of each row [m, w], and the head for it."""
        if self.model is not None:
            found = predicting(self.model, rows, fresh)
            if self.path is not None and self.tokens * found[0].nbytes <= MOST_KEPT:
                self.new.append(found.cpu())
            return found, self.model.head
        self.kept = {name: tensor.to(rows.device) for name, tensor in self.kept.items()}
        self.at += len(rows) * fresh
        found = self.kept["hidden"][self.at - len(rows) * fresh : self.at]
        return found, Readout(self.kept.get("weight"), self.kept.get("bias"))

    def write(self, progress: Progress) -> None:
        """Keep the states that were computed; where that fails, a warning says so."""
        if self.model is None or self.path is None:
            return
        if not self.new:
            most = f"over {MOST_KEPT >> 30} GiB, which is the most; give a shorter text"
            return progress.notes([f"the dense model's states are not kept: {most}"])
        head, scratch = self.model.head, scratch_for(self.path)
        tensors = {"hidden": torch.cat(self.new), "weight": head.weight, "bias": head.bias}
        held = {name: t.detach().cpu().contiguous() for name, t in tensors.items() if t is not None}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            save_file(held, scratch)
            settle(scratch, self.path)
        except Exception as error:  # of the system, or of the library's own kind
            said = f"{self.path.parent}: the dense model's states are not kept: {first_line(error, 160)}"
            progress.warn(f"{said}; free room there, or choose another folder")
        finally:
            with suppress(OSError):
                scratch.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Tensor]:
    """What lies at `path`; nothing of a file that is no such one, which is then made anew."""
    try:
        found = load_file(path)
        return found if "hidden" in found else {}
    except Exception:  # of whatever another has written there
        return {}


@dataclass(frozen=True)
class Estimate:
    """A figure of a text and its standard error, which takes tokens for independent."""

    value: float
    error: float


@dataclass(frozen=True)
class FarToken:
    """Token number `token` of a text, behind the text `before` it: its probabilities by the dense model
    and by the output, and what they find the likeliest."""

    token: int
    kl: float
    before: str
    text: str
    probabilities: tuple[float, float]
    likeliest: tuple[str, str]


@dataclass(frozen=True)
class Distance:
    """An output beside its dense model on a text: perplexities of `dense` and `output` and their
    `ratio`, `kl` as of `output/loss.divergence`, the share of equal top-1 tokens (`agreement`), and the
    root mean square by which the right token's probability changed (`rms_dp`). `flips` count other top-1
    tokens: the dense model's was right (`lost`), the output's is (`gained`), or neither (`between`)."""

    perplexities: dict[str, Estimate]
    kl: Divergence
    agreement: float
    flips: dict[str, int]
    rms_dp: float
    tokens: list[FarToken]


def check_alike(
    folders: Sequence[Path], tokenizers: Sequence[PreTrainedTokenizerBase], texts: Sequence[str]
) -> None:
    """Raise InputError unless an output and its dense model, in this order, read all text alike."""
    ours, dense = (of_text(read_config(folder)).get("vocab_size") for folder in folders)
    expected = f"as of {folders[0]}; compare an output with the model that it was made from"
    if ours != dense:
        raise InputError(f"{folders[1]}: a vocabulary of {dense} tokens, expected {ours} {expected}")
    known = [
        (tokenizer.get_vocab(), [tokenizer(text, verbose=False)["input_ids"] for text in texts])
        for tokenizer in tokenizers
    ]
    if known[0] != known[1]:
        raise InputError(f"{folders[1]}: a tokenizer that gives other tokens, expected one {expected}")


def distance(
    windows: Sequence[ScoredWindow], ids: Tensor, first: int, tokenizer: PreTrainedTokenizerBase
) -> Distance:
    """The distance on a text with `ids` [n], which begin at its token number `first`."""
    every = TokenScores.joined([scores for _, scores in windows])
    at = torch.cat([place + torch.arange(len(scores.kl)) for place, scores in windows])
    right, p, q = ids[at], (-every.dense_loss).exp(), (-every.loss).exp()
    same, hit, before = every.best == every.dense_best, every.best == right, every.dense_best == right
    flips = {"lost": before & ~hit, "gained": hit & ~before, "between": ~(same | hit | before)}

    def said(ids: Tensor) -> str:
        return str(tokenizer.decode(ids))

    far = list[FarToken]()
    for n in every.kl.topk(min(FAR, len(at))).indices.tolist():
        place = int(at[n])
        texts = said(ids[max(place - CONTEXT, 0) : place]), said(right[n])
        likeliest = said(every.dense_best[n]), said(every.best[n])
        pair = float(p[n]), float(q[n])
        far.append(FarToken(first + place, float(every.kl[n]), *texts, pair, likeliest))
    losses = {"dense": every.dense_loss, "output": every.loss, "ratio": every.loss - every.dense_loss}
    return Distance(
        {name: _exponential(loss.double()) for name, loss in losses.items()},
        divergence([row.kl for _, row in windows], [first + place for place, _ in windows], EXACT),
        float(same.double().mean()),
        {how: int(places.sum()) for how, places in flips.items()},
        float((q - p).square().mean().sqrt()),
        far,
    )


def _exponential(losses: Tensor) -> Estimate:
    """exp of the mean of losses; its error is that of the mean, times itself."""
    value = math.exp(float(losses.mean()))
    return Estimate(value, value * standard_error(losses))
