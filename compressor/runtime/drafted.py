"""Decodes with a draft: a small model, or the text so far, proposes tokens, which one pass of the model
checks. It keeps those that the model agrees with, and one more that the model chooses. Rejected tokens
leave slots of both caches behind, which later ones overwrite."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel, load_state_dict
from transformers.utils import cached_file

from blr.compressor.checkpoint.context import NGRAM
from blr.compressor.modeling.settings import warn_once
from blr.compressor.planning.pace import times_as_fast
from blr.compressor.runtime.decoder import MAX_BATCH, Decoder
from blr.compressor.runtime.failures import UnsupportedError
from blr.compressor.runtime.memory import bucket_of
from blr.compressor.runtime.proposals import LIKELY, Lookup, SmallModel, repeat_starts, seconds_of
from blr.compressor.runtime.sampling import Arriving, Collector, Sampler, check_logits
from blr.kernels.decode.gemv.segments import SEVERAL, Run, in_turn

FOLDER = "draft"  # in that of the export
WEIGHTS = f"{FOLDER}/model.safetensors"
ENDS = ("model.embed_tokens.weight", "lm_head.weight")  # which may be stored once for both models
DRAFTS = (1, 2, 3, 5, 7)  # numbers of drafts that a round may have, each a CUDA graph
NONE = 0  # the model alone
CORES = 0.4  # what each more token of a pass adds on CUDA cores
BETTER = 1.05  # times as fast another number of drafts must be, for its graph takes time to capture
KEPT, WEIGHT = 0.95, 4.0  # the weights of a round beside the next one, and of what is believed before
CERTAIN = 0.995  # no share is believed to be more
AHEAD = 1  # rounds that are launched before the results of another are there


@dataclass
class Acceptance:
    """The share of drafts that are accepted, of the last rounds above all; `total` counts all accepted
    drafts of `drafts`, `rounds` those of all sequences."""

    accepted: float = LIKELY * WEIGHT
    tried: float = WEIGHT
    total: int = 0
    drafts: int = 0
    rounds: int = 0

    def add(self, accepted: int, drafts: int) -> None:
        """Count a round of one sequence: drafts after the first rejected one were not tried."""
        self.accepted = KEPT * self.accepted + accepted
        self.tried = KEPT * self.tried + min(accepted + 1, drafts)
        self.total, self.drafts = self.total + accepted, self.drafts + drafts
        self.rounds += 1

    def best(self, choices: Sequence[int], cost: float, now: int = NONE) -> int:
        """The number of drafts that gives most tokens a second, `now` unless another is better by far.
        cost: of a step of the draft, as a part of one of the model."""
        share = min(self.accepted / self.tried, CERTAIN)

        def speed(k: int) -> float:
            return times_as_fast(share, k, cost)

        found = max(choices, key=speed)
        return found if now not in choices or speed(found) > BETTER * speed(now) else now


@dataclass(frozen=True)
class Round:
    """A round for some sequences, and its memory. result: [drafts + 2, B], tokens and then how many of
    them count. noise: [drafts + 1, B, vocab] and chances: [drafts, B], random numbers for it."""

    drafts: int
    result: Tensor
    run: Run
    noise: Tensor | None
    chances: Tensor | None

    def launch(self, generator: torch.Generator | None) -> Arriving:
        if self.noise is not None and self.chances is not None:
            self.noise.exponential_(generator=generator).clamp_min_(1e-30)
            self.chances.uniform_(generator=generator)
        self.run()
        return Arriving(self.result)


@dataclass
class Rounds:
    """What the host knows of the rounds of one call: the slot of each row's last token, and those that
    were launched, with their numbers of drafts."""

    collector: Collector
    slots: list[int]
    acceptance: Acceptance
    waiting: deque[tuple[int, Arriving]] = field(default_factory=deque)

    @property
    def possible(self) -> int:
        return sum(drafts + 1 for drafts, _ in self.waiting)

    def read(self, ahead: int) -> None:
        """Take results until at most `ahead` rounds are on their way, none if those may be the last."""
        while self.waiting and (len(self.waiting) > ahead or self.collector.left <= self.possible):
            drafts, result = self.waiting.popleft()
            *tokens, counts = result.wait().tolist()
            for row, count in enumerate(counts):
                self.slots[row] += count
                if self.collector.keep(row, [step[row] for step in tokens[:count]]):
                    self.acceptance.add(count - 1, drafts)


class DraftedDecoder(Decoder):
    """Decodes with `model` and a `draft` of the same vocabulary, or with the text so far for one.
    Options are those of `Decoder`, for both. Tokens are those of `model` alone, or are drawn by its
    probabilities.

    Attributes:
        acceptance: of the last call of `generate`. cost: of a step of the draft, as a part of a pass of
        the model, by bytes and launches. choices: numbers of drafts that a round may have.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        draft: PreTrainedModel | None,
        *,
        batch: int = 1,
        choices: tuple[int, ...] = (NONE, *DRAFTS),
        **options: Any,
    ) -> None:
        if options.get("mode") == "token":  # a pass that checks a draft has other sums
            raise UnsupportedError(
                "mode 'token': found a draft, expected none; use mode 'graph', or unset BLR_DECODE"
            )
        super().__init__(model, batch=batch, tokens=MAX_BATCH, **options)
        self.draft: SmallModel | Lookup = Lookup(self)
        if draft is not None:
            self.draft = SmallModel(Decoder(draft, batch=batch, tokens=MAX_BATCH, **options))
        self.choices, self.acceptance = choices, Acceptance()
        self.cost = self.draft.seconds / seconds_of(self)
        # of every sequence: the last two tokens, and the slot of the last, which no cache has yet
        self._moving = torch.zeros(3, batch, dtype=torch.int64, device=model.device)
        self._rounds: dict[tuple[object, ...], Round] = {}

    def prefill(self, input_ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Read a prompt into both caches, the model's alone where no draft pays; as of `Decoder`."""
        logits = super().prefill(input_ids, lengths)
        rows = self.rows
        if self._first(rows) == NONE:
            return logits
        self.draft.read(input_ids, lengths)
        repeat_starts(self)
        self._moving[0, :rows] = input_ids[:, -1]
        self._moving[2, :rows] = self.position
        return logits

    def proceed(
        self, logits: Tensor, sampler: Sampler, collector: Collector, steps: int, seed: int
    ) -> list[list[int]]:
        rows, device = self.rows, self.model.device
        choices, cost, drafts = self._possible(rows), self._cost_of(rows), self._first(rows)
        self.acceptance = Acceptance(self.draft.believed * WEIGHT)
        if drafts == NONE:
            return super().proceed(logits, sampler, collector, steps, seed)
        generator = None if sampler.greedy else torch.Generator(device).manual_seed(seed)
        first = self._moving[1, :rows].copy_(sampler.choose(logits, generator))
        for row, token in enumerate(first.tolist()):
            collector.keep(row, [token])
        rounds = Rounds(collector, [self.position] * rows, self.acceptance)
        choices = [k for k in choices if k != NONE]  # the draft has read all so far
        while not collector.done:
            drafts = rounds.acceptance.best(choices, cost, drafts)
            slots = min(max(rounds.slots) + rounds.possible + drafts + 1, self.context)
            launched = self._round(rows, drafts, bucket_of(slots), sampler).launch(generator)
            rounds.waiting.append((drafts, launched))
            rounds.read(AHEAD if device.type == "cuda" else 0)
        check_logits(self.state.buffers["logits"][:rows])
        return collector.tokens

    def capture(self) -> None:
        """Make all greedy rounds that the prompt may want, which `proceed` makes when it wants them."""
        bucket, last = bucket_of(self.position + 1), bucket_of(self.context)
        while bucket <= last:
            for drafts in self._possible(self.rows):
                if drafts != NONE:
                    self._round(self.rows, drafts, bucket, Sampler())
            bucket *= 2

    def _cost_of(self, rows: int) -> float:
        """The cost of a draft and of its check, for so many rows."""
        on_cores = self.plan.plain and max(rows, self.plan.least_rows) < SEVERAL
        return self.cost + CORES * on_cores

    def _first(self, rows: int) -> int:
        """The number of drafts of the first round, before any was accepted."""
        choices = self._possible(rows)
        believed = Acceptance(self.draft.believed * WEIGHT)
        return believed.best(choices, self._cost_of(rows)) if choices else NONE

    def _possible(self, rows: int) -> list[int]:
        return [k for k in self.choices if (k + 1) * rows <= MAX_BATCH]

    def _round(self, rows: int, drafts: int, bucket: int, sampler: Sampler) -> Round:
        key = rows, drafts, bucket, sampler
        if key not in self._rounds:
            self._rounds[key] = self._make(rows, drafts, bucket, sampler)
        return self._rounds[key]

    def _make(self, rows: int, drafts: int, bucket: int, sampler: Sampler) -> Round:
        propose, moving = self.draft.bind(rows, bucket), self._moving[:, :rows]
        check = self.launches(rows, bucket, self.plan.phases, drafts + 1, alone=self.plan.plain)
        device, noise, chances = self.model.device, None, None
        if not sampler.greedy:
            vocabulary = self.state.buffers["logits"].shape[1]
            noise = torch.ones(drafts + 1, rows, vocabulary, device=device)
            chances = torch.ones(drafts, rows, device=device)
        result = torch.zeros(drafts + 2, rows, dtype=torch.int64, device=device)

        def once() -> None:
            proposed, likely = propose(moving, drafts, sampler, noise)
            logits = self._check(check, rows, proposed)
            if likely is None or noise is None or chances is None:
                chosen = self.state.tokens[: rows * (drafts + 1)].view(-1, rows)
                count = agreed(self.hits(chosen, proposed))
            else:
                wanted = sampler.distribution(logits).view(drafts + 1, rows, -1)
                chosen, count = accept(wanted, likely, proposed, chances, noise[-1])
            self.draft.note(moving[2], chosen)
            self._move(chosen, count, rows)
            result.copy_(torch.cat((chosen, count[None] + 1)))

        moved = [self._moving, self.state.tokens, self.state.pos]
        run = self.captured(once, moved, (propose, check, noise, chances))
        return Round(drafts, result, run, noise, chances)

    def hits(self, chosen: Tensor, proposed: Tensor) -> Tensor:
        """Whether each proposed token [drafts, rows] is the one that the model chose in its place."""
        return chosen[:-1] == proposed

    def _check(self, passed: list[Run], rows: int, proposed: Tensor) -> Tensor:
        """Pass the last token and those proposed; logits [(drafts + 1) · rows, vocab]."""
        state, (_, last, at) = self.state, self._moving[:, :rows]
        tokens = torch.cat((last[None], proposed))
        slots = at + torch.arange(len(tokens), device=at.device)[:, None]
        state.tokens[: tokens.numel()] = tokens.flatten()
        state.pos[: tokens.numel()] = slots.clamp(max=self.context - 1).flatten()
        in_turn(passed)
        return state.buffers["logits"][: tokens.numel()]

    def _move(self, chosen: Tensor, count: Tensor, rows: int) -> None:
        """Go on behind the accepted drafts and the token after them. Rows whose cache is full stay."""
        before, last, at = self._moving[:, :rows]
        chain = torch.cat((last[None], chosen))
        before.copy_(chain.gather(0, count[None])[0])
        last.copy_(chain.gather(0, count[None] + 1)[0])
        at.add_(count + 1).clamp_(max=self.context - 1)


def agreed(hits: Tensor) -> Tensor:
    """How many drafts [B] come before the first that is no hit. hits: [drafts, B]."""
    return hits.long().cumprod(0).sum(0)


def accept(
    wanted: Tensor, likely: Tensor, drafts: Tensor, chances: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """Accept drafts [k, B] so that all tokens follow `wanted` [k + 1, B, vocab], whatever `likely` [k,
    B, vocab] they were drawn from: one of probability q, wanted with p, is accepted with p / q, else a
    token is drawn from what p has more than q. chances: [k, B], uniform; noise: [B, vocab], exponential
    variates. Returns tokens [k + 1, B] and how many drafts [B] come before the drawn one."""
    index = drafts[..., None]
    count = agreed(chances * likely.gather(-1, index)[..., 0] < wanted[:-1].gather(-1, index)[..., 0])
    at = count[None, :, None].expand(1, *noise.shape)
    p = wanted.gather(0, at)[0]
    q = torch.cat((likely, torch.zeros_like(likely[:1]))).gather(0, at)[0]
    rest = (p - q).clamp_min(0)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)  # equal but for rounding
    drawn = (rest / noise).argmax(-1)
    tokens = torch.cat((drafts, drawn[None])).scatter(0, count[None], drawn[None])
    return tokens, count


def make_drafted(model: PreTrainedModel, name: str, options: dict[str, Any]) -> Decoder:
    """The decoder of an export with the draft of class `name` in its folder, or with n-gram lookup; one
    without a draft if that is gone."""
    if name == NGRAM:
        return DraftedDecoder(model, None, **options)
    draft = load_draft(model, name)
    return Decoder(model, **options) if draft is None else DraftedDecoder(model, draft, **options)


def load_draft(model: PreTrainedModel, name: str) -> PreTrainedModel | None:
    """The draft of class `name` in the folder of `model`, on its device and in its dtype; None, with a
    warning, where the folder has none any more. Ends that it lacks are those of `model`."""
    cls, folder = type(model).make_model(name), model.config._name_or_path
    revision = {"revision": getattr(model.config, "_commit_hash", None) or "main"}
    try:
        config = cls.config_class.from_pretrained(folder, subfolder=FOLDER, **revision)
        stored = load_state_dict(str(cached_file(folder, WEIGHTS, **revision)), map_location="cpu")
    except OSError as error:
        warn_once(f"no draft in {folder} ({error}): decoding without it")
        return None
    own = dict(model.named_parameters(remove_duplicate=False))
    ends = {key: own[key] for key in ENDS if key in own and key not in stored}
    if "lm_head.weight" in ends and config.tie_word_embeddings:
        del ends["lm_head.weight"]
    draft = cls.from_pretrained(None, config=config, state_dict=stored | ends, dtype=model.dtype)
    draft = draft.to(model.device).eval()
    for key, tensor in ends.items():
        module, _, leaf = key.rpartition(".")
        setattr(draft.get_submodule(module), leaf, tensor)
    draft.tie_weights()
    return draft
