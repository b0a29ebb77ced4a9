"""`blr eval`: the quality of a model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blr.compressor.base.errors import UsageError
from blr.compressor.base.tables import aligned
from blr.compressor.cli import values
from blr.compressor.cli.options import (
    WINDOW,
    Checkpoint,
    Device,
    EvalWindow,
    Format,
    FormatOption,
    Offline,
    Quiet,
    Threads,
    Trust,
    Verify,
    print_result,
)
from blr.compressor.workspace.manifest import computing_digest

if TYPE_CHECKING:
    from blr.compressor.loading.resolve import Found


def evaluate(
    checkpoint: Checkpoint,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            callback=values.place,
            help="Text file or .jsonl: perplexity of a decoder on it; repeatable.",
        ),
    ] = None,
    sts: Annotated[
        Path | None,
        typer.Option(
            callback=values.place,
            help="CSV of sentence pairs and scores: Spearman of an encoder on it.",
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(help="Tasks of lm-evaluation-harness, as hellaswag,arc_easy (extra eval)."),
    ] = None,
    tasks_path: Annotated[
        Path | None,
        typer.Option(callback=values.place, help="Folder of more task files (YAML)."),
    ] = None,
    shots: Annotated[
        int | None,
        typer.Option(
            min=0, max=1024, help="Examples in a task's prompt.", show_default="as the task says"
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, callback=values.count, help="Documents a task at most.")
    ] = None,
    window: EvalWindow = None,
    stride: Annotated[
        int | None,
        typer.Option(
            min=1, callback=values.count, help="Tokens between windows.", show_default="the window"
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=2, callback=values.count, help="Only the first tokens.")
    ] = None,
    skip_tokens: Annotated[
        int | None,
        typer.Option(
            min=0, callback=values.count, help="Not the first tokens.", show_default="read them all"
        ),
    ] = None,
    batch: Annotated[
        int, typer.Option(min=1, callback=values.count, help="Windows or sentences at once.")
    ] = 8,
    dtype: Annotated[str, typer.Option(callback=values.dtype, help="Dtype to compute in.")] = "float32",
    device: Device = "auto",
    threads: Threads = None,
    trust_remote_code: Trust = False,
    verify: Verify = True,
    offline: Offline = False,
    quiet: Quiet = False,
    format: FormatOption = Format.text,
) -> None:
    """Perplexity of a decoder (--text) and its score in tasks (--tasks), or STS Spearman of an encoder
    (--sts)."""
    from blr.compressor.base.threads import use_threads
    from blr.compressor.integrations import lm_eval as harness
    from blr.compressor.loading.resolve import resolve_model

    if not (text or tasks or sts):
        raise UsageError("eval needs --text FILE or --tasks NAMES (decoders), or --sts FILE (encoders)")
    if sts and (text or tasks):
        other = "--text" if text else "--tasks"
        raise UsageError(f"--sts is of encoders, {other} of decoders; leave one of them out")
    _refuse_idle("--tasks", tasks, tasks_path=tasks_path, shots=shots, limit=limit)
    if stride is not None and stride > (window or WINDOW):
        most = window or WINDOW
        raise UsageError(f"--stride {stride} would pass tokens by; give at most --window {most}")
    _refuse_idle("--text", text, stride=stride, max_tokens=max_tokens, skip_tokens=skip_tokens)
    if tasks:
        harness.check_installed()
    use_threads(threads)
    found_as = resolve_model(checkpoint, offline=offline)
    folder = found_as.folder
    from blr.compressor.base.progress import Progress

    progress, result = Progress(quiet), dict[str, Any]()
    progress.loading()
    from blr.compressor.checkpoint.regular import read_start
    from blr.compressor.commands import evaluate as library
    from blr.compressor.loading.load import load_model, load_tokenizer
    from blr.compressor.loading.sentences import read_sentences
    from blr.compressor.text.reading import beginning_of

    pairs = library.read_pairs(sts) if sts else []
    if sts:
        library.check_embeds(folder)
    data = [*(text or ()), *([sts] if sts else ())]
    start = read_start(data[0]) if data else ""
    tokenizer = load_tokenizer(folder, trust=trust_remote_code, text=start)
    part = max_tokens, skip_tokens or 0
    tokens = [library.read_tokens(path, tokenizer, *part) for path in text or ()]
    task = "AutoModel" if sts else "AutoModelForCausalLM"
    options = {"trust": trust_remote_code, "verify": verify}
    model = load_model(folder, task, dtype=dtype, device=device, progress=progress, **options)
    if pairs:
        head = read_sentences(folder)
        result = asdict(library.sts_spearman(model, tokenizer, pairs, batch, progress, head))
    if text:
        size = window or library.fitting_window(model, WINDOW)
        begins = beginning_of(tokenizer)
        asked = size, stride or size, batch, progress, begins
        how = _counted(size, stride, tokenizer.convert_ids_to_tokens(list(begins)))
        found = [library.perplexity(model, ids, *asked) for ids in tokens]
        result = _of_texts(text, [{**asdict(each), "counted": how} for each in found])
    if tasks:
        names = [name.strip() for name in tasks.split(",") if name.strip()]
        wanted = harness.Asked(names, tasks_path, shots, limit)
        result |= asdict(harness.run_tasks(model, tokenizer, wanted, batch))
    print_result({"checkpoint": _judged(found_as), **result}, _text, format)


def _judged(found: Found) -> dict[str, str | None]:
    """Name and digest of what is judged, for `blr push`; no digest of what is no output of blr."""
    return {"name": found.name, "digest": computing_digest(found.folder)}


def _of_texts(paths: list[Path], found: list[dict[str, Any]]) -> dict[str, Any]:
    """The result on one text, or those on several."""
    if len(found) == 1:
        return {"text": str(paths[0]), **found[0]}
    return {"texts": [{"text": str(p), **each} for p, each in zip(paths, found, strict=True)]}


def _counted(window: int, stride: int | None, begins: list[str]) -> str:
    """How tokens of a text are counted, as a sentence."""
    if begins:
        told = f"every token of the text, in windows of {window}"
        return f"{told} that each begin with {' '.join(map(str, begins))}, which is not counted"
    first = "the text" if stride is not None and stride < window else "each"
    return f"every token, in windows of {window}, but the first of {first}"


def _refuse_idle(owner: str, given: object, **options: object) -> None:
    """Raise UsageError for one of `options` where the one that they belong to is not given."""
    for name, value in options.items():
        if value is not None and not given:
            raise UsageError(f"--{name.replace('_', '-')} {value} belongs to {owner}; leave it out")


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


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
