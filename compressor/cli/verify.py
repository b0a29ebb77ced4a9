"""`blr verify`: an output against its manifest."""

from __future__ import annotations

from pathlib import Path

from blr.compressor.cli.options import Checkpoint, Format, FormatOption, print_result


def verify(output: Checkpoint, format: FormatOption = Format.text) -> None:
    """Check every file of an output against its manifest; exit code 10 on a mismatch."""
    from blr.compressor.verify import verify_output, verify_text

    print_result(verify_output(Path(output)), verify_text, format)
