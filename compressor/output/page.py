"""The report of an output as a page: tiles, pictures and tables in one file of XHTML.

The page has no script and loads nothing. It follows the reader's choice of a light or dark screen and
fits a phone: wide pictures scroll inside their frames.
"""

import re
from collections.abc import Mapping, Sequence
from html import escape
from math import isfinite
from typing import Literal, TypedDict, TypeGuard, cast

from blr.compressor.base.tables import size_text
from blr.compressor.output.loss_messages import LossFacts, number, told
from blr.compressor.output.svg import Cell, Series, chart, heatmap, legend

# Errors of outputs come first: a calibrated fit makes these small, and those of weights larger
Measured = Literal["error", "weighted_error"]
ERRORS: dict[Measured, str] = {"weighted_error": "output error", "error": "weight error"}
KL = {"kl": "KL to the dense model, nats a token", "distance": "1 − cosine of embeddings"}
BLOCK = re.compile(r"\.(\d+)\.")
TAIL = {"50": "half of the tokens", "90": "9 in 10", "99": "99 in 100", "99.9": "999 in 1000"}


class Sizes(TypedDict, total=False):
    """A layer or a type of layers before and after; reports of earlier versions have no bytes."""

    type: str
    dense_bytes: int
    bytes: int
    dense_parameters: int
    parameters: int


class LayerRow(Sizes, total=False):
    """A compressed layer, or one that was kept dense, of which less is told."""

    module: str
    structure: str
    shape: list[int]
    rank: str
    equal_rank: float
    bits: float | None
    error: float | None
    weighted_error: float | None
    curve: list[float | None]
    rule: str
    notes: list[str]


class Step(TypedDict, total=False):
    """A line of a training's log; `held` are figures on windows held back, by text."""

    step: int
    held: dict[str, dict[str, float]]


class Healing(TypedDict):
    facts: dict[str, object]
    log: list[Step]


class Report(TypedDict, total=False):
    """What ``report.json`` says; a `loss` and a `healing` may come later."""

    facts: dict[str, object]
    totals: dict[str, float | None]
    types: list[Sizes]
    layers: list[LayerRow]
    kept: list[LayerRow]
    notes: list[str]
    loss: LossFacts | None
    healing: Healing | None


PAGE = """<!DOCTYPE html>
<html xmlns="http://www.w3.org/1999/xhtml" lang="en"><head><meta charset="utf-8"/>
<meta name="viewport" content="width=device-width,initial-scale=1"/><title>{title}</title>
<style>{style}</style></head>
<body><h1>{title}</h1>
{body}</body></html>
"""
PALETTE = """
:root{color-scheme:light dark;--page:#fff;--card:#f6f8fa;--ink:#1f2328;--faint:#59636e;--line:#d8dee4;
--c0:#2563b8;--c1:#c2410c;--c2:#15803d;--c3:#9333ea;--c4:#7c8500;--c5:#0e7490;--c6:#be185d;--c7:#64748b}
@media(prefers-color-scheme:dark){:root{--page:#0d1117;--card:#161b22;--ink:#e6edf3;--faint:#9198a1;
--line:#30363d;--c0:#6cb6ff;--c1:#f69d50;--c2:#6bc46d;--c3:#c8a2ff;--c4:#c3cf4a;--c5:#56d4dd;
--c6:#fc8dc7;--c7:#9aa7b4}}
"""
STYLE = (
    PALETTE
    + """*{box-sizing:border-box}body{font:15px/1.5 system-ui,sans-serif;background:var(--page);
color:var(--ink);max-width:960px;margin:2em auto;padding:0 1em;overflow-wrap:anywhere}
h1{font-size:1.6em;line-height:1.25;margin:0 0 .1em}h2{font-size:1.2em;margin:2.2em 0 .5em}
h3{font-size:1em;margin:1.3em 0 .3em}p{margin:.3em 0}.said{color:var(--faint);max-width:46em}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:12px;margin:1.4em 0}
.tile{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 16px}
.tile b{display:block;font-size:1.45em;font-weight:600;font-variant-numeric:tabular-nums}
.tile span,.tile i{display:block;font-style:normal;font-size:13px;color:var(--faint)}
.bars{display:grid;grid-template-columns:minmax(5em,max-content) 1fr;gap:6px 12px;font-size:13px}
.bars div{display:flex;align-items:center;gap:8px;white-space:nowrap}
.bars u{height:14px;min-width:2px;border-radius:3px}
.wide{overflow-x:auto}svg{width:100%;min-width:560px;max-width:860px;display:block}
svg text{font-size:12px;fill:var(--ink)}svg text.tick{fill:var(--faint);font-size:11px}
table{border-collapse:collapse;font-size:13px;display:block;overflow-x:auto}
td,th{padding:4px 10px;text-align:left;border-bottom:1px solid var(--line)}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
.legend span{margin-right:1.2em;white-space:nowrap;font-size:13px}
.legend i{display:inline-block;width:10px;height:10px;border-radius:5px;margin-right:5px}
summary{cursor:pointer;color:var(--faint);margin:.6em 0}
"""
)


