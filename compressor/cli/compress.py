"""`blr compress`: a checkpoint with structured layers."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from blr.compressor.base import process_environment as environment
from blr.compressor.cli.from_fields import recipe_options, setting_options, taking
from blr.compressor.cli.options import (
    Format,
    FormatOption,
    Gpus,
    Model,
    Quiet,
    check_text,
    healed_text,
    print_result,
)
from blr.compressor.recipe.heal_settings import MINUTES
from blr.compressor.recipe.run_settings import CompressSettings

OF_EFFORT = ("refit", "finish", "rounds", "samples")  # taken, but not shown: --effort says them


@taking(recipe_options(hidden=OF_EFFORT), setting_options(CompressSettings))
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
            help="Then train it for minutes to answer as the dense model does, as blr heal.",
            show_default=f"not; {MINUTES:g} without a number",
        ),
    ] = None,
    gpus: Gpus = None,
    stream: bool = False,
    quiet: Quiet = False,
    format: FormatOption = Format.text,
    **options: Any,
) -> None:
    """Replace the linear layers of a checkpoint by structured ones, or store them in fewer bits.

    Options:
        output (--output, -o): Folder to write. [NAME-METHOD-cfCF here]
        recipe (--recipe, -r): Shipped name or YAML file; options win.
        calibration (--text, --calibration): Text file, .jsonl, data set, or self (the model's own text):
            fit to its activations.
        effort: quick, normal, best: of the fit to --text. [normal]
        stream: Keep the weights of a hub id there and fetch them as they are read.
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
        print_result(asdict(summary), _compress_text, format)


def _change(factor: float) -> str:
    return f"{factor:.3f} times smaller" if factor >= 1 else f"{1 / factor:.3f} times larger"


def _spent(spent: dict[str, float]) -> str:
    """What took a second or more, in the order in which it began."""
    told = ", ".join(f"{what} {seconds:.0f}" for what, seconds in spent.items() if seconds >= 1)
    return f" ({told})" if told else ""


def _compress_text(summary: dict[str, Any]) -> str:
    before, after = summary["parameters_before"], summary["parameters_after"]
    kept = f", {summary['kept']} kept dense" if summary["kept"] else ""
    found = summary["output_errors"] or summary["errors"]
    what = "outputs, on the calibration text," if summary["output_errors"] else "weights"
    errors = ", ".join(f"{kind} {error:.4f}" for kind, error in found.items())
    return "\n".join(
        (
            f"output: {summary['output']}",
            f"layers: {summary['became']}{kept}, cf {summary['cf']:.3f}, "
            f"{summary['bits']:.3f} bits a weight, {summary['share']:.1%} of the model's parameters",
            f"parameters: {before:,} -> {after:,}",
            f"bytes: {summary['bytes_before']:,} -> {summary['bytes_after']:,}, "
            f"the whole model {_change(summary['factor'])}",
            f"relative error of {what} by layer type: {errors}",
            *healed_text(summary["healed"] or {}),
            check_text(summary["check"]),
            f"time: {summary['seconds']:.1f} s{_spent(summary['spent'])}",
            *([f"note: {summary['advice']}"] if summary["advice"] else []),
        )
    )
