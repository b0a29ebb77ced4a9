"""Progress on standard error: bars on a terminal, nothing when it is none or with --quiet."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from blr.compressor.quoting import printable


class Progress:
    """What a long run says while it works. `quiet` silences everything but warnings."""

    def __init__(self, quiet: bool = False) -> None:
        self.said: set[str] = set()
        self.bars = not quiet and sys.stderr.isatty()

    def notes(self, lines: list[str]) -> None:
        """Say decisions aloud that the user did not make, each once (a plan may be made again)."""
        for line in lines:
            if line not in self.said:
                print(f"blr: note: {printable(line)}", file=sys.stderr)
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
        from rich.progress import MofNCompleteColumn

        with _bars(what, MofNCompleteColumn()) as bars:
            task = bars.add_task("", total=total)
            started = False

            def advance(name: str) -> None:
                nonlocal started
                bars.update(task, description=name, advance=1 if started else 0)
                started = True

            yield advance
            bars.update(task, completed=total, description="")

    @contextmanager
    def training(self, what: str) -> Iterator[Callable[[float, str], None]]:
        """A bar over a run; call the yielded function with the share that is over and what to say."""
        if not self.bars:
            yield lambda share, text: None
            return
        from rich.progress import TaskProgressColumn

        with _bars(what, TaskProgressColumn()) as bars:
            task = bars.add_task("", total=1.0)
            yield lambda share, text: bars.update(task, completed=share, description=text)


def _bars(what: str, count: Any) -> Any:
    """rich's bars on standard error; `count` is the column that says how far it is."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (BarColumn(), count, TimeElapsedColumn(), TimeRemainingColumn())
    said = TextColumn("{task.description}")
    return Bars(TextColumn(what), *columns, said, console=Console(stderr=True))
