"""Progress on standard error: bars on a terminal, now and then a line elsewhere, nothing if quiet."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
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
    ) -> Iterator[Items]:
        """A bar over `total` items of these `costs`; call what is yielded as an item starts."""
        with self._shown(what, Pace()) as show:
            yield Items(total, costs, show)
            show.ended(f"{total}/{total}")

    @contextmanager
    def training(self, what: str, done: float = 0.0) -> Iterator[Callable[[float, str], None]]:
        """A bar over a run that is `done` so far; call what is yielded with share and text."""
        with self._shown(what, Pace(done)) as show:
            yield lambda share, text: show.reached(share, f"{share:.0%}", text)

    @contextmanager
    def _shown(self, what: str, pace: Pace) -> Iterator[Lines | TerminalBar]:
        named = self._named(what)
        if not self.bars:
            yield Lines(self.say, named, pace)
            return
        bar = TerminalBar(named, pace)
        with bar.bars:
            try:
                yield bar
            except BaseException:
                bar.fail()
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


class Items:
    """Tells `show` how far work is that consists of items, by what each costs."""

    def __init__(self, total: int, costs: Mapping[str, float], show: Lines | TerminalBar) -> None:
        self.total, self.costs, self.show = total, costs, show
        self.begun, self.over = 0, 0.0
        self.whole = sum(costs.values()) or total or 1.0

    def __call__(self, *names: str, there: Collection[str] = ()) -> None:
        """Items start, and those before them are over; those in `there` were made by an earlier run."""
        share, number = min(self.over / self.whole, 1.0), min(self.begun, self.total)
        self.over += sum(self.costs.get(name, 1.0) for name in names)
        self.show.pace.skip(sum(self.costs.get(name, 1.0) for name in there) / self.whole)
        self.begun += len(names)
        self.show.reached(share, f"{number}/{self.total}", names[0])


class Lines:
    """A line every `EVERY` seconds of a piece of work, with the time that is left at its pace."""

    def __init__(self, say: Callable[[str], None], what: str, pace: Pace) -> None:
        self.say, self.what, self.pace = say, what, pace
        self.last = pace.started

    def reached(self, share: float, count: str, text: str) -> None:
        """`share` of the work, in [0, 1], is over, in words `count`."""
        self.pace.reached(share)
        if self.pace.at - self.last < EVERY:
            return
        self.last = self.pace.at
        left = self.pace.left
        told = "" if left is None else f", about {duration(left)} left"
        self.say(f"{self.what}: {_told(count, text)}, {duration(self.pace.passed)}{told}")

    def ended(self, count: str) -> None:
        """All is over, which what comes next tells."""


def _told(count: str, text: str) -> str:
    """ "2 of 8", "25% loss 0.5": names of items are for bars, where they change in place."""
    return count.replace("/", " of ") if "/" in count else f"{count} {text}".strip()


class TerminalBar:
    """A bar on standard error over a piece of work, which becomes red if that fails."""

    def __init__(self, what: str, pace: Pace) -> None:
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars
        from rich.table import Column

        self.pace = pace
        self.bar = BarColumn(20, complete_style="cyan", finished_style="cyan")
        clock = TimeElapsedColumn(table_column=Column(min_width=7, no_wrap=True))
        widths = {"fields[count]": 5, "fields[pace]": 12, "description": 1}  # the name gives way first
        count, left, name = (
            TextColumn(f"{{task.{field}}}", markup=False, table_column=Column(min_width=n, no_wrap=True))
            for field, n in widths.items()
        )
        label = TextColumn(what, table_column=Column(min_width=len(what), no_wrap=True))
        self.bars = Bars(label, self.bar, count, clock, left, name, console=_console())
        self.task = self.bars.add_task("", total=1.0, count="", pace=pace)
        self.bars.update(self.task, completed=pace.done)

    def reached(self, share: float, count: str, text: str) -> None:
        self.pace.reached(share)
        self.bars.update(self.task, completed=share, count=count, description=printable(text))

    def ended(self, count: str) -> None:
        self.reached(1.0, count, "")

    def fail(self) -> None:
        self.bar.complete_style = self.bar.finished_style = "red"


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def duration(seconds: float) -> str:
    """ "40 s", "12 min", "3 h 5 min"."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
