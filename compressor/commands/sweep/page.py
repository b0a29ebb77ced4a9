"""The page and the table of a sweep."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from blr.compressor.base.quoting import printable_all
from blr.compressor.base.tables import aligned
from blr.compressor.output.page import PAGE, STYLE, html_table
from blr.compressor.output.svg import Series, chart, legend

DENSE_COLOUR = 7  # the grey of the palette
CODE = "\npre{white-space:pre-wrap;overflow-wrap:anywhere}\n"


@dataclass(frozen=True)
class MadePoint:
    """A finished point: `bits` a weight, `losses` in nats over the dense model and mean divergences from
    it (`kl`) by text, predicted tokens a second (`speed`), `commands` by seed. Over seeds figures are
    means, `seconds` sums, `spread` ranges of losses."""

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


def page(result: dict[str, Any]) -> str:
    """Well-formed XHTML: charts of losses against bits and against predicted speed, and the commands."""
    result = printable_all(result)
    kinds = list(dict.fromkeys(point["kind"] for point in result["points"]))
    colours = {kind: n % 8 for n, kind in enumerate(kinds)}
    parts = [legend([*colours.items(), ("dense model", DENSE_COLOUR)])] if kinds else []
    for n, text in enumerate(result["texts"]):
        name = escape(Path(text).name)
        loss = "nats a token over dense"
        parts.append(f"<h2>Loss in {name}</h2>")
        parts.append(chart(_series(result, colours, "bits", n), "stored bits a weight", loss))
        series = _series(result, colours, "bits", n, "kl")
        parts.append(chart(series, "stored bits a weight", "mean KL to the dense model, nats a token"))
        if len({point["speed"] for point in result["points"]} - {None}) > 1:  # else launches decide
            title = f"tokens a second on {result['gpu']}, predicted from rooflines, not measured"
            parts.append(chart(_series(result, colours, "speed", n), title, loss))
    points = f"<h2>All points</h2>{html_table(table_rows(result))}"
    parts += [_commands(result, frontier=True), points, _commands(result, frontier=False)]
    lost = [f"<li>{escape(p['name'])}: {escape(p['why'])}</li>" for p in result["failed"]]
    parts.append(f"<h2>Failed</h2><ul>{''.join(lost)}</ul>" if lost else "")
    title = escape(f"{result['model']}: bits against loss, swept by blr")
    return PAGE.format(title=title, style=STYLE + CODE, body="\n".join(filter(None, parts)))


def _series(
    result: dict[str, Any], colours: dict[str, int], key: str, text: int, what: str = "losses"
) -> list[Series]:
    """A series of points for every kind; plain quantization and the dense model as lines."""
    found = []
    for kind, colour in colours.items():
        points = [p for p in result["points"] if p["kind"] == kind and p[key] is not None]
        points.sort(key=lambda point: point[key])
        places = [(float(point[key]), float(point[what][text])) for point in points]
        titles = [f"{p['name']}: {p['bits']:.3f} bits, {p[what][text]:.4f}" for p in points]
        plain = bool(points) and points[0]["plain"]
        best = [
            (*place, p["name"])
            for place, p in zip(places, points, strict=True)
            if p["name"] in result["frontier"]
        ]
        drawn = Series(kind, places, joined=plain, colour=colour, marks=best, titles=titles, named=True)
        found.append(drawn)
    ends = sorted({place[0] for one in found for place in one.points})
    if ends:  # losses are over the dense model, whose own is zero
        mark = (ends[-1], 0.0, "dense model")
        line = [(ends[0], 0.0), (ends[-1], 0.0)]
        found.append(Series("dense model", line, True, DENSE_COLOUR, [mark], named=True))
    return found


def _commands(result: dict[str, Any], *, frontier: bool) -> str:
    order = {name: n for n, name in enumerate(result["frontier"])}
    points = [point for point in result["points"] if (point["name"] in order) == frontier]
    points.sort(key=lambda point: order.get(point["name"], 0))
    parts = [
        f"<h3>{escape(point['name'])}, {point['bits']:.3f} bits</h3>"
        + "".join(f"<pre>{escape(line)}</pre>" for line in point["commands"])
        for point in points
    ]
    said = "<h2>The frontier</h2><p>Points that no other beats in bits and in every text.</p>"
    return (said if frontier else "<h2>The others</h2>" * bool(parts)) + "".join(parts)


def table_rows(result: dict[str, Any]) -> list[Sequence[str]]:
    """A row a point, by rising bits, a head first."""
    names = [Path(text).name for text in result["texts"]]
    head = ["", "point", "bits"]
    for name in names:
        head += [f"loss in {name}", "of plain", "KL"]
    paced = len({point["speed"] for point in result["points"]}) > 1  # else launches alone decide
    rows: list[Sequence[str]] = [[*head, *["tokens/s (predicted)"] * paced, "seconds"]]
    for point in sorted(result["points"], key=lambda point: point["bits"]):
        star = "*" if point["name"] in result["frontier"] else ""
        cells = [star, point["name"], f"{point['bits']:.3f}"]
        spreads = point["spread"] or [None] * len(point["losses"])
        by_text = zip(point["losses"], spreads, point["of_plain"], point["kl"], strict=True)
        for loss, wide, share, kl in by_text:
            cells.append(f"{loss:.4f}" if wide is None else f"{loss:.4f} ({wide:.4f})")
            cells += ["" if share is None else f"{share:.2f}", f"{kl:.4f}"]
        speed = "" if point["speed"] is None else f"{point['speed']:,.0f}"
        rows.append([*cells, *[speed] * paced, f"{point['seconds']:.0f}"])
    return rows


def table(result: dict[str, Any]) -> str:
    """As plain text: what failed in a line each, and every point's command."""
    rows, stars = table_rows(result), result["frontier"]
    spread = "; in brackets how far seeds differ" * any(p["spread"] for p in result["points"])
    others = [point["name"] for point in result["points"] if point["name"] not in stars]
    lines = {point["name"]: point["commands"] for point in result["points"]}
    dense = ", ".join(
        f"{value:.3f} in {Path(text).name}"
        for value, text in zip(result["dense"], result["texts"], strict=True)
    )
    return "\n".join(
        [
            f"perplexity of the dense model: {dense}; losses below in nats a token over it{spread}",
            aligned(rows, numbers=range(2, len(rows[0]))),
            *(f"failed: {point['name']}: {point['why']}" for point in result["failed"]),
            "* the frontier: no other point is better in bits and in every text",
            *(f"  {name}: {line}" for name in stars for line in lines[name]),
            *["the others:"] * bool(others),
            *(f"  {name}: {line}" for name in others for line in lines[name]),
        ]
    )
