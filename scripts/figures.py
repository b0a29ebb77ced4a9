"""Draws pictures of measured figures, figures/NAME.json as NAME.svg, and the README's table of peers.

Usage: python scripts/figures.py. A JSON file with groups holds what was measured, by which command and
on what machine; each value is a bar beside the dense model's, 1. peers.json holds the rows of the table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from blr.compressor.output.page import PALETTE
from blr.compressor.output.svg import BAR, COLOURS, WIDTH, picture

FOLDER = Path(__file__).with_name("figures")
TEXT = "svg{font-family:system-ui,sans-serif}text{font-size:12px;fill:var(--ink)}"


def bars(rows: Sequence[tuple[str, float, str]], colours: Sequence[int] | None = None) -> str:
    """Horizontal bars. `rows`: label, value (not negative), text beside the bar; `colours` of the
    bars, one after the other by default."""
    widest = max((value for _, value, _ in rows), default=1.0) or 1.0
    label = 16 + 8 * max((len(name) for name, _, _ in rows), default=1)
    room = WIDTH - label - 190
    parts = []
    for n, (name, value, text) in enumerate(rows):
        y, length = n * BAR, max(room * value / widest, 1.0)
        colour = (n if colours is None else colours[n]) % COLOURS
        parts.append(
            f'<text x="{label - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>'
            f'<rect x="{label}" y="{y + 3}" width="{length:.1f}" height="{BAR - 7}" rx="2" '
            f'fill="var(--c{colour})"/>'
            f'<text x="{label + length + 7:.1f}" y="{y + 15}">{escape(text)}</text>'
        )
    return picture("".join(parts), len(rows) * BAR + 4)


def drawn(figure: dict[str, Any]) -> str:
    """One picture that needs no page around it."""
    rows, colours = [], []
    for group in figure["groups"]:
        name, dense = group["name"], group["dense"]
        rows.append((f"{name}: dense", 1.0, f"{dense:g}"))
        colours.append(7)
        for n, (label, value) in enumerate(group["values"].items()):
            times = value / dense
            rows.append((f"{name}: {label}", times, f"{value:g} ({times:.2f} {figure['unit']})"))
            colours.append(n)
    title = f"<title>{figure['about']} {figure['machine']}: {figure['command']}</title>"
    title = title.replace("&", "&amp;")
    start, body = bars(rows, colours).split(">", 1)
    return f"{start}>{title}<style>{PALETTE}{TEXT}</style>{body}\n"


def figures() -> dict[Path, dict[str, Any]]:
    """The figures that are drawn, by file."""
    found = {path: json.loads(path.read_text("utf-8")) for path in sorted(FOLDER.glob("*.json"))}
    return {path: figure for path, figure in found.items() if "groups" in figure}


def table() -> str:
    """The README's table of what one would use otherwise."""
    rows = json.loads((FOLDER / "peers.json").read_text("utf-8"))["rows"]
    head = ["| measured | dense | plain integers | blr |", "|---|---|---|---|"]
    return "\n".join(
        [*head, *(f"| {r['what']} | {r['dense']} | {r['plain']} | {r['blr']} |" for r in rows)]
    )


def with_table(page: str) -> str:
    """A page with the table between its marks."""
    return re.sub(r"(<!-- peers -->\n).*?(<!-- /peers -->)", rf"\1{table()}\n\2", page, flags=re.S)


def main() -> None:
    for path, figure in figures().items():
        path.with_suffix(".svg").write_text(drawn(figure), "utf-8")
    page = FOLDER.parents[1] / "README.md"
    page.write_text(with_table(page.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
