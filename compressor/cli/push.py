"""`blr push`: an output on the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from blr.compressor.cli.from_fields import Format, FormatOption, Output, Quiet, print_result, taking


@taking()
def push(
    output: Output,
    repository: Annotated[str, typer.Argument(help="owner/name on the hub; made if there is none.")],
    private: bool = False,
    dry_run: bool = False,
    metrics: Path | None = None,
    branch: str | None = None,
    message: str = "Structured weights by blr",
    quiet: Quiet = False,
    format: FormatOption = Format.text,
) -> None:
    """Verify an output, complete its card and upload it to the hub.

    Options:
        private: Make the repository visible to its owner alone.
        dry_run: Check and print what would be sent, and send nothing.
        metrics: Put the results of `blr eval --format json` in this file on the card.
        branch: Branch to commit to. [main]
        message: Message of the commit.
    """
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
