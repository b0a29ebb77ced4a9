"""`blr inspect`: what an output consists of."""

from pathlib import Path

from blr.compressor.cli.from_fields import Format, FormatOption, Output, print_result, taking


@taking()
def inspect(
    checkpoint: Output,
    verify: bool = False,
    format: FormatOption = Format.text,
) -> None:
    """Show the layers of an output: structure, rank, parameters and error.

    Options:
        verify: Compare the weights, too, with the manifest.
    """
    from blr.compressor.commands.inspect import inspect_output, inspect_text

    print_result(inspect_output(Path(checkpoint), verify), inspect_text, format)
