"""The page and the table of a sweep."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Literal

from blr.compressor.base.quoting import printable
from blr.compressor.base.tables import aligned
from blr.compressor.output.page import PAGE, STYLE, html_table
from blr.compressor.output.svg import Series, chart, legend

Axis = Literal["bits", "speed"]
DENSE_COLOUR = 7  # the grey of the palette
CODE = "\npre{white-space:pre-wrap;overflow-wrap:anywhere}\n"


@dataclass(frozen=True)
class MadePoint:
    """A finished point: `bits` a weight, by text `losses` in nats over the dense model, mean divergences
    from it (`kl`) and losses over those of plain quantization (`of_plain`), predicted tokens a second
    (`speed`), `commands` by seed. Over seeds figures are means, `seconds` sums, `spread` ranges."""

    name: str
    kind: str
    plain: bool
    heal: float
    bits: float
    losses: tuple[float, ...]
    speed: float | None
    commands: tuple[str, ...]
    bytes: int = 0
    seconds: float = 0.0
    spread: tuple[float, ...] | None = None
    kl: tuple[float, ...] = ()
    of_plain: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class FailedPoint:
    """A point that could not be made: why, with which exit code, and the command to try again."""

    name: str
    why: str
    code: int
    command: str


@dataclass(frozen=True)
class SweepResult:
    """What came of a sweep of `model`: perplexities of the dense model by text, points with speeds
    predicted for `gpu`, and the names of those that no other beats."""

    model: str
    texts: list[str]
    dense: list[float]
    gpu: str
    points: list[MadePoint]
    failed: list[FailedPoint]
    frontier: list[str]


def over_seeds(found: Sequence[MadePoint], setting: str) -> MadePoint:
    """One point of those that differ in their seed alone, named after the `setting`."""
    if len(found) == 1 and found[0].name == setting:
        return found[0]
    by_text = list(zip(*(point.losses for point in found), strict=True))
    return replace(
        found[0],
        name=setting,
        bits=round(sum(point.bits for point in found) / len(found), 6),
        bytes=round(sum(point.bytes for point in found) / len(found)),
        losses=tuple(sum(losses) / len(losses) for losses in by_text),
        kl=tuple(sum(kl) / len(kl) for kl in zip(*(point.kl for point in found), strict=True)),
        spread=tuple(max(losses) - min(losses) for losses in by_text) if len(found) > 1 else None,
        commands=tuple(line for point in found for line in point.commands),
        seconds=sum(point.seconds for point in found),
    )


def frontier(found: Sequence[MadePoint]) -> list[MadePoint]:
    """Points to which no other is equal or better in bits and in all losses, by falling bits."""
    kept = [point for point in found if not any(_beats(other, point) for other in found)]
    return sorted(kept, key=lambda point: -point.bits)


def _beats(one: MadePoint, other: MadePoint) -> bool:
    mine, its = (one.bits, *one.losses), (other.bits, *other.losses)
    return mine != its and all(a <= b for a, b in zip(mine, its, strict=True))


def line_at(plain: Sequence[MadePoint], bits: float, text: int) -> float | None:
    """The loss of plain quantization at so many bits, between its points; None beyond them."""
    points = sorted((point.bits, point.losses[text]) for point in plain)
    for (low, high_loss), (high, low_loss) in pairwise(points):
        if low <= bits <= high:
            share = (bits - low) / (high - low) if high > low else 0.0
            return high_loss + share * (low_loss - high_loss)
    return None


def share_of_plain(found: Sequence[MadePoint], point: MadePoint, text: int) -> float | None:
    """A point's loss over what plain quantization, healed as long, has at the same bits."""
    plain = [other for other in found if other.plain and other.heal == point.heal]
    line = None if point.plain else line_at(plain, point.bits, text)
    return None if line is None or line <= 0 else point.losses[text] / line


def page(result: SweepResult) -> str:
    """Well-formed XHTML: charts of losses against bits and against predicted speed, and the commands."""
    kinds = list(dict.fromkeys(point.kind for point in result.points))
    colours = {kind: n % 8 for n, kind in enumerate(kinds)}
    parts = [legend([*colours.items(), ("dense model", DENSE_COLOUR)])] if kinds else []
    for n, text in enumerate(_names(result.texts)):
        loss = "nats a token over dense"
        parts.append(f"<h2>Loss in {escape(text)}</h2>")
        parts.append(chart(_series(result, colours, "bits", n), "stored bits a weight", loss))
        series = _series(result, colours, "bits", n, "kl")
        parts.append(chart(series, "stored bits a weight", "mean KL to the dense model, nats a token"))
        if len({point.speed for point in result.points} - {None}) > 1:  # else launches decide
            title = f"tokens a second on {result.gpu}, predicted from rooflines, not measured"
            parts.append(chart(_series(result, colours, "speed", n), title, loss))
    points = f"<h2>All points</h2>{html_table(table_rows(result))}"
    best, others = _parted(result)
    said = "<h2>The frontier</h2><p>Points that no other beats in bits and in every text.</p>"
    parts += [said + _commands(best), points, "<h2>The others</h2>" * bool(others) + _commands(others)]
    lost = [f"<li>{escape(printable(f'{p.name}: {p.why}'))}</li>" for p in result.failed]
    parts.append(f"<h2>Failed</h2><ul>{''.join(lost)}</ul>" if lost else "")
    title = escape(printable(f"{result.model}: bits against loss, swept by blr"))
    return PAGE.format(title=title, style=STYLE + CODE, body="\n".join(filter(None, parts)))


