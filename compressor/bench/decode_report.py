"""Rows of `blr bench decode`, and what is printed, written and drawn of them. No torch."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from blr.compressor.bench.results import CSV_NAME, JSON_NAME, OK, Report
from blr.compressor.checkpoint.disk import fsync_folder, storage_errors, write_stream


@dataclass
class DecodeRow:
    """One arm at one model, context and batch.

    Attributes:
        status: ok, wrong (no time), oom or failed; `note` says why.
        tokens_per_second: of all rows of the batch together. ms, low, high: median and quartiles of
            `rounds` rounds of `steps` steps, milliseconds a step.
        bytes: weights and cache that a step reads. fraction: of the copy bandwidth; floor_ms: at all
            of it. speedup: over the baseline at the same context and batch.
        rel_error: of logits against eager transformers on the same weights. equal_tokens: leading
            greedy tokens equal to those of transformers' generate, the least of all rows.
    """

    model: str
    arm: str
    context: int
    batch: int
    dtype: str
    status: str = OK
    note: str | None = None
    tokens_per_second: float | None = None
    speedup: float | None = None
    ms: float | None = None
    low: float | None = None
    high: float | None = None
    rounds: int = 0
    steps: int = 0
    bytes: int | None = None
    floor_ms: float | None = None
    fraction: float | None = None
    rel_error: float | None = None
    equal_tokens: int | None = None

    def fail(self, status: str, note: str) -> None:
        """Take back the time, if any, and say why."""
        self.status, self.note = status, note
        self.ms = self.low = self.high = self.tokens_per_second = None


def summary(rows: Iterable[DecodeRow]) -> dict[str, Any]:
    """Tokens a second by model, arm and "context x batch"; how many rows have each status."""
    speeds: dict[str, Any] = {}
    statuses: dict[str, int] = {}
    for row in rows:
        statuses[row.status] = statuses.get(row.status, 0) + 1
        if row.tokens_per_second is not None:
            arms = speeds.setdefault(row.model, {}).setdefault(row.arm, {})
            arms[f"{row.context}x{row.batch}"] = round(row.tokens_per_second, 1)
    return {"tokens_per_second": speeds, "statuses": statuses}


def decode_text(report: Report) -> str:
    """One line an arm, a heading a model, context and batch."""
    copied = report.machine.get("copy_tbps")
    head = f"{report.machine.get('name')}" + (f": measured copy {copied:.2f} TB/s" if copied else "")
    line = "{:<22}{:>10}{:>9}{:>10}{:>10}{:>8}{:>9}{:>8}  {}".format
    lines = [
        head,
        line("arm", "tokens/s", "x base", "ms/step", "floor", "of it", "GB/step", "error", ""),
    ]
    case = None
    for r in report.rows:
        if (r.model, r.context, r.batch) != case:
            case = (r.model, r.context, r.batch)
            lines.append(f"{r.model}, context {r.context}, batch {r.batch}, {r.dtype}")
        speed = f"{r.tokens_per_second:.1f}" if r.tokens_per_second else r.status
        cells = (_cell(r.speedup, ".2f"), _cell(r.ms, ".3f"), _cell(r.floor_ms, ".3f"))
        gigabytes = _cell(None if r.bytes is None else r.bytes / 1e9, ".3f")
        more = (_cell(r.fraction, ".0%"), gigabytes, _cell(r.rel_error, ".0e"), r.note or "")
        lines.append(line(r.arm, speed, *cells, *more).rstrip())
    return "\n".join(lines)


def save(report: Report, found: dict[str, Any], folder: Path) -> list[Path]:
    """Write results.json, results.csv and, where matplotlib is installed, decode.png.

    Raises OutputError or StorageError.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, [f.name for f in fields(DecodeRow)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in report.rows)
    contents = {
        JSON_NAME: json.dumps(report.to_dict(found), indent=1) + "\n",
        CSV_NAME: text.getvalue(),
    }
    with storage_errors(folder):
        for name, data in contents.items():
            write_stream(folder / name, [data.encode()])
        fsync_folder(folder)
    return [folder / name for name in contents]


def draw(report: Report, folder: Path) -> Path | None:
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
        _panel(axes, [row for row in rows if row.model == model])
        axes.set_title(model)
    figure.tight_layout()
    path = folder / "decode.png"
    with storage_errors(folder):
        figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def _panel(axes: Any, rows: list[DecodeRow]) -> None:
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


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
