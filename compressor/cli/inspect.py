"""`blr inspect`: what an output consists of."""

from __future__ import annotations

from pathlib import Path

from blr.compressor.cli.from_fields import taking
from blr.compressor.cli.options import Format, FormatOption, Output, print_result


@taking()
def inspect(
    checkpoint: Output,
    verify: bool = False,
    format: FormatOption = Format.text,
) -> None:
    """A table of the structured layers of an output: structure, rank, parameters, error.

    Options:
        verify: Hash the weights too, against the manifest.
    """
    from blr.compressor.commands.inspect import inspect_output, inspect_text

    print_result(inspect_output(Path(checkpoint), verify), inspect_text, format)
