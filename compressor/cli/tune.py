"""`blr tune`: which kernel variants are the fastest on this GPU."""

from pathlib import Path
from typing import Annotated

import typer

from blr.bench.options import TuneOptions, of_text
from blr.compressor.cli import values
from blr.compressor.cli.from_fields import Format, FormatOption, Quiet, setting_options, taking
from blr.compressor.cli.streams import report_now

Table = Annotated[
    Path | None,
    typer.Option(
        *("--output", "-o"),
        callback=values.place,
        help="Write this YAML file.",
        show_default="~/.cache/blr/tuned/GPU.yaml, which is read first",
    ),
]


@taking(setting_options(TuneOptions))
def tune(
    output: Table = None, quiet: Quiet = False, format: FormatOption = Format.text, **options: object
) -> None:
    """Time the kernels on this GPU, and write the table by which layers choose them."""
    asked: TuneOptions = of_text(TuneOptions, options)
    from blr.bench.tune import Interrupted, run_tune

    try:
        run_tune(asked, output, quiet, format is Format.json)
    except Interrupted as stop:
        report_now(stop.said, stop.code)
        raise typer.Exit(stop.code) from None
