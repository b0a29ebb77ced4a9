"""What a healing run tells of itself when it is done."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class HealSummary:
    """What healing achieved. `before` and `after` map each text to nats a token on its held-back
    windows: `kl` from the teacher, and the loss of `student` and `teacher`. `seconds` is the wall time
    of this run, `trained_seconds` that of training, earlier runs included, `tokens_per_second` the
    median of the logged parts of this run; `check` says what was run of the output and how far its
    results are from the dense model's (`output/check.py`)."""

    output: str
    steps: int = 0
    tokens: int = 0
    parameters: int = 0
    best_step: int = 0
    before: dict[str, dict[str, float]] = field(default_factory=dict)
    after: dict[str, dict[str, float]] = field(default_factory=dict)
    trained_seconds: float = 0.0
    tokens_per_second: float = 0.0
    seconds: float = 0.0
    check: dict[str, Any] | None = None
