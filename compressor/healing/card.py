"""Writes the section of a model card that says how the model was healed."""

from typing import Any

from blr.compressor.output.loss_messages import MARK

SECTION = """
## Healed

Trained for {steps:,} steps ({tokens:,} tokens of {texts}, on {device}) to answer
as `{teacher}` does: {loss}, {parameters:,} parameters ({kinds}) at {rate:g} of their root mean square a
step, seed {seed}. The state after step {best_step:,} was kept, the best by windows of the same texts
that were not trained on; {table}
"""
FOOT = """
Sizes, errors and what is unchanged stand above as they were before healing; `blr inspect` gives the
present sizes and errors, and `metrics.jsonl` the course of the last training.
"""
LOSSES = {
    "kl": "divergence of the next token's distribution",
    "lm": "loss on the text",
    "variation": "total variation between the next token's distributions",
    "distance": "1 − cosine of the sentence embeddings, and errors of the hidden states",
}
STATES = " and {:g} times the relative squared error of the blocks' outputs"
NATS = """in nats a token there:

| held-back text | KL before | after | loss before | after | of the dense model |
|---|---|---|---|---|---|
"""
COSINES = """there:

| held-back text | 1 − cosine of embeddings before | after | error of hidden states before | after |
|---|---|---|---|---|
"""


def healed_card(card: str, facts: dict[str, Any]) -> str:
    """`card` with one more section at its end, about a run with these `facts` (`HealRun.told`)."""
    texts = " and ".join(_label(name, "its own text") for name in facts["before"])
    section = SECTION.format(
        **{key: facts[key] for key in ("steps", "tokens", "device", "teacher", "rate")},
        **{key: facts[key] for key in ("parameters", "seed", "best_step")},
        kinds=", ".join(facts["train"]),
        loss=_loss(facts),
        texts=texts,
        table=_table(facts["before"], facts["after"]),
    )
    return card.removesuffix(FOOT) + section + MARK + FOOT


def _loss(facts: dict[str, Any]) -> str:
    also = "" if facts["loss"] == "distance" or not facts["hidden"] else STATES.format(facts["hidden"])
    return LOSSES[facts["loss"]] + also


def _table(before: dict[str, dict[str, float]], after: dict[str, dict[str, float]]) -> str:
    encoder = "distance" in next(iter(before.values()))
    columns = ("distance", "states") if encoder else ("kl", "student")
    rows = []
    for name, was in before.items():
        numbers = [x for column in columns for x in (was[column], after[name][column])]
        numbers += [] if encoder else [was["teacher"]]
        rows.append(f"| {_label(name)} | " + " | ".join(f"{x:.4f}" for x in numbers) + " |")
    return (COSINES if encoder else NATS) + "\n".join(rows)


def _label(name: str, own: str = "own text") -> str:
    return own if name == "self" else name
