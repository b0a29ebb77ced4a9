"""Progress on standard error: bars on a terminal, now and then a line elsewhere, nothing if quiet."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from blr.compressor.base.quoting import printable

if TYPE_CHECKING:
    from rich.console import Console

# Steps of a run, by what their bars say
READING, OWN, MEASURING, FITTING = "reading", "writing own text", "measuring sensitivity", "factorizing"
LAST, HEALING, WRITING, CHECKING = "training all blocks together", "healing", "writing", "checking"
NONE: Mapping[str, float] = {}
EVERY = 30.0  # seconds between two lines where there is no terminal


class Progress:
    """What a long run says while it works: notes unless `quiet`, warnings unless `silent`. `spent` are
    seconds by stage, `steps` the expected stages, of which so many are `reached`."""

    def __init__(self, quiet: bool = False, silent: bool = False) -> None:
        self.said: set[str] = set()
        self.spent: dict[str, float] = {}
        self.steps: list[str] = []
        self.reached = 0
        self.output: Path | None = None
        self._inner = 0.0  # seconds of what was timed inside of what is being timed
        self.quiet, self.silent = quiet or silent, silent
        self.bars = not self.quiet and sys.stderr.isatty()

    def notes(self, lines: list[str]) -> None:
        """Say decisions aloud that the user did not make, each once (a plan may be made again)."""
        for line in lines:
            if line not in self.said and not self.silent:
                print(f"blr: note: {printable(line)}", file=sys.stderr)
            self.said.add(line)

    def warn(self, line: str) -> None:
        """Say what is not as it should be, whatever is `quiet`."""
        if not self.silent:
            print(f"blr: warning: {printable(line)}", file=sys.stderr)

    def say(self, line: str) -> None:
        """What is good to know and no decision."""
        if not self.quiet:
            print(f"blr: note: {printable(line)}", file=sys.stderr)

    def expect(self, *steps: str) -> None:
        """Set the steps of this run: bars and stages of these names say which step they are."""
        self.steps, self.reached = [*steps], 0

    def leave_out(self, step: str) -> None:
        """A step that is expected, and will not come."""
        later = self.steps[self.reached :]
        if step in later:
            del self.steps[self.reached + later.index(step)]

    def stage(self, name: str) -> None:
        """Announce a stage, on a terminal."""
        named = self._named(name)
        if self.bars:
            print(f"{named} …", file=sys.stderr)

    def loading(self) -> None:
        """Announce, on a terminal, that libraries are loaded, which takes many seconds."""
        if self.bars and "torch" not in sys.modules:
            print("loading torch …", file=sys.stderr)

    def _named(self, what: str) -> str:
        """`what` with the number of its step, if it is expected."""
        later = self.steps[self.reached :]
        if what in later:
            self.reached += later.index(what) + 1
        if self.reached == 0 or self.steps[self.reached - 1] != what:
            return what
        return f"step {self.reached} of {len(self.steps)}, {what}"

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Add the seconds of this block, without blocks inside it, to those `spent` on `what`. A GPU's
        time counts where it is waited for."""
        started, outer, self._inner = monotonic(), self._inner, 0.0
        try:
            yield
        finally:
            took = monotonic() - started
            self.spent[what] = self.spent.get(what, 0.0) + took - self._inner
            self._inner = outer + took

    @contextmanager
    def layers(
        self, total: int, what: str = FITTING, costs: Mapping[str, float] = NONE
    ) -> Iterator[Bar]:
        """A bar over `total` items of these `costs`; call what is yielded as an item starts."""
        with self._bar(what, Pace(), total, costs) as bar:
            yield bar
            bar.show(1.0, f"{total}/{total}", "")

    @contextmanager
    def training(self, what: str, done: float = 0.0) -> Iterator[Callable[[float, str], None]]:
        """A bar over a run that is `done` so far; call what is yielded with share and text."""
        with self._bar(what, Pace(done)) as bar:
            yield lambda share, text: bar.reached(share, f"{share:.0%}", text)

    @contextmanager
    def _bar(
        self, what: str, pace: Pace, total: int = 0, costs: Mapping[str, float] = NONE
    ) -> Iterator[Bar]:
        bar = Bar(self, self._named(what), pace, total, costs)
        with bar.bars if self.bars else nullcontext():  # else rich may print an empty line
            try:
                yield bar
            except BaseException:
                bar.drawn.complete_style = bar.drawn.finished_style = "red"
                raise


