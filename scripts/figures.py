"""Draws the README's pictures of measured figures: scripts/figures/NAME.json as NAME.svg beside it.

Usage: python scripts/figures.py. A JSON file holds what was measured, by which command and on what
machine; each value is a bar beside the dense model's, 1.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from blr.compressor.output.page import PALETTE
from blr.compressor.output.svg import bars

FOLDER = Path(__file__).with_name("figures")
TEXT = "svg{font-family:system-ui,sans-serif}text{font-size:12px;fill:var(--ink)}"


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


def main() -> None:
    for path in sorted(FOLDER.glob("*.json")):
        path.with_suffix(".svg").write_text(drawn(json.loads(path.read_text("utf-8"))), "utf-8")


if __name__ == "__main__":
    main()
