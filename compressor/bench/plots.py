"""PNG plots of a report by matplotlib, an optional dependency (`blr-compress[plots]`)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from blr.compressor.bench.results import Report, Row
from blr.compressor.bench.summary import cases, gain_of, wins_by_h
from blr.compressor.checkpoint.disk import storage_errors

HINT = "no plots: matplotlib is not installed; pip install 'blr-compress[plots]'"
SIZE = (10, 5)  # inches


def draw(report: Report, folder: Path) -> list[Path]:
    """Write the plots that the rows allow: speedups and rooflines of layers, win rates of patterns.

    Raises:
        ImportError: matplotlib is not installed; `HINT` says so to users.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    timed = [row for row in report.rows if row.ms is not None]
    makers: dict[str, Any] = {"roofline.png": _roofline}
    makers |= {"wins.png": _wins} if report.command == "bench kernels" else {"speedup.png": _speedup}
    written = []
    for name, maker in makers.items():
        figure, axes = plt.subplots(figsize=SIZE)
        if maker(axes, timed, report):
            figure.tight_layout()
            with storage_errors(folder):
                figure.savefig(folder / name, dpi=150)
            written.append(folder / name)
        plt.close(figure)
    return written


def _speedup(axes: Any, rows: list[Row], report: Report) -> bool:
    """Speedup over dense of every layer and structure, one colour an arm."""
    found = [row for row in rows if row.speedup is not None and row.structure != "dense"]
    places = {label: n for n, label in enumerate(dict.fromkeys(map(_label, found)))}
    for arm in dict.fromkeys(row.arm for row in found):
        mine = [row for row in found if row.arm == arm]
        axes.plot([places[_label(r)] for r in mine], [r.speedup for r in mine], "o", label=arm)
    axes.axhline(1, color="grey", linewidth=1)
    axes.set_xticks(list(places.values()), list(places), rotation=90, fontsize=6)
    axes.set_ylabel("times as fast as dense")
    axes.legend()
    return bool(found)


def _label(row: Row) -> str:
    return f"{row.layer} n={row.n} {row.structure} {row.spec}"


def _roofline(axes: Any, rows: list[Row], report: Report) -> bool:
    """Time against floor, both logarithmic: points on the diagonal are at the roofline."""
    found = [row for row in rows if row.floor_ms]
    for arm in dict.fromkeys(row.arm for row in found):
        mine = [row for row in found if row.arm == arm]
        axes.loglog([r.floor_ms for r in mine], [r.ms for r in mine], "o", markersize=4, label=arm)
    if found:
        ends = [min(r.floor_ms for r in found), max(r.floor_ms for r in found)]
        axes.loglog(ends, ends, color="grey", linewidth=1, label="roofline")
        axes.legend()
    axes.set_xlabel("floor, ms")
    axes.set_ylabel("measured, ms")
    return bool(found)


def _wins(axes: Any, rows: list[Row], report: Report) -> bool:
    """Share of patterns of each h(b, c) where ours is the fastest, one line a precision."""
    drawn = False
    for dtype in dict.fromkeys(row.dtype for row in rows):
        wins = wins_by_h(list(_gains(row for row in rows if row.dtype == dtype)))
        axes.semilogx([h for h, _, _ in wins], [won / n for _, won, n in wins], "o-", label=dtype)
        drawn = drawn or bool(wins)
    axes.set_xlabel("h(b, c) = (b + c)/(bc)")
    axes.set_ylabel("share of patterns where ours is fastest")
    axes.set_ylim(-0.05, 1.05)
    axes.legend()
    return drawn


def _gains(rows: Iterable[Row]) -> Iterable[tuple[float, float]]:
    return (gain for case in cases(rows) if (gain := gain_of(case)))
