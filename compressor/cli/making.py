"""Commands that make a folder, compress, heal and export, and the lines that they say at their end."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from blr.compressor.base import process_environment as environment
from blr.compressor.base.device import installed_card
from blr.compressor.base.progress import NONE, Progress
from blr.compressor.base.quoting import printable
from blr.compressor.base.tables import size_text
from blr.compressor.cli.options import (
    Format,
    FormatOption,
    Gpus,
    Model,
    OutputFolder,
    Quiet,
    named,
    options_for,
    taking,
)
from blr.compressor.cli.signals import Running, end_member, started, stop_on_signals
from blr.compressor.exporting.options import ExportOptions
from blr.compressor.output.loss_messages import CheckFacts, number
from blr.compressor.planning.roofline import ASKED
from blr.compressor.recipe.schema import Recipe
from blr.compressor.recipe.settings import MINUTES, CompressSettings, HealOptions

if TYPE_CHECKING:
    from blr.compressor.commands.compress import Summary
    from blr.compressor.exporting.job import ExportSummary
    from blr.compressor.healing.summary import HealSummary

Made = TypeVar("Made", "Summary", "HealSummary", "ExportSummary")
Line = tuple[str, str]
PROMPT = '"A prompt"'
COMPRESS = """output calibration samples method cf quantize base rank heal effort
recipe exclude device overwrite force quiet"""  # options that help shows first
HEAL = "output data minutes teacher mix lora device gpus overwrite quiet"
EXPORT = """output kind dense_rest quantize quantize_head kv_quantize context
batch gpu self_contained draft text overwrite quiet"""


def make(
    work: Callable[..., Made | None],
    text: Callable[[Made], str],
    format: Format,
    quiet: bool,
    gpus: int | None = None,
    running: Running | None = None,
) -> None:
    """Make a folder by `work`, and print its summary as `text` says it, in the first process."""
    with stop_on_signals(running) as running, started(gpus, running):
        running.progress = progress = Progress(quiet, silent=not environment.is_first())
        summary = work(progress=progress)
        if summary is None:  # in all processes but the first
            end_member()
    if summary is not None:
        print(json.dumps(asdict(summary)) if format is Format.json else text(summary))


@taking(options_for(Recipe), options_for(CompressSettings), first=COMPRESS)
def compress(
    model: Model,
    output: Path | None = None,
    recipe: str | None = None,
    calibration: str | None = None,
    effort: str | None = None,
    heal: Annotated[
        float | None,
        typer.Option(
            metavar="[MINUTES]",
            help="Then train it for so many minutes, as blr heal does.",
            show_default=f"none; {MINUTES:g} without a number",
        ),
    ] = None,
    gpus: Gpus = None,
    stream: bool = False,
    quiet: Quiet = False,
    format: FormatOption = Format.text,
    **options: Any,
) -> None:
    """Make a checkpoint smaller: structured linear layers, fewer bits, or both.

    Options:
        output (--output, -o): Write this folder. [./NAME-METHOD-cfCF, as llama-svd-cf2]
        recipe (--recipe, -r): Take settings from a shipped recipe or a YAML file; options win.
        calibration (--text, --calibration): Fit to what the model computes on this text file, .jsonl or
            data set; self is text that it writes. [none, which loses several times more]
        effort: Fit to --text in this way: quick, normal or best. [normal]
        stream: Leave the weights on the hub, and fetch each one when it is read.
    """
    from blr.compressor.commands import api

    options |= {"effort": effort, "calibration": calibration, "heal": heal, "stream": stream}
    teacher = printable(f"--teacher {quote(model)} --text {quote(calibration or 'TEXT')}")
    work = partial(api.compress, model, output, recipe, **options)
    make(work, partial(_compress_text, teacher=teacher), format, quiet, gpus)


def _compress_text(summary: Summary, teacher: str) -> str:
    kept = f", {summary.kept} kept dense" if summary.kept else ""
    fewer = f", {summary.cf:.2f} times fewer parameters in these" if summary.cf > 1 else ""
    found = summary.output_errors or summary.errors
    what = "of outputs, on the calibration text" if summary.output_errors else "of weights"
    errors = ", ".join(f"{kind} {error:.4f}" for kind, error in found.items())
    output = summary.output
    then = next_line("heal", output, teacher, "-o", quote(f"{output}-healed"))
    bits = f"{summary.bits:.3f} a weight in {summary.share:.1%} of the model's parameters"
    return laid_out(
        ("output", output),
        ("layers", f"{summary.became}{kept}{fewer}"),
        size_line(summary),
        ("bits", bits),
        *check_lines(summary.check),
        ("error", f"{what}, by layer type: {errors}"),
        *(healed_lines(summary.healed) if summary.healed else ()),
        time_line(summary.seconds, summary.spent),
        ("report", f"{output}/report.html"),
        ("note", summary.advice or ""),
        *(use_lines(output, summary.check) if summary.healed else [then]),
    )


@taking(options_for(HealOptions), first=HEAL)
def heal(
    checkpoint: Annotated[str, named("A folder written by blr compress, or a hub id.")],
    output: OutputFolder,
    teacher: str | None = None,
    gpus: Gpus = None,
    quiet: Quiet = False,
    format: FormatOption = Format.text,
    **options: Any,
) -> None:
    """Train a compressed checkpoint to answer as the dense model does.

    Options:
        teacher: Dense model that it came from: a folder, hub id or short name.
            [the one that its manifest names]
    """
    from blr.compressor.commands import api

    work = partial(api.heal, checkpoint, output, teacher, **options)
    make(work, _heal_text, format, quiet, gpus, Running(kept="what was saved so far is"))


def _heal_text(summary: HealSummary) -> str:
    output = summary.output
    return laid_out(
        ("output", output),
        *healed_lines(summary),
        *(check_lines(summary.check) if summary.steps else ()),
        time_line(summary.seconds),
        ("report", f"{output}/report.html"),
        *use_lines(output, summary.check),
    )


@taking(options_for(ExportOptions), first=EXPORT)
def export(
    checkpoint: Annotated[str, named("A folder, dense or compressed by blr, a hub id or a short name.")],
    output: OutputFolder,
    quiet: Quiet = False,
    format: FormatOption = Format.text,
    **options: Any,
) -> None:
    """Write a checkpoint for fast decoding, or for other tools (--as)."""
    from blr.compressor.commands import api

    work = partial(api.export, checkpoint, output, **options)
    make(work, _export_text, format, quiet, running=Running(resumes=False))


def _export_text(summary: ExportSummary) -> str:
    head = f"{summary.quantize_head} head" if summary.quantize_head else None
    kinds = " and ".join(filter(None, (summary.quantize, head)))
    errors = ", ".join(f"{kind} {error:.4f}" for kind, error in summary.errors.items())
    runs = summary.kind in ("folder", "dense", "plain") and generates(summary.check)
    added = f"{summary.untied_bytes:,} bytes beside the embedding it was tied to"
    return laid_out(
        ("output", summary.output),
        *_layers_lines(summary),
        size_line(summary),
        *check_lines(summary.check),
        ("output head", added if summary.untied_bytes else ""),
        ("error", f"of {kinds}, by layer type: {errors}" if errors else ""),
        time_line(summary.seconds),
        *(("run", command) for command in summary.commands),
        *summary.elsewhere.items(),
        *([next_line("generate", summary.output, PROMPT)] if runs else []),
    )


def _layers_lines(summary: ExportSummary) -> list[Line]:
    kind, count, dense = summary.kind, summary.layers, summary.densified
    rest = f"; {dense} of other form, made dense" if dense else ""
    if kind == "dense":
        return [("layers", f"{dense} structured, made dense")]
    if kind == "plain":
        return [("layers", f"{count} low-rank, each two linear ones{rest}")]
    if summary.commands:
        return [("layers", f"{count} in few bits, {summary.bits:.3f} bits a weight{rest}")]
    why = "" if summary.gpu_chosen == ASKED else f" ({summary.gpu_chosen})"
    use = f", batch {summary.batch}, context {summary.context} tokens" if summary.context else ""
    layers = f"{count} structured, in kernel layout"
    if summary.plain:
        layers += f"; {summary.plain} not quantized, which would not make them smaller"
    place = "in this folder" if summary.self_contained else "in the installed package blr-compress"
    return [("for", f"{summary.gpu}{why}{use}"), ("layers", layers), ("kernels", place)]


def laid_out(*lines: Line) -> str:
    """Join labelled lines, the labels in one column, on a terminal in colour. Lines without a text are
    left out, and what a terminal might obey is escaped."""
    shown = [(label, printable(text)) for label, text in lines if text]
    width = 2 + max(len(label) for label, _ in shown)
    cells = [(f"{label}:".ljust(width), text) for label, text in shown]
    if sys.stdout.isatty():
        cells = [(f"\x1b[36m{label}\x1b[0m", text) for label, text in cells]
    return "\n".join(label + text for label, text in cells)


def size_line(summary: Summary | ExportSummary) -> Line:
    """The line with the size of all weights before and after."""
    before, after = summary.bytes_before, summary.bytes_after
    factor, word = (before / after, "smaller") if before >= after else (after / before, "larger")
    change = f"the whole model {factor:.3f} times {word}"
    return "size", f"{size_text(before)} -> {size_text(after)}, {change}"


def check_lines(found: CheckFacts | None) -> list[Line]:
    """The lines on perplexity, loss and check of an output; `found` is of `output/check.py`."""
    if found is None:
        return [("check", "not run, perplexity not measured")]
    ran = f"loaded and run on {found['ran']}, {found['distance']:.4f} relative difference of its outputs"
    if "unmeasured" in found:
        return [("perplexity", f"not measured: {found['unmeasured']}"), ("check", ran)]
    if "loss" not in found:
        return [("check", ran)]
    before, after = (number(found["perplexity"][name]) for name in ("before", "after"))
    lost = f"{found['loss']:z.3f} nats a token, mean KL {found['kl']['mean']:.3f} and the same top-1 "
    lost += f"token in {found['agreement']:.1%}, on the perplexity's tokens"
    read = ("perplexity", f"{before} -> {after} on {found['read']}")
    return [read, ("loss", lost), ("check", ran)]


def healed_lines(summary: HealSummary) -> list[Line]:
    """The lines on a training. Figures of the best step are of other tokens than the output's loss."""
    if not summary.steps:
        return []
    speed = summary.tokens / max(summary.trained_seconds, 1e-9)
    best = f"best after step {summary.best_step:,}"
    if summary.best_step == 0:
        best = "nothing was better than the start, which is written"
    trained = f"{summary.parameters:,} parameters, {summary.steps:,} steps, {summary.tokens:,} "
    trained += f"tokens, {speed:,.0f} a second; {best}"
    lines = [("trained", trained)]
    for name, before in summary.before.items():
        text = "own text" if name == "self" else name
        lines.append(("best step", f"on windows of {text}: {_change(before, summary.after[name])}"))
    return lines


