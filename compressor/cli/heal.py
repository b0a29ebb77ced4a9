"""`blr heal`: a compressed checkpoint trained to answer as the dense one does."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from blr.compressor.base import process_environment as environment
from blr.compressor.cli import values
from blr.compressor.cli.from_fields import (
    Format,
    FormatOption,
    Gpus,
    OutputFolder,
    Quiet,
    print_result,
    setting_options,
    taking,
)
from blr.compressor.cli.summary import check_lines, healed_lines, laid_out, time_line, use_lines
from blr.compressor.recipe.settings import HealOptions

FIRST = "output data minutes teacher mix lora device gpus overwrite quiet"


@taking(setting_options(HealOptions), first=FIRST)
def heal(
    checkpoint: Annotated[
        str,
        typer.Argument(callback=values.name, help="A folder written by blr compress, or a hub id."),
    ],
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
    from blr.compressor.cli.crew import end_member, started
    from blr.compressor.cli.signals import stop_on_signals

    with stop_on_signals() as running, started(gpus, running):
        from blr.compressor.base.progress import Progress
        from blr.compressor.commands.api import heal as run

        running.kept = "what was saved so far is"
        running.progress = progress = Progress(quiet, silent=not environment.is_first())
        summary = run(checkpoint, output, teacher, progress=progress, **options)
        if summary is None:  # in all processes but the first
            end_member()
    if summary is not None:
        print_result(asdict(summary), _heal_text, format)


def _heal_text(summary: dict[str, Any]) -> str:
    output = summary["output"]
    return laid_out(
        (
            ("output", output),
            *healed_lines(summary),
            *(check_lines(summary["check"]) if summary["steps"] else ()),
            time_line(summary),
            ("report", f"{output}/report.html"),
            *use_lines(output, summary["check"]),
        )
    )
