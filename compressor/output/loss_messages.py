"""What is said of the loss of an output (`loss.py`), in words and rounded. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MARK = "<!-- loss -->\n"  # in a card: a line in whose place the sentence comes
MOST = 1.0  # nats a token that an output may lose without --force
LARGE = 0.25  # from which on it is warned of
DIGITS = 5  # significant ones that files have: sums differ in more by the threads that made them


def told(facts: Mapping[str, Any]) -> str:
    """The facts of a loss in a sentence without its end; of one that was not measured, why."""
    if "unmeasured" in facts:
        return f"not measured: {facts['unmeasured']}"
    before, after = (number(facts["perplexity"][name]) for name in ("before", "after"))
    windows = "" if facts.get("first") is None else f", in windows of {facts['window']}"
    return (
        f"{before} -> {after} on {facts['read']}{windows}: {facts['loss']:.3f} nats a token lost, the "
        f"most likely token the same in {facts['agreement']:.1%} of places"
    )


def number(perplexity: float) -> str:
    """A perplexity with as many digits as it is worth."""
    if perplexity < 1000:
        return f"{perplexity:.{2 if perplexity < 100 else 1}f}"
    return f"{perplexity:,.0f}" if perplexity < 1e9 else f"{perplexity:.1e}"


def rounded(value: Any) -> Any:
    """Facts with their numbers as files have them."""
    if isinstance(value, Mapping):
        return {name: rounded(item) for name, item in value.items()}
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
