"""The result of a healing run, as the command prints it and the Python interface returns it."""

from dataclasses import dataclass, field

from blr.compressor.output.loss_messages import CheckFacts


@dataclass
class HealSummary:
    """The result of healing. `before` and `after` have, for the held-back windows of each text, the
    `kl` from the teacher and the losses of `student` and `teacher`, in nats a token. `seconds` is the
    wall time of this run, `trained_seconds` the training time of all runs, `tokens_per_second` the
    median of this run; `check` has the measured loss (`output/check.py`)."""

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
    check: CheckFacts | None = None