def _series(
    result: SweepResult,
    colours: dict[str, int],
    axis: Axis,
    text: int,
    what: Literal["losses", "kl"] = "losses",
) -> list[Series]:
    """A series of points for every kind; plain quantization and the dense model as lines."""
    found = []
    for kind, colour in colours.items():
        placed = [(getattr(p, axis), p) for p in result.points if p.kind == kind]
        placed = sorted((one for one in placed if one[0] is not None), key=lambda one: one[0])
        points = [point for _, point in placed]
        places = [(float(x), float(getattr(p, what)[text])) for x, p in placed]
        rows = list(zip(points, places, strict=True))
        titles = [f"{p.name}: {p.bits:.3f} bits, {y:.4f}" for p, (_, y) in rows]
        plain = bool(points) and points[0].plain
        best = [(*place, p.name) for p, place in rows if p.name in result.frontier]
        drawn = Series(kind, places, joined=plain, colour=colour, marks=best, titles=titles, named=True)
        found.append(drawn)
    ends = sorted({place[0] for one in found for place in one.points})
    if ends:  # losses are over the dense model, whose own is zero
        mark = (ends[-1], 0.0, "dense model")
        line = [(ends[0], 0.0), (ends[-1], 0.0)]
        found.append(Series("dense model", line, True, DENSE_COLOUR, [mark], named=True))
    return found


def _parted(result: SweepResult) -> tuple[list[MadePoint], list[MadePoint]]:
    """The points of the frontier in its order, and the others."""
    by_name = {point.name: point for point in result.points}
    best = [by_name[name] for name in result.frontier]
    return best, [point for point in result.points if point.name not in result.frontier]


def _commands(points: Sequence[MadePoint]) -> str:
    parts = [
        f"<h3>{escape(point.name)}, {point.bits:.3f} bits</h3>"
        + "".join(f"<pre>{escape(printable(line))}</pre>" for line in point.commands)
        for point in points
    ]
    return "".join(parts)


def _names(texts: Sequence[str]) -> list[str]:
    """What texts are called: by their files' names, or all by their paths if two files have one name."""
    names = [Path(text).name for text in texts]
    return list(map(printable, names if len(set(names)) == len(names) else texts))


def table_rows(result: SweepResult) -> list[Sequence[str]]:
    """A row a point, by rising bits, a head first."""
    head = ["", "point", "bits"]
    for name in _names(result.texts):
        head += [f"loss in {name}", "of plain", "KL"]
    paced = len({point.speed for point in result.points}) > 1  # else launches alone decide
    rows: list[Sequence[str]] = [[*head, *["tokens/s (predicted)"] * paced, "seconds"]]
    for point in sorted(result.points, key=lambda point: point.bits):
        cells = ["*" if point.name in result.frontier else "", point.name, f"{point.bits:.3f}"]
        spreads = point.spread or [None] * len(point.losses)
        by_text = zip(point.losses, spreads, point.of_plain, point.kl, strict=True)
        for loss, wide, share, kl in by_text:
            cells.append(f"{loss:.4f}" if wide is None else f"{loss:.4f} ({wide:.4f})")
            cells += ["" if share is None else f"{share:.2f}", f"{kl:.4f}"]
        speed = "" if point.speed is None else f"{point.speed:,.0f}"
        rows.append([*cells, *[speed] * paced, f"{point.seconds:.0f}"])
    return rows


def table(result: SweepResult) -> str:
    """As plain text: what failed in a line each, and every point's command."""
    rows, (best, others) = table_rows(result), _parted(result)
    spread = "; in brackets how far seeds differ" * any(p.spread for p in result.points)
    perplexities = zip(result.dense, _names(result.texts), strict=True)
    dense = ", ".join(f"{value:.3f} in {name}" for value, name in perplexities)
    return "\n".join(
        [
            f"perplexity of the dense model: {dense}; losses below in nats a token over it{spread}",
            aligned(rows, numbers=range(2, len(rows[0]))),
            *(printable(f"failed: {point.name}: {point.why}") for point in result.failed),
            "* the frontier: no other point is better in bits and in every text",
            *(printable(f"  {point.name}: {line}") for point in best for line in point.commands),
            *["the others:"] * bool(others),
            *(printable(f"  {point.name}: {line}") for point in others for line in point.commands),
        ]
    )
