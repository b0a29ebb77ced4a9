"""Options whose value may be left out."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from blr.compressor.recipe.heal_settings import MINUTES

VALUES = {"--heal": f"{MINUTES:g}"}  # by option, its value where none follows


class OptionalValues(TyperCommand):
    """A command that takes the options of `VALUES` without a number, too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, completed(args))


def completed(args: list[str]) -> list[str]:
    """`args` with a value for every option of `VALUES` that no number follows."""
    found = []
    for n, arg in enumerate(args):
        follows = args[n + 1] if n + 1 < len(args) else ""
        bare = arg in VALUES and not _is_number(follows)
        found.append(f"{arg}={VALUES[arg]}" if bare else arg)
    return found


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
