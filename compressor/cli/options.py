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
from blr.compressor.output.loss_messages import told
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
    Path, typer.Option("--output", "-o", callback=values.place, help="Folder to write.")
]
FormatOption = Annotated[Format, typer.Option("--format", help="text, or one JSON object.")]
Device = Annotated[str, typed(EvalSettings, "device")]
Threads = Annotated[int | None, typed(EvalSettings, "threads")]
Gpus = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=64,
        help="Processes to start on this host, one a GPU (on a CPU: with --device cpu).",
        show_default="1",
    ),
]
EvalWindow = Annotated[int | None, typed(EvalSettings, "window")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on standard error.")]
Verify = Annotated[bool, typed(EvalSettings, "verify", "--verify/--no-verify")]
Offline = Annotated[bool, typed(RunSettings, "offline", "--offline")]
Trust = Annotated[bool, typed(EvalSettings, "trust_remote_code", "--trust-remote-code")]
Revision = Annotated[str | None, typed(RunSettings, "revision")]
Restart = Annotated[bool, typed(RunSettings, "restart", "--restart")]
Blocks = Annotated[int | None, typed(Recipe, "blocks")]


def check_text(found: dict[str, Any] | None) -> str:
    """What running an output showed (`output/check.py`), as lines of a summary."""
    if found is None:
        return "check: not run, perplexity not measured"
    lost = [f"perplexity: {told(found)}"] if "loss" in found or "unmeasured" in found else []
    distance = f"{found['distance']:.4f} relative difference from its source's outputs"
    check = f"check: loaded and run on {found['ran']}, {distance} (0 identical, 1 unrelated)"
    return "\n".join([*lost, check])


def healed_text(summary: dict[str, Any]) -> list[str]:
    """Lines on a training (`heal/run.py`); none on no training."""
    if not summary.get("steps"):
        return []
    speed = summary["tokens"] / max(summary["trained_seconds"], 1e-9)
    best = f"best after step {summary['best_step']:,}"
    if summary["best_step"] == 0:
        best = "nothing better than the start was found, which is what is written"
    lines = [
        f"trained: {summary['parameters']:,} parameters, {summary['steps']:,} steps, "
        f"{summary['tokens']:,} tokens, {speed:,.0f} a second; {best}"
    ]
    for name, before in summary["before"].items():
        after = summary["after"][name]
        if "distance" in before:
            lines.append(
                f"held-back {name}: 1 - cosine of the embeddings {before['distance']:.4f} -> "
                f"{after['distance']:.4f}, error of the hidden states {before['states']:.4f} -> "
                f"{after['states']:.4f}"
            )
            continue
        lines.append(
            f"held-back {'own text' if name == 'self' else name}: KL {before['kl']:.4f} -> "
            f"{after['kl']:.4f}, loss {before['student']:.4f} -> {after['student']:.4f} "
            f"(dense {before['teacher']:.4f})"
        )
    return lines


def print_result(result: dict[str, Any], text: Any, format: Format) -> None:
    """One JSON object, or `text` of the result with names that a terminal might obey escaped."""
    print(json.dumps(result) if format is Format.json else text(printable_all(result)))
