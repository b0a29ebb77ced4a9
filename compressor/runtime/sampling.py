"""Chooses tokens on the device without waiting for it."""

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from blr.compressor.base.errors import NumericsError

# Steps in flight: enough to hide the launch of a graph and the copy of its tokens.
LAG = 3


def check_logits(logits: Tensor) -> None:
    """Raise NumericsError for logits [B, vocab] by which no token can be chosen: one is NaN or +inf, or
    all are -inf. Waits for the device."""
    if not bool(torch.isfinite(logits.amax(-1)).all()):  # of which NaN is the largest
        raise NumericsError(
            "the logits of the next token hold NaN or Inf, expected finite numbers; compute in --dtype "
            "float32 or bfloat16, or repair the checkpoint"
        )


@dataclass(frozen=True)
class Sampler:
    """Chooses the most likely token at temperature 0, and draws one otherwise.

    top_k: draw among the k most likely. top_p: draw among the most likely that together reach this
    probability. They apply in the order of transformers: temperature, top-k, top-p. Raises ValueError
    for a temperature below 0, a top_k below 1, a top_p outside (0, 1]."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature {self.temperature}: expected 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k {self.top_k}: expected at least 1, or None for all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p}: expected above 0, up to 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """Probabilities [B, vocab] in float32 of logits [B, vocab], for a temperature above 0."""
        logits = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k, -1).values[:, -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        probabilities = logits.softmax(-1)
        if self.top_p is None or self.top_p == 1:
            return probabilities
        ordered, index = probabilities.sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered  # what more likely tokens have already
        kept = ordered.masked_fill(before >= self.top_p, 0)
        return torch.zeros_like(probabilities).scatter_(-1, index, kept)

    def distribution(self, logits: Tensor) -> Tensor:
        found = self.probabilities(logits)
        return found if self.top_p is None else found / found.sum(-1, keepdim=True)

    def choose(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Choose tokens [B] int64. A draw takes the largest of probability over exponential noise."""
        if self.greedy:
            return logits.argmax(-1)
        probabilities = self.probabilities(logits)
        noise = torch.empty_like(probabilities).exponential_(generator=generator)
        return (probabilities / noise.clamp_min_(1e-30)).argmax(-1)


class Arriving:
    """The copy of a tensor that is on its way from the device."""

    def __init__(self, tensor: Tensor) -> None:
        on_gpu = tensor.is_cuda
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
        self._host.copy_(tensor, non_blocking=on_gpu)
        self._event = torch.cuda.Event() if on_gpu else None
        if self._event is not None:
            self._event.record()

    def wait(self) -> Tensor:
        """The copy, once it is there."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


class Collector:
    """Collects the tokens of each of `rows` up to and including a first of `stop_ids`, `limit` at most.
    on_token: called with (row, token) for each token kept, in order."""

    def __init__(
        self,
        rows: int,
        limit: int,
        stop_ids: Collection[int] = (),
        on_token: Callable[[int, int], None] | None = None,
    ) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self._open, self._limit = set(range(rows)), limit
        self._stop, self._on_token = frozenset(stop_ids), on_token
        self._waiting: deque[Arriving] = deque()

    @property
    def left(self) -> int:
        return max((self._limit - len(self.tokens[row]) for row in self._open), default=0)

    def keep(self, row: int, tokens: Iterable[int]) -> bool:
        """Take `tokens` of a row until it ends; whether it was open."""
        if row not in self._open:
            return False
        for token in tokens:
            self.tokens[row].append(token)
            if token in self._stop or len(self.tokens[row]) == self._limit:
                self._open.discard(row)
            if self._on_token is not None:
                self._on_token(row, token)
            if row not in self._open:
                break
        return True

    @property
    def done(self) -> bool:
        return not self._open

    def push(self, tokens: Tensor) -> None:
        """Start to copy tokens [rows] from the device, and take those of `LAG` steps ago."""
        self._waiting.append(Arriving(tokens))
        self._take(LAG if tokens.is_cuda else 0)

    def finish(self) -> list[list[int]]:
        self._take(0)
        return self.tokens

    def _take(self, left: int) -> None:
        while len(self._waiting) > left:
            for row, token in enumerate(self._waiting.popleft().wait().tolist()):
                self.keep(row, [token])
