"""`blr inspect`: what an output consists of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blr.compressor.cli.options import Format, FormatOption, Output, print_result


def inspect(
    checkpoint: Output,
    verify: Annotated[
        bool, typer.Option("--verify", help="Hash the weights too, against the manifest.")
    ] = False,
    format: FormatOption = Format.text,
) -> None:
    """A table of the structured layers of an output: structure, rank, parameters, error."""
    from blr.compressor.commands.inspect import inspect_output, inspect_text

    print_result(inspect_output(Path(checkpoint), verify), inspect_text, format)
