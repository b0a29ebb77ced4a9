"""Commands that run a model: eval and generate."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer

from blr.compressor.base.progress import Progress
from blr.compressor.base.quoting import quote
from blr.compressor.base.tables import aligned
from blr.compressor.cli.options import (
    Checkpoint,
    Format,
    FormatOption,
    Quiet,
    options_for,
    print_result,
    taking,
)
from blr.compressor.recipe.settings import EvalSettings, GenerateSettings, check_generate

EVAL = "text against tasks sts window max_tokens dtype device quiet format"
GENERATE = "max_new_tokens temperature top_k top_p seed profile dtype device format"


@taking(options_for(EvalSettings), first=EVAL)
def evaluate(
    checkpoint: Checkpoint, quiet: Quiet = False, format: FormatOption = Format.text, **options: Any
) -> None:
    """Measure a model, alone or --against the dense one: a decoder's perplexity (--text) and --tasks, or
    an encoder's --sts."""
    from blr.compressor.commands import api

    result = api.evaluate(checkpoint, progress=Progress(quiet), **options)
    print_result(result, _text, format)


def _text(result: dict[str, Any]) -> str:
    """A line a number; a table a list of texts, and of tasks."""
    shown = {k: v for k, v in result.items() if k not in ("text", "beginning", "counted")}
    numbers = {k: v for k, v in shown.items() if not isinstance(v, dict | list)}
    lines = [f"{k}: {_number(v)}" for k, v in numbers.items()]
    if texts := result.get("texts"):
        rows = [(r["text"], _number(r["perplexity"]), str(r["tokens"])) for r in texts]
        lines.append(aligned([("text", "perplexity", "tokens"), *rows], {1, 2}))
    for row in texts or [result]:
        if far := row.get("against"):
            lines += [f"{row['text']}:"] if texts else []
            plain = [f"{name.replace('_', ' ')}: {_number(value)}" for name, value in far.items()]
            lines += _distance(far) if "kl" in far else plain
    if texts or "counted" in result:
        lines.append(f"counted: {(texts or [result])[0]['counted']}")
    if scores := result.get("tasks"):
        lines += _tasks(scores, result["samples"], result.get("tasks_against"))
    return "\n".join(lines)


def _distance(far: dict[str, Any]) -> list[str]:
    """How far a decoder is from the dense one in a text, with standard errors behind ±."""
    kl, figures = far["kl"], far["perplexities"].items()
    three = ", ".join(f"{name} {one['value']:.4f} ± {one['error']:.4f}" for name, one in figures)
    tail = ", ".join(f"{share}% {value:.4g}" for share, value in kl["percentiles"].items())
    flips = ", ".join(f"{count} {how}" for how, count in far["flips"].items())
    worst = ", ".join(f"{window['token']:,} ({window['kl']:.3g})" for window in kl["worst"])
    rows = [
        (
            *(f"{one['token']:,}", f"{one['kl']:.3g}", quote(one["before"][-24:]), quote(one["text"])),
            " -> ".join(f"{p:.3f}" for p in one["probabilities"]),
            " -> ".join(map(quote, one["likeliest"])),
        )
        for one in far["tokens"]
    ]
    head = ("token", "KL", "behind", "is", "probability", "likeliest")
    return [
        f"perplexities: {three}",
        f"KL: mean {kl['mean']:.4g} ± {kl['error']:.2g}, {tail}",
        f"same top-1 token: {far['agreement']:.2%}, flips: {flips}",
        f"RMS change of the right token's probability: {far['rms_dp']:.2%}",
        f"worst windows begin at tokens: {worst}",
        aligned([head, *rows], {0, 1}),
    ]


def _tasks(scores: dict[str, Any], documents: dict[str, int], far: dict[str, Any] | None) -> list[str]:
    """Scores as a table; beside a dense model its own, what is recovered, and how many items changed."""
    rows, more = [], ("dense", "recovery", "lost", "gained") if far else ()
    for task, metrics in scores.items():
        for metric, value in metrics.items():
            row = [task, metric, _number(value), str(documents.get(task, ""))]
            if far:
                recovered = far["recovery"][task].get(metric)
                row += [_number(far["dense"][task][metric])]
                row += ["" if recovered is None else f"{recovered:.1f}%"]
                row += [str(far[name].get(task, "")) for name in ("lost", "gained")]
            rows.append(row)
    return [aligned([("task", "metric", "value", "documents", *more), *rows], range(2, 8))]


def _number(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


@taking(options_for(GenerateSettings), first=GENERATE)
def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    format: FormatOption = Format.text,
    **options: Any,
) -> None:
    """Continue a prompt with a decoder, written as it is generated."""
    from blr.compressor.base.threads import use_threads
    from blr.compressor.loading.resolve import resolve_model

    asked = GenerateSettings(**options)
    check_generate(asked)
    use_threads(asked.threads)
    folder = resolve_model(checkpoint, offline=asked.offline).folder

    progress = Progress()
    progress.loading()
    from blr.compressor.commands import generate as library
    from blr.compressor.loading.load import GENERATES, load_model, load_tokenizer

    if asked.profile:
        library.check_profile(asked.device)
    trust = asked.trust_remote_code
    tokenizer = load_tokenizer(folder, trust=trust, text=prompt)
    dtype = asked.dtype or library.default_dtype(folder, asked.device)
    how = {"trust": trust, "verify": asked.verify}
    model = load_model(folder, GENERATES, dtype=dtype, device=asked.device, progress=progress, **how)
    stream = sys.stdout if format is Format.text else None
    result = library.generate(model, tokenizer, prompt, asked, stream)
    found = library.profile(model, tokenizer, prompt) if asked.profile else None
    if format is Format.json:
        print(json.dumps({**asdict(result), **({"profile": asdict(found)} if found else {})}))
    elif found is not None:
        print(library.profile_text(found), file=sys.stderr)
