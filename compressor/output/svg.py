"""Small plots as inline SVG: dots, lines and heat maps, readable on light and dark pages.

No library, no script: strings whose numbers are rounded, so that the same data gives the same
bytes. Colours are the CSS variables --c0 … --c7, --ink, --faint and --line of the page.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from math import ceil, floor, log10

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 760, 64, 16, 12, 40
COLOURS = 8
BAR = 22

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """Points of one colour: a line (`joined`) or dots with `titles`. `marks` are stressed, with a
    tooltip or a text beside them (`named`)."""

    name: str
    points: Sequence[Point]
    joined: bool = False
    colour: int = 0
    marks: Sequence[tuple[float, float, str]] = ()
    titles: Sequence[str] = field(default_factory=tuple)
    named: bool = False


def chart(
    series: Sequence[Series], x_label: str, y_label: str, *, height: int = 260, log: bool = False
) -> str:
    """Dots and lines in one frame; `log` makes the y axis logarithmic (values over zero)."""
    points = [point for one in series for point in one.points]
    if not points:
        return ""
    xs, ys = [x for x, _ in points], [log10(y) if log else y for _, y in points]
    x_low, x_high = min(xs), max(xs)
    ticks = _decades(min(ys), max(ys)) if log else _ticks(min(0.0, *ys), max(ys))
    low, high = min(ticks[0], min(ys)), max(ticks[-1], max(ys))

    def at_x(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (x - x_low) / ((x_high - x_low) or 1.0)

    def at_y(y: float) -> float:
        value = log10(y) if log else y
        return TOP + (height - TOP - BOTTOM) * (high - value) / ((high - low) or 1.0)

    axes = _y_axis(ticks, lambda t: at_y(10**t if log else t), log)
    for t in _ticks(x_low, x_high):
        if x_low <= t <= x_high:
            axes += _text(at_x(t), height - BOTTOM + 16, "middle", f"{t:.4g}", tick=True)
    middle = TOP + (height - TOP - BOTTOM) / 2
    axes += _text((LEFT + WIDTH) / 2, height - 6, "middle", x_label) + (
        f'<text transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>"
    )
    return _framed(picture(axes + "".join(_drawn(one, at_x, at_y) for one in series), height))


@dataclass(frozen=True)
class Cell:
    """One value of a heat map: in which row and column it lies, and the text that a pointer shows."""

    row: str
    column: int
    value: float
    title: str


def heatmap(cells: Sequence[Cell], colour: int = 0) -> str:
    """Values from zero to the largest as shades of one colour, rows by name, columns by number."""
    rows, columns = list(dict.fromkeys(c.row for c in cells)), sorted({c.column for c in cells})
    if not cells:
        return ""
    label = 16 + 7 * max(len(name) for name in rows)
    width = min((WIDTH - label - RIGHT) / len(columns), 46.0)
    most = max(cell.value for cell in cells) or 1.0
    drawn = "".join(_text(label - 8, n * BAR + 15, "end", name) for n, name in enumerate(rows))
    for cell in cells:
        x, y = label + columns.index(cell.column) * width, rows.index(cell.row) * BAR
        drawn += (
            f'<rect x="{x:.1f}" y="{y}" width="{width - 2:.1f}" height="{BAR - 2}" rx="2" '
            f'fill="var(--c{colour})" fill-opacity="{max(cell.value / most, 0.03):.3f}">'
            f"<title>{escape(cell.title)}</title></rect>"
        )
    below = len(rows) * BAR + 14
    for n in sorted({0, len(columns) // 2, len(columns) - 1}):
        drawn += _text(label + (n + 0.5) * width - 1, below, "middle", str(columns[n]), tick=True)
    drawn += _text(label - 8, below, "end", "block", tick=True)
    return _framed(picture(drawn, len(rows) * BAR + 20))


def legend(names: Sequence[tuple[str, int]]) -> str:
    """Names with their colours, as HTML."""
    items = (
        f'<span><i style="background:var(--c{colour % COLOURS})"></i>{escape(name)}</span>'
        for name, colour in names
    )
    return f'<p class="legend">{"".join(items)}</p>'


def _drawn(one: Series, at_x: Callable[[float], float], at_y: Callable[[float], float]) -> str:
    colour = f"var(--c{one.colour % COLOURS})"
    places = [(at_x(x), at_y(y)) for x, y in one.points]
    if one.joined:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        drawn = (
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-opacity="0.7">'
            f"<title>{escape(one.name)}</title></polyline>"
        )
    else:
        titles = one.titles or [one.name] * len(places)
        drawn = "".join(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}">'
            f"<title>{escape(t)}</title></circle>"
            for (x, y), t in zip(places, titles, strict=True)
        )
    for x, y, text in one.marks:
        drawn += (
            f'<circle cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="4" fill="{colour}" stroke="var(--page)">'
            f"<title>{escape(text)}</title></circle>"
        )
        if one.named:
            aside, anchor = (-8, "end") if at_x(x) > WIDTH / 2 else (8, "start")
            drawn += _text(at_x(x) + aside, at_y(y) - 6, anchor, text, tick=True)
    return drawn


def _text(x: float, y: float, anchor: str, words: str, tick: bool = False) -> str:
    """A text at a place, small and faint beside a `tick`."""
    kind = ' class="tick"' if tick else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _y_axis(ticks: Sequence[float], at: Callable[[float], float], log: bool) -> str:
    return "".join(
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at(t):.1f}" y2="{at(t):.1f}" '
        f'stroke="var(--line)"/>'
        + _text(LEFT - 6, at(t) + 4, "end", f"1e{t:.0f}" if log else f"{t:.4g}", tick=True)
        for t in ticks
    )


def _ticks(low: float, high: float) -> list[float]:
    """Five or so round numbers that span [low, high]."""
    if high <= low:
        return [low]
    raw = (high - low) / 5
    unit = 10.0 ** floor(log10(raw))
    step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= raw * 0.999)
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]


def _decades(low: float, high: float) -> list[float]:
    first, last = floor(low), max(ceil(high), floor(low) + 1)
    step = max((last - first + 5) // 6, 1)
    return [float(n) for n in reversed(range(last, first - step, -step))]


def picture(body: str, height: int) -> str:
    """The elements in `body` as an SVG of the usual width."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">{body}</svg>'
    )


def _framed(svg: str) -> str:
    return f'<div class="wide">{svg}</div>'
