"""`blr compress`: a checkpoint with structured layers."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from blr.compressor.base import process_environment as environment
from blr.compressor.base.quoting import printable
from blr.compressor.cli.from_fields import (
    Format,
    FormatOption,
    Gpus,
    Model,
    Quiet,
    print_result,
    recipe_options,
    setting_options,
    taking,
)
from blr.compressor.cli.summary import (
    check_lines,
    healed_lines,
    laid_out,
    next_line,
    size_line,
    time_line,
    use_lines,
)
from blr.compressor.recipe.settings import MINUTES, CompressSettings

FIRST = """output calibration samples method cf quantize base rank heal effort
recipe exclude device overwrite force quiet"""


@taking(recipe_options(), setting_options(CompressSettings), first=FIRST)
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
    from blr.compressor.cli.crew import end_member, started
    from blr.compressor.cli.signals import stop_on_signals

    with stop_on_signals() as running, started(gpus, running):
        from blr.compressor.base.progress import Progress
        from blr.compressor.commands.api import compress as run

        running.progress = progress = Progress(quiet, silent=not environment.is_first())
        options |= {"effort": effort, "calibration": calibration, "heal": heal, "stream": stream}
        summary = run(model, output, recipe, progress=progress, **options)
        if summary is None:  # in all processes but the first
            end_member()
    if summary is not None:
        teacher = printable(f"--teacher {quote(model)} --text {quote(calibration or 'TEXT')}")
        print_result(asdict(summary), lambda found: _compress_text(found, teacher), format)


def _compress_text(summary: dict[str, Any], teacher: str) -> str:
    kept = f", {summary['kept']} kept dense" if summary["kept"] else ""
    fewer = f", {summary['cf']:.2f} times fewer parameters in these" if summary["cf"] > 1 else ""
    found = summary["output_errors"] or summary["errors"]
    what = "of outputs, on the calibration text" if summary["output_errors"] else "of weights"
    errors = ", ".join(f"{kind} {error:.4f}" for kind, error in found.items())
    output = summary["output"]
    then = next_line("heal", output, teacher, "-o", quote(f"{output}-healed"))
    return laid_out(
        (
            ("output", output),
            ("layers", f"{summary['became']}{kept}{fewer}"),
            size_line(summary),
            (
                "bits",
                f"{summary['bits']:.3f} a weight in {summary['share']:.1%} of the model's parameters",
            ),
            *check_lines(summary["check"]),
            ("error", f"{what}, by layer type: {errors}"),
            *healed_lines(summary["healed"] or {}),
            time_line(summary),
            ("report", f"{output}/report.html"),
            ("note", summary["advice"] or ""),
            *(use_lines(output, summary["check"]) if summary["healed"] else [then]),
        )
    )
