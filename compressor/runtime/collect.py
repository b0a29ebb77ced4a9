"""Brings chosen tokens to the host some steps late, so that the device never waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection

import torch
from torch import Tensor

# Steps in flight: enough to hide the launch of a graph and the copy of its tokens.
LAG = 3


class Collector:
    """Collects the tokens of each row up to and including its first stop token.

    Args:
        rows: of a step. limit: steps at most. stop_ids: tokens that end a row.
        on_token: called with (row, token) for each token kept, in order.
    """

    def __init__(
        self,
        rows: int,
        limit: int,
        device: torch.device,
        stop_ids: Collection[int] = (),
        on_token: Callable[[int, int], None] | None = None,
    ) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self._open = set(range(rows))
        self._stop, self._on_token = frozenset(stop_ids), on_token
        self._asynchronous = device.type == "cuda"
        self._host = torch.zeros(limit, rows, dtype=torch.int64, pin_memory=self._asynchronous)
        self._waiting: deque[tuple[int, torch.cuda.Event | None]] = deque()
        self._steps = 0

    @property
    def done(self) -> bool:
        """Whether every row has met a stop token, as far as is known."""
        return not self._open

    def push(self, tokens: Tensor) -> None:
        """Start to bring tokens [rows], and take those that came `LAG` steps ago."""
        self._host[self._steps].copy_(tokens, non_blocking=self._asynchronous)
        event = None
        if self._asynchronous:
            event = torch.cuda.Event()
            event.record()
        self._waiting.append((self._steps, event))
        self._steps += 1
        self._take(LAG if self._asynchronous else 0)

    def finish(self) -> list[list[int]]:
        """Wait for all tokens; returns those of each row."""
        self._take(0)
        return self.tokens

    def _take(self, left: int) -> None:
        while len(self._waiting) > left:
            step, event = self._waiting.popleft()
            if event is not None:
                event.synchronize()
            for row, token in enumerate(self._host[step].tolist()):
                if row in self._open:
                    self._keep(row, token)

    def _keep(self, row: int, token: int) -> None:
        self.tokens[row].append(token)
        if token in self._stop:
            self._open.discard(row)
        if self._on_token is not None:
            self._on_token(row, token)
