"""Progress on standard error: bars on a terminal, now and then a line elsewhere, nothing if quiet."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

from blr.compressor.quoting import printable

EVERY = 30.0  # seconds between two lines where there is no terminal


class Progress:
    """What a long run says while it works. `quiet` silences everything but warnings, `silent` those
    too: in processes beside the first. `spent` are seconds by what they went into (`timed`)."""

    def __init__(self, quiet: bool = False, silent: bool = False) -> None:
        self.said: set[str] = set()
        self.spent: dict[str, float] = {}
        self._inner = 0.0  # seconds of what was timed inside of what is being timed
        self.quiet, self.silent = quiet or silent, silent
        self.bars = not self.quiet and sys.stderr.isatty()

    def notes(self, lines: list[str]) -> None:
        """Say decisions aloud that the user did not make, each once (a plan may be made again)."""
        for line in lines:
            if line not in self.said and not self.silent:
                print(f"blr: note: {printable(line)}", file=sys.stderr)
            self.said.add(line)

    def say(self, line: str) -> None:
        """What is good to know and no decision."""
        if not self.quiet:
            print(f"blr: note: {printable(line)}", file=sys.stderr)

    def stage(self, name: str) -> None:
        """Announce a stage, on a terminal."""
        if self.bars:
            print(f"{name} …", file=sys.stderr)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Add the seconds of what is done inside, but for what is timed there itself, to those `spent`
        on `what`. What a GPU has not done by the end counts where it is waited for."""
        started, outer, self._inner = monotonic(), self._inner, 0.0
        try:
            yield
        finally:
            took = monotonic() - started
            self.spent[what] = self.spent.get(what, 0.0) + took - self._inner
            self._inner = outer + took

    @contextmanager
    def layers(self, total: int, what: str = "factorizing") -> Iterator[Callable[[str], None]]:
        """A bar over `total` items; call the yielded function with each item's name as it starts."""
        if not self.bars:
            lines = Lines(self.say, what)
            count = -1  # those that are over when the next starts

            def begin(name: str) -> None:
                nonlocal count
                count += 1
                lines.reached(count / max(total, 1), f"{count} of {total}")

            yield begin
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
    def training(self, what: str, done: float = 0.0) -> Iterator[Callable[[float, str], None]]:
        """A bar over a run; call the yielded function with the share that is over and what to say.
        `done`: the share that earlier runs have done."""
        if not self.bars:
            lines = Lines(self.say, what, done)
            yield lambda share, text: lines.reached(share, f"{share:.0%} {text}".strip())
            return
        from rich.progress import TaskProgressColumn

        with _bars(what, TaskProgressColumn()) as bars:
            task = bars.add_task("", total=1.0, completed=done)
            yield lambda share, text: bars.update(task, completed=share, description=text)


class Lines:
    """A line every `EVERY` seconds of a piece of work, with the time that is left at its pace."""

    def __init__(self, say: Callable[[str], None], what: str, done: float = 0.0) -> None:
        self.say, self.what, self.done = say, what, done
        self.started = self.last = monotonic()

    def reached(self, share: float, text: str) -> None:
        """`share` of the work, in [0, 1], is over."""
        now = monotonic()
        if now - self.last < EVERY:
            return
        self.last, passed = now, now - self.started
        here = share - self.done
        left = f", about {duration(passed / here * (1 - share))} left" if here > 0 else ""
        self.say(f"{self.what}: {text}, {duration(passed)}{left}")


def duration(seconds: float) -> str:
    """ "40 s", "12 min", "3 h 5 min"."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _bars(what: str, count: Any) -> Any:
    """rich's bars on standard error; `count` is the column that says how far it is."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (BarColumn(), count, TimeElapsedColumn(), TimeRemainingColumn())
    said = TextColumn("{task.description}")
    return Bars(TextColumn(what), *columns, said, console=Console(stderr=True))
