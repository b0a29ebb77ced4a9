"""PNG plots of a report by matplotlib, an optional dependency (`blr-compress[plots]`)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from blr.compressor.bench.results import DecodeRow, MemoryRow, Report, Row, save_figure
from blr.compressor.bench.summary import cases, gain_of, wins_by_h

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
            save_figure(figure, folder / name)
            written.append(folder / name)
        plt.close(figure)
    return written


def draw_decode(report: Report, folder: Path) -> Path | None:
    """decode.png: tokens a second of every arm, a panel a model; None if nothing was timed.

    Raises ImportError without matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in report.rows if row.tokens_per_second is not None]
    models = list(dict.fromkeys(row.model for row in rows))
    if not models:
        return None
    figure, panels = plt.subplots(1, len(models), figsize=(6 * len(models), 5), squeeze=False)
    for model, axes in zip(models, panels[0], strict=True):
        _bars(axes, [row for row in rows if row.model == model])
        axes.set_title(model)
    figure.tight_layout()
    path = folder / "decode.png"
    save_figure(figure, path)
    plt.close(figure)
    return path


def draw_memory(report: Report, folder: Path) -> Path | None:
    """memory.png: MiB beside the weights against tokens, a line an arm, a panel a model and share; None
    if nothing was measured. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in report.rows if row.transient_bytes is not None]
    panels = list(dict.fromkeys((row.model, row.keep) for row in rows))
    if not panels:
        return None
    figure, held = plt.subplots(1, len(panels), figsize=(6 * len(panels), 5), squeeze=False)
    for (model, keep), axes in zip(panels, held[0], strict=True):
        _memory(axes, [row for row in rows if (row.model, row.keep) == (model, keep)])
        axes.set_title(f"{model} at {keep:.0%}")
    figure.tight_layout()
    save_figure(figure, folder / "memory.png")
    plt.close(figure)
    return folder / "memory.png"


def _memory(axes: Any, rows: list[MemoryRow]) -> None:
    for arm in dict.fromkeys(row.arm for row in rows):
        mine = sorted(
            (r.batch * r.length, (r.transient_bytes or 0) / 2**20) for r in rows if r.arm == arm
        )
        axes.loglog([tokens for tokens, _ in mine], [size for _, size in mine], "o-", label=arm)
    axes.set_xlabel("tokens")
    axes.set_ylabel("MiB beside the weights")
    axes.legend(fontsize=7)


def _bars(axes: Any, rows: list[DecodeRow]) -> None:
    """Groups of bars: one group a context and batch, one colour an arm."""
    cases = list(dict.fromkeys((row.context, row.batch) for row in rows))
    arms = list(dict.fromkeys(row.arm for row in rows))
    for n, arm in enumerate(arms):
        mine = [row for row in rows if row.arm == arm]
        at = [cases.index((row.context, row.batch)) + n / (len(arms) + 1) for row in mine]
        axes.bar(at, [row.tokens_per_second for row in mine], 1 / (len(arms) + 1), label=arm)
    axes.set_xticks(range(len(cases)), [f"{c}×{b}" for c, b in cases])
    axes.set_xlabel("context × batch")
    axes.set_ylabel("tokens a second")
    axes.legend(fontsize=7)


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
        floors = [row.floor_ms for row in found if row.floor_ms]
        ends = [min(floors), max(floors)]
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
