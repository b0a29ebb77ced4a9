"""`blr push`: an output on the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from blr.compressor.cli import values
from blr.compressor.cli.options import Format, FormatOption, Output, Quiet, print_result


def push(
    output: Output,
    repository: Annotated[str, typer.Argument(help="owner/name on the hub; made if there is none.")],
    private: Annotated[
        bool, typer.Option("--private", help="A repository for its owner alone.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and print what would be sent; open no socket.")
    ] = False,
    metrics: Annotated[
        Path | None,
        typer.Option(callback=values.place, help="JSON of `blr eval --format json`, for the card."),
    ] = None,
    branch: Annotated[str | None, typer.Option(help="Branch to commit to.", show_default="main")] = None,
    message: Annotated[str, typer.Option(help="Of the commit.")] = "Structured weights by blr",
    quiet: Quiet = False,
    format: FormatOption = Format.text,
) -> None:
    """Verify an output, complete its card and commit it to a repository of the hub."""
    from blr.compressor.base.progress import Progress
    from blr.compressor.commands.push import prepare_push, printed, send

    prepared = prepare_push(Path(output), repository, metrics)
    Progress(quiet).notes(list(prepared.notes))
    found = printed(prepared)
    if not dry_run:
        found["commit"] = send(prepared, private=private, revision=branch, message=message)
    print_result(found, _text, format)


def _text(result: dict[str, Any]) -> str:
    where = result.get("commit") or f"{result['repository']} (dry run: nothing was sent)"
    card = [f"  {key}: {value}" for key, value in result["card"].items()]
    return "\n".join([f"{result['files']} files, {result['bytes']:,} bytes: {where}", "card:", *card])
