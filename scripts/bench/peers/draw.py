"""Writes the table and the plot of peers from what run.py has measured.

Usage: python draw.py. Reads scripts/figures/peers-MODEL.json, and writes a plot beside each file and its
table between the marks of recipes/README.md.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from math import inf
from pathlib import Path
from statistics import mean
from typing import Any

from blr.compressor.output.page import PALETTE
from blr.compressor.output.svg import COLOURS, WIDTH, Series, chart, picture

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "scripts" / "figures"
PAGE = ROOT / "recipes" / "README.md"
MOST = 7  # bits of points that the plot has room for
HEIGHT = 260
STYLE = (
    "svg{font-family:system-ui,sans-serif}text{font-size:12px;fill:var(--ink)}"
    ".tick{font-size:11px;fill:var(--faint)}line{stroke:var(--line)}"
)
Row = dict[str, Any]


def merged(rows: dict[str, Row]) -> dict[tuple[str, str], list[Row]]:
    """The rows of one point together, which differ in their seed, by series and form."""
    found = defaultdict(list)
    for row in rows.values():
        found[row["series"], row["form"]].append(row)
    return dict(sorted(found.items(), key=lambda item: (round(item[1][0]["bits"], 2), kl(item[1], 0))))


def kl(rows: list[Row], text: int) -> float:
    """The mean KL on text number `text` over seeds."""
    return mean(list(row["texts"].values())[text]["kl"] for row in rows)


def cell(rows: list[Row], text: int) -> str:
    """KL of both seeds, its standard error (of up to two texts) and agreement of the likeliest token."""
    figures = [list(row["texts"].values())[text] for row in rows]
    seeds = "/".join(short(one["kl"]) for one in figures)
    error = f" ± {short(figures[0]['kl_error'])}" if len(rows[0]["texts"]) <= 2 else ""
    return f"{seeds}{error}, {100 * mean(one['agreement'] for one in figures):.1f}"


def short(value: float) -> str:
    """Three decimals, without a zero before them."""
    return f"{value:.3f}".lstrip("0")


def table(rows: dict[str, Row]) -> str:
    """A row for each point by bits, the least KL first among equals."""
    texts = list(next(iter(rows.values()))["texts"])
    head = ["made by", "bits", *(f"KL, top-1 % on {text}" for text in texts), "seconds"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for (name, form), found in merged(rows).items():
        version = f"{found[0]['package']} {found[0]['version']}"
        made = f"{name}, {form}" + f" ({version})" * (found[0]["package"] != "blr")
        cells = [made, f"{found[0]['bits']:.2f}", *(cell(found, n) for n in range(len(texts)))]
        cells.append(f"{mean(row['seconds'] for row in found):.0f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def line_of(series: str) -> str:
    """The line of the plot that a series is on: ours has one as fitted and one behind healing."""
    return series if not series.startswith("blr") else "blr" + ", healed" * ("healed" in series)


def places(points: list[list[Row]], text: int) -> list[tuple[float, float]]:
    """Bits and KL on text number `text` of the best point at each number of bits."""
    best = dict[float, float]()
    for found in points:
        bits = round(found[0]["bits"], 2)
        best[bits] = min(best.get(bits, inf), kl(found, text))
    return list(best.items())


def drawn(rows: dict[str, Row]) -> str:
    """KL against bits on each text, a line for each package."""
    lines = defaultdict(list)
    for (name, _), found in merged(rows).items():
        if found[0]["bits"] < MOST:
            lines[line_of(name)].append(found)
    texts, body = list(next(iter(rows.values()))["texts"]), ""
    for n, text in enumerate(texts):
        series = []
        for colour, (name, points) in enumerate(sorted(lines.items())):
            line = places(points, n)
            marks = [(*place, name if place == line[0] else "") for place in line]
            series.append(Series(name, line, True, colour % COLOURS, marks, named=True))
        said = f"KL from dense, {text}"
        inner = re.sub(
            r"^<div[^>]*>|</div>$", "", chart(series, "bits a weight", said, height=HEIGHT, log=True)
        )
        body += inner.replace("<svg ", f'<svg y="{n * HEIGHT}" width="{WIDTH}" height="{HEIGHT}" ', 1)
    start, rest = picture(body, len(texts) * HEIGHT).split(">", 1)
    return f"{start}><style>{PALETTE}{STYLE}</style>{rest}\n"


def main() -> None:
    page = PAGE.read_text("utf-8")
    for path in sorted(FOLDER.glob("peers-*.json")):
        rows = json.loads(path.read_text("utf-8"))
        path.with_suffix(".svg").write_text(drawn(rows), "utf-8")
        mark = path.stem
        page = re.sub(
            rf"(<!-- {mark} -->\n).*(<!-- /{mark} -->)", rf"\1{table(rows)}\n\2", page, flags=re.S
        )
    PAGE.write_text(page, "utf-8")


if __name__ == "__main__":
    main()
