"""The section of a model card that says how the model was healed."""

from __future__ import annotations

from typing import Any

SECTION = """
## Healed

Trained for {steps:,} steps ({tokens:,} tokens of {texts}, {minutes:.1f} minutes on {device}) to answer
as `{teacher}` does: {loss}, {parameters:,} parameters ({kinds}) at {rate:g} of their root mean square a
step, seed {seed}. The state after step {best_step:,} was kept, the best by windows of the same texts
that were not trained on; in nats a token there:

| held-back text | {measure} before | after | loss before | after | of the dense model |
|---|---|---|---|---|---|
{rows}

The errors of the weights above are those before healing; `blr inspect` gives the present ones, and
`metrics.jsonl` the course of the training.
"""
LOSSES = {"kl": "divergence of the next token's distribution", "lm": "loss on the text"}


def healed_card(card: str, facts: dict[str, Any]) -> str:
    """`card` with a section on a run of which `facts` are told (`Job.facts`)."""
    rows = [_row(name, facts["before"][name], facts["after"][name]) for name in facts["before"]]
    texts = " and ".join("its own text" if name == "self" else name for name in facts["before"])
    return card + SECTION.format(
        **{key: facts[key] for key in ("steps", "tokens", "minutes", "device", "teacher", "rate")},
        **{key: facts[key] for key in ("parameters", "seed", "best_step")},
        kinds=", ".join(facts["train"]),
        loss=LOSSES[facts["loss"]],
        texts=texts,
        measure="KL",
        rows="\n".join(rows),
    )


def _row(name: str, before: dict[str, float], after: dict[str, float]) -> str:
    label = "own text" if name == "self" else name
    numbers = (before["kl"], after["kl"], before["student"], after["student"], before["teacher"])
    return f"| {label} | " + " | ".join(f"{number:.4f}" for number in numbers) + " |"