def report_html(content: Mapping[str, object]) -> str:
    """The page of what `report.report_files` wrote as JSON."""
    data = cast(Report, content)
    name = str(data["facts"].get("name", "checkpoint"))
    facts = data["facts"]
    method = facts.get("method", "several methods")
    how = "calibrated" if facts.get("calibration") else "from the weights alone, uncalibrated"
    healed = ", then healed" if data.get("healing") else ""
    made = [(k, _words(v)) for k, v in facts.items() if k not in ("name", "cf") and v is not None]
    lines = [*data["notes"], *(f"{x['module']}: {note}" for x in data["layers"] for note in x["notes"])]
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    sections = [
        f'<p class="said">Method {escape(str(method))}, {how}{healed}.</p>',
        _tiles(data),
        _perplexity(data.get("loss")),
        _where(data),
        _sizes(data["types"]),
        _healing(data.get("healing")),
        _spectra(data),
        _plan(data),
        f"<h2>Notes and fallbacks</h2><ul>{items}</ul>" if items else "",
        f"<h2>How it was made</h2>{html_table(made, head=False)}",
    ]
    title = escape(f"{name}, compressed by blr")
    return PAGE.format(title=title, style=STYLE, body="\n".join(filter(None, sections)))


def _tiles(data: Report) -> str:
    totals, loss = data["totals"], data.get("loss") or LossFacts()
    dense, size = (sum(_sizes_of(t)[n] for t in data["types"]) for n in range(2))
    smaller = f"{dense / size:.3g} times smaller, {len(data['layers'])} layers" if size else ""
    tiles = [
        ("Replaced weights", f"{size_text(dense)} → {size_text(size)}", smaller),
        ("Stored bits a weight", _number(totals.get("bits"), ".4g"), "scales and corrections counted"),
    ]
    if measured := loss.get("perplexity"):
        before, after = (number(measured[name]) for name in ("before", "after"))
        tiles[1:1] = [
            ("Perplexity", f"{before} → {after}", f"{loss['loss']:z.3f} nats a token lost"),
            ("Same top-1 token", f"{loss['agreement']:.1%}", "of places"),
        ]
    items = "".join(
        f'<div class="tile"><span>{escape(name)}</span><b>{escape(value)}</b><i>{escape(more)}</i></div>'
        for name, value, more in tiles
    )
    return f'<div class="tiles">{items}</div>'


