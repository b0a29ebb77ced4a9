"""`blr eval`: the quality of a model."""

from __future__ import annotations

from typing import Any

from blr.compressor.base.tables import aligned
from blr.compressor.cli.from_fields import (
    Checkpoint,
    Format,
    FormatOption,
    Quiet,
    print_result,
    setting_options,
    taking,
)
from blr.compressor.recipe.eval_settings import EvalSettings


@taking(
    setting_options(EvalSettings), first="text tasks sts window max_tokens dtype device quiet format"
)
def evaluate(
    checkpoint: Checkpoint,
    quiet: Quiet = False,
    format: FormatOption = Format.text,
    **options: Any,
) -> None:
    """Measure a model: perplexity (--text) and tasks (--tasks) of a decoder, or an encoder's --sts."""
    from blr.compressor.base.progress import Progress
    from blr.compressor.commands.api import evaluate as run

    result = run(checkpoint, progress=Progress(quiet), **options)
    print_result(result, _text, format)


def _text(result: dict[str, Any]) -> str:
    """A line a number; a table a list of texts, and of tasks."""
    shown = {k: v for k, v in result.items() if k not in ("text", "beginning", "counted")}
    numbers = {k: v for k, v in shown.items() if not isinstance(v, dict | list)}
    lines = [f"{k}: {_number(v)}" for k, v in numbers.items()]
    if texts := result.get("texts"):
        rows = [(r["text"], _number(r["perplexity"]), str(r["tokens"])) for r in texts]
        lines.append(aligned([("text", "perplexity", "tokens"), *rows], {1, 2}))
    if texts or "counted" in result:
        lines.append(f"counted: {(texts or [result])[0]['counted']}")
    if scores := result.get("tasks"):
        scored = [
            (task, metric, _number(value), str(result["samples"].get(task, "")))
            for task, metrics in scores.items()
            for metric, value in metrics.items()
        ]
        lines.append(aligned([("task", "metric", "value", "documents"), *scored], {2, 3}))
    return "\n".join(lines)


def _number(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
