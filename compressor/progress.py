"""Progress on standard error: bars on a terminal, nothing when it is none or with --quiet."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Progress:
    """What a long run says while it works. `quiet` silences everything but warnings."""

    def __init__(self, quiet: bool = False) -> None:
        self.said: set[str] = set()
        self.bars = not quiet and sys.stderr.isatty()

    def notes(self, lines: list[str]) -> None:
        """Say decisions aloud that the user did not make, each once (a plan may be made again)."""
        for line in lines:
            if line not in self.said:
                print(f"blr: note: {line}", file=sys.stderr)
            self.said.add(line)

    def stage(self, name: str) -> None:
        """Announce a stage, on a terminal."""
        if self.bars:
            print(f"{name} …", file=sys.stderr)

    @contextmanager
    def layers(self, total: int, what: str = "factorizing") -> Iterator[Callable[[str], None]]:
        """A bar over `total` items; call the yielded function with each item's name as it starts."""
        if not self.bars:
            yield lambda name: None
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as Bars

        columns = (
            TextColumn(what),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        with Bars(*columns, console=Console(stderr=True)) as bars:
            task = bars.add_task("", total=total)
            started = False

            def advance(name: str) -> None:
                nonlocal started
                bars.update(task, description=name, advance=1 if started else 0)
                started = True

            yield advance
            bars.update(task, completed=total, description="")