def _perplexity(found: LossFacts | None) -> str:
    """Perplexities, percentiles of the divergence from the dense model, and the worst windows."""
    if not found:
        return ""
    rows = [(k, float(v), number(v), n) for n, (k, v) in enumerate(found.get("perplexity", {}).items())]
    text = f'<h2>Perplexity</h2><p class="said">{escape(told(found))}.</p>{_bars(rows)}'
    if "kl" not in found:
        return text
    kl = found["kl"]
    rows = [(f"{TAIL.get(n, 'all')}, at most", v, f"{v:.4g}", 1) for n, v in kl["percentiles"].items()]
    text += f"<h3>KL to the dense model, nats a token</h3>{_bars(rows)}"
    if found.get("first") is None:
        return text
    places = ", ".join(f"token {x['token']:,} ({x['kl']:.3f})" for x in kl["worst"])
    return f'{text}<p class="said">The worst windows begin at {places}.</p>'


def _where(data: Report) -> str:
    """Heat maps of errors and sizes: a row for each type of layer, a column for each block."""
    text = ""
    for key, what in zip(ERRORS, ("layer outputs", "weights"), strict=True):
        found = [(layer, layer.get(key)) for layer in data["layers"]]
        if cells := [_cell(layer, lost, f"error {lost:.4f}") for layer, lost in found if known(lost)]:
            text += f"<h3>Relative error of the {what}</h3>{heatmap(cells, colour=1)}"
    sizes = [(layer, *_sizes_of(layer)) for layer in data["layers"]]
    shares = [_cell(x, size / dense, f"{x['rank']}, {size / dense:.1%}") for x, dense, size in sizes]
    text += f"<h3>Share of the bytes that is left</h3>{heatmap(shares, colour=0)}"
    said = "Rows are types of layers, columns are blocks. The strongest colour is the largest value."
    said += " Errors of weights are larger than those of outputs where a text was given: expect that."
    return f'<h2>Layer by layer</h2><p class="said">{said}</p>{text}'


def _cell(layer: LayerRow, value: float, said: str) -> Cell:
    block = BLOCK.search(layer["module"])
    place = str(layer["type"]), int(block[1]) if block else 0
    return Cell(*place, float(value), f"{layer['module']}: {said}")


def _sizes_of(entry: Sizes) -> tuple[int, int]:
    """Sizes before and after, in bytes; in parameters for reports of earlier versions."""
    if "bytes" in entry:
        return entry["dense_bytes"], entry["bytes"]
    return entry["dense_parameters"], entry["parameters"]


def _sizes(types: Sequence[Sizes]) -> str:
    rows = list[tuple[str, float, str, int]]()
    for n, entry in enumerate(types):
        dense, size = _sizes_of(entry)
        rows.append((f"{entry['type']} before", dense, size_text(dense), 7))
        rows.append(("after", size, f"{size_text(size)} ({size / dense:.1%})", n))
    return f"<h2>Bytes before and after</h2>{_bars(rows)}"


def _healing(found: Healing | None) -> str:
    """The divergence from the dense model over the steps of the training behind the compression."""
    if not found:
        return ""
    held = [line for line in found["log"] if "held" in line]
    names = list(held[0]["held"])
    key = "kl" if "kl" in held[0]["held"][names[0]] else "distance"
    series = [
        Series(n, [(float(x["step"]), x["held"][n][key]) for x in held], joined=True, colour=colour)
        for colour, n in enumerate(names)
    ]
    labels = [("own text" if n == "self" else n, colour) for colour, n in enumerate(names)]
    rows = [(k, _words(v)) for k, v in found["facts"].items() if k not in ("before", "after")]
    drawn = chart(series, "step", KL[key])
    return f"<h2>Healing</h2>{legend(labels)}{drawn}{html_table(rows, head=False)}"


