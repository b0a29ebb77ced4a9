"""Options that several commands share, and how results are printed."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from blr.compressor.base.quoting import printable_all
from blr.compressor.cli import values
from blr.compressor.cli.from_fields import typed
from blr.compressor.recipe.eval_settings import EvalSettings
from blr.compressor.recipe.run_settings import RunSettings
from blr.compressor.recipe.schema import Recipe


class Format(StrEnum):
    """How results are printed."""

    text = "text"
    json = "json"


Model = Annotated[
    str,
    typer.Argument(
        callback=values.name,
        help="A checkpoint folder, a hub id (owner/name) or a short name (llama-7b).",
    ),
]
Checkpoint = Annotated[
    str, typer.Argument(callback=values.name, help="A checkpoint folder or a hub id.")
]
Output = Annotated[str, typer.Argument(callback=values.name, help="A folder that blr wrote.")]
OutputFolder = Annotated[
    Path, typer.Option("--output", "-o", callback=values.place, help="Write this folder.")
]
FormatOption = Annotated[Format, typer.Option("--format", help="Print text, or one JSON object.")]
Device = Annotated[str, typed(EvalSettings, "device")]
Threads = Annotated[int | None, typed(EvalSettings, "threads")]
Gpus = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=64,
        help="Start this many processes, one on each GPU (or on the CPU with --device cpu).",
        show_default="1",
    ),
]
EvalWindow = Annotated[int | None, typed(EvalSettings, "window")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
Verify = Annotated[bool, typed(EvalSettings, "verify", "--verify/--no-verify")]
Offline = Annotated[bool, typed(RunSettings, "offline", "--offline")]
Trust = Annotated[bool, typed(EvalSettings, "trust_remote_code", "--trust-remote-code")]
Revision = Annotated[str | None, typed(RunSettings, "revision")]
Restart = Annotated[bool, typed(RunSettings, "restart", "--restart")]
Blocks = Annotated[int | None, typed(Recipe, "blocks")]


def print_result(result: dict[str, Any], text: Any, format: Format) -> None:
    """One JSON object, or `text` of the result with names that a terminal might obey escaped."""
    print(json.dumps(result) if format is Format.json else text(printable_all(result)))