class Pace:
    """The time left of work of which the share `done` was there before, at its pace."""

    def __init__(self, done: float = 0.0) -> None:
        self.done = self.share = done
        self.started = self.at = monotonic()

    def reached(self, share: float) -> None:
        """So much is over now."""
        self.share, self.at = share, monotonic()

    def skip(self, share: float) -> None:
        """So much was there before, and tells nothing of the pace."""
        self.done += share

    @property
    def passed(self) -> float:
        """Seconds since the start."""
        return monotonic() - self.started

    @property
    def left(self) -> float | None:
        """Seconds from now to the end; None where nothing is over yet."""
        here = self.share - self.done
        if here <= 1e-9:
            return None
        at_last = (self.at - self.started) / here * (1 - self.share)
        return max(at_last - (monotonic() - self.at), 0.0)

    def __str__(self) -> str:
        """The time left as h:mm:ss."""
        if (left := self.left) is None:
            return "-:--:-- left"
        minutes, seconds = divmod(round(left), 60)
        return f"{minutes // 60}:{minutes % 60:02}:{seconds:02} left"


class Bar:
    """A bar of rich over a piece of work, perhaps of `total` items with their `costs`; where there is no
    terminal, a line every `EVERY` seconds, with the time that is left at its pace."""

    def __init__(
        self, told: Progress, what: str, pace: Pace, total: int, costs: Mapping[str, float]
    ) -> None:
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars
        from rich.table import Column

        self.told, self.what, self.pace, self.total, self.costs = told, what, pace, total, costs
        self.last, self.begun, self.over = pace.started, 0, 0.0
        self.whole = sum(costs.values()) or total or 1.0
        self.drawn = BarColumn(20, complete_style="cyan", finished_style="cyan")
        clock = TimeElapsedColumn(table_column=Column(min_width=7, no_wrap=True))
        widths = {"fields[count]": 5, "fields[pace]": 12, "description": 1}  # the name gives way first
        count, left, name = (
            TextColumn(f"{{task.{field}}}", markup=False, table_column=Column(min_width=n, no_wrap=True))
            for field, n in widths.items()
        )
        label = TextColumn(what, table_column=Column(min_width=len(what), no_wrap=True))
        columns = label, self.drawn, count, clock, left, name
        self.bars = Bars(*columns, console=_console(), disable=not told.bars)
        self.task = self.bars.add_task("", total=1.0, count="", pace=pace)
        self.bars.update(self.task, completed=pace.done)

    def __call__(self, *names: str, there: Collection[str] = ()) -> None:
        """Items start, and those before them are over; those in `there` were made by an earlier run."""
        share, number = min(self.over / self.whole, 1.0), min(self.begun, self.total)
        self.over += sum(self.costs.get(name, 1.0) for name in names)
        self.pace.skip(sum(self.costs.get(name, 1.0) for name in there) / self.whole)
        self.begun += len(names)
        self.reached(share, f"{number}/{self.total}", names[0])

    def show(self, share: float, count: str, text: str) -> None:
        """`share` of the work, in [0, 1], is over, in words `count`, and `text` is what comes."""
        self.pace.reached(share)
        self.bars.update(self.task, completed=share, count=count, description=printable(text))

    def reached(self, share: float, count: str, text: str) -> None:
        """As `show`, and a line now and then: "2 of 8" (names of items are for bars), "25% loss 0.5"."""
        self.show(share, count, text)
        if self.told.bars or self.pace.at - self.last < EVERY:
            return
        self.last, left = self.pace.at, self.pace.left
        said = count.replace("/", " of ") if "/" in count else f"{count} {text}".strip()
        rest = "" if left is None else f", about {duration(left)} left"
        self.told.say(f"{self.what}: {said}, {duration(self.pace.passed)}{rest}")


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def duration(seconds: float) -> str:
    """ "40 s", "12 min", "3 h 5 min"."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