def _spectra(data: Report) -> str:
    """One chart a layer type: predicted loss saved by each further rank, the chosen rank marked."""
    text = ""
    for colour, kind in enumerate(entry["type"] for entry in data["types"]):
        chosen = [layer for layer in data["layers"] if layer["type"] == kind and layer.get("curve")]
        if lines := [line for layer in chosen if (line := _line(layer, colour)).points]:
            text += f"<h3>{escape(kind)}</h3>"
            text += chart(lines, "rank", "loss saved, of the first", height=220, log=True)
    if not text:
        return ""
    return (
        '<h2>Spectrum against rank</h2><p class="said">Predicted loss that each further rank saves, '
        "relative to the first, with a line for every layer. The dot is the rank whose low-rank factors "
        f"hold as many parameters as the chosen structure.</p>{text}"
    )


def _line(layer: LayerRow, colour: int) -> Series:
    curve, most = layer["curve"], min(layer["shape"])
    first = next((value for value in curve if known(value) and value > 0), None)
    if first is None:
        return Series(layer["module"], [])
    span = (most - 1) / max(len(curve) - 1, 1)
    points = [
        (1 + n * span, value / first)
        for n, value in enumerate(curve)
        if known(value) and value > first * 1e-8
    ]
    rank = layer["equal_rank"]
    x, y = min(points, key=lambda point: abs(point[0] - rank))
    mark = (x, y, f"{layer['module']}: {layer['rank']}")
    return Series(layer["module"], points, joined=True, colour=colour, marks=[mark])


def _plan(data: Report) -> str:
    given = (k for k in ERRORS if any(known(x.get(k)) for x in data["layers"]))
    key: Measured = next(given, "error")
    head = ("module", "structure", "rank or pattern", "parameters", "bits", ERRORS[key], "rule")
    layers = sorted(data["layers"], key=lambda x: v if known(v := x.get(key)) else -1.0, reverse=True)
    rows = [
        (
            *(layer["module"], layer["structure"], layer["rank"], f"{layer['parameters']:,}"),
            *(_number(layer.get("bits"), ".3f"), _number(layer.get(key), ".4f"), layer["rule"]),
        )
        for layer in layers
    ]
    rows += [(k["module"], "dense", "", f"{k['parameters']:,}", "", "", k["rule"]) for k in data["kept"]]
    numeric = [name in ("parameters", "bits", *ERRORS.values()) for name in head]
    many = f"{len(rows)} layers by {ERRORS[key]}, the largest first, and the rule that decided on each"
    many = f"<summary>{many}</summary>"
    return f"<h2>Plan</h2><details>{many}{html_table([head, *rows], numeric)}</details>"


def html_table(rows: Sequence[Sequence[str]], numeric: Sequence[bool] = (), head: bool = True) -> str:
    """Rows of cells as a table, the first as its `head`; `numeric` columns are aligned right."""
    lines = ""
    for n, row in enumerate(rows):
        tag = "th" if head and n == 0 else "td"
        kinds = [' class="n"' if right else "" for right in numeric] or [""] * len(row)
        cells = (f"<{tag}{k}>{escape(cell)}</{tag}>" for cell, k in zip(row, kinds, strict=True))
        lines += f"<tr>{''.join(cells)}</tr>"
    return f"<table>{lines}</table>"


def _bars(rows: Sequence[tuple[str, float, str, int]]) -> str:
    """Horizontal bars. A row has a label, a value, a text beside the bar and a colour."""
    widest = max((value for _, value, _, _ in rows), default=1.0) or 1.0
    items = "".join(
        f"<span>{escape(name)}</span><div>"
        f'<u style="width:{60 * value / widest:.1f}%;background:var(--c{colour % 8})"></u>'
        f"{escape(text)}</div>"
        for name, value, text, colour in rows
    )
    return f'<div class="bars">{items}</div>' if items else ""


def known(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number."""
    return isinstance(value, int | float) and isfinite(value)


def _number(value: object, form: str) -> str:
    """`value` in a format; a dash for a figure that earlier versions did not record."""
    return format(value, form) if known(value) else "–"


def _words(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_words(item)}" for key, item in value.items())
    if isinstance(value, float):
        return f"{value:.6g}"
    return ", ".join(map(_words, value)) if isinstance(value, list | tuple) else str(value)