def _change(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    names = {"distance": "1 - cosine of embeddings", "states": "error of hidden states"}
    if "distance" not in before:
        names = {"kl": "KL", "student": "cross entropy"}
    if "variation" in before:
        names |= {"variation": "drafts rejected"}
    said = ", ".join(f"{what} {before[n]:.4f} -> {after[n]:.4f}" for n, what in names.items())
    return said if "distance" in before else f"{said} (dense {before['teacher']:.4f})"


def time_line(seconds: float, spent: Mapping[str, float] = NONE) -> Line:
    """The line with the seconds of the run and of its parts; parts under a second are left out."""
    told = ", ".join(f"{what} {took:.0f}" for what, took in spent.items() if took >= 1)
    return "time", f"{seconds:.1f} s" + (f" ({told})" if told else "")


def use_lines(output: str, check: CheckFacts | None) -> list[Line]:
    """What to do with a finished checkpoint: export it for this machine's GPU, try it, or serve it."""
    exported = next_line("export", output, "-o", quote(f"{output}-fast"))
    if not generates(check):
        return [exported if installed_card() else next_line("inspect", output)]
    served = f"vllm serve {quote(output)}, with blr beside vLLM; not an export"
    tried = next_line("generate", output, PROMPT)
    return [exported if installed_card() else tried, ("server", served)]


def generates(check: CheckFacts | None) -> bool:
    """Whether a checked output continues text; one that was not checked may."""
    return check is None or not {"perplexity", "unmeasured"}.isdisjoint(check)


def next_line(command: str, output: str, *rest: str) -> Line:
    """The command to type next, on the folder that was written."""
    return "next", " ".join(("blr", command, quote(output), *rest))
