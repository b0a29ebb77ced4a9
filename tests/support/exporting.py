"""Compresses and exports in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from blr.compressor.compress import Settings, compress
from blr.compressor.export.run import ExportOptions, export
from blr.compressor.progress import Progress
from blr.compressor.recipe import make_recipe

Invoke = Callable[..., tuple[int, str, str]]  # exit code, standard output and error of a command


def compress_to(source: Path, output: Path, **settings: object) -> Path:
    """`source` compressed; returns `output`."""
    compress(source, make_recipe(**settings), output, Settings(source.name), Progress(quiet=True))
    return output


def export_to(source: Path, output: Path, **options: object) -> Path:
    """`source` exported; returns `output`."""
    export(source, output, ExportOptions(source.name, **options), Progress(quiet=True))
    return output
