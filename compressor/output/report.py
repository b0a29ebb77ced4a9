"""The report of an output: `report.json` and a self-contained `report.html` with its plots.

The same plan, records and facts give the same bytes: no times, no paths, numbers rounded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from math import isfinite
from statistics import mean
from typing import Any

from blr.compressor.checkpoint.extras import REPORT
from blr.compressor.output.loss_messages import number, told
from blr.compressor.output.svg import Series, bars, chart, legend
from blr.compressor.planning.plan import Plan, PlannedLayer
from blr.compressor.structures.specs import Spec

CURVE_POINTS = 256
# Of outputs first: a calibrated fit makes these small, and those of weights larger
ERRORS = {"weighted_error": "output error", "error": "weight error"}
Records = Mapping[str, Mapping[str, Any]]

PAGE = """<!DOCTYPE html>
<html xmlns="http://www.w3.org/1999/xhtml" lang="en"><head><meta charset="utf-8"/>
<meta name="viewport" content="width=device-width"/><title>{title}</title><style>{style}</style></head>
<body><h1>{title}</h1>
{body}</body></html>
"""
PALETTE = """
:root{color-scheme:light dark;--page:#fff;--ink:#1f2328;--faint:#59636e;--line:#d8dee4;
--c0:#2563b8;--c1:#c2410c;--c2:#15803d;--c3:#9333ea;--c4:#7c8500;--c5:#0e7490;--c6:#be185d;--c7:#64748b}
@media(prefers-color-scheme:dark){:root{--page:#0d1117;--ink:#e6edf3;--faint:#9198a1;--line:#30363d;
--c0:#6cb6ff;--c1:#f69d50;--c2:#6bc46d;--c3:#c8a2ff;--c4:#c3cf4a;--c5:#56d4dd;--c6:#fc8dc7;--c7:#9aa7b4}}
"""
STYLE = (
    PALETTE
    + """body{font:15px/1.5 system-ui,sans-serif;background:var(--page);color:var(--ink);
max-width:1000px;margin:2em auto;padding:0 1em}
h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em}h3{font-size:1em;margin:1.2em 0 .2em}
svg{width:100%;max-width:760px;display:block}svg text{font-size:12px;fill:var(--ink)}
svg text.tick{fill:var(--faint);font-size:11px}
table{border-collapse:collapse;font-size:13px;display:block;overflow-x:auto}
td,th{padding:3px 9px;text-align:left;border-bottom:1px solid var(--line)}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
.legend span{margin-right:1.2em;white-space:nowrap;font-size:13px}
.legend i{display:inline-block;width:10px;height:10px;border-radius:5px;margin-right:5px}
"""
)


def report_files(plan: Plan, records: Records, facts: Mapping[str, Any]) -> dict[str, bytes]:
    """The report's files, name to contents.

    Args:
        plan: what was decided, in order.
        records: by module: `type`, `spec`, `error` (relative error of the weight), and optionally
            `weighted_error` (of the outputs), `curve` (as `thin_curve` gives it) and `notes`.
        facts: JSON-ready account of the run: `name`, `method`, `cf`, `calibration`, `versions`.
    """
    return report_pages(report_data(plan, records, facts))


def report_pages(data: Mapping[str, Any]) -> dict[str, bytes]:
    """The same of what `report_data` gave, with a `loss` (facts of `output/loss.py`) and a `healing`
    where these are known."""
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False)
    return {REPORT: text.encode() + b"\n", "report.html": report_html(data).encode()}


def thin_curve(curve: Sequence[float], points: int = CURVE_POINTS) -> list[float]:
    """`curve` at no more than `points` evenly spaced ranks, the first and last among them."""
    last = len(curve) - 1
    if last < points:
        return [float(value) for value in curve]
    return [float(curve[round(n * last / (points - 1))]) for n in range(points)]


def report_data(plan: Plan, records: Records, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Everything the report says, JSON-ready."""
    layers = [_layer(planned, records[planned.layer.module]) for planned in plan.layers]
    kept = [
        {
            "module": entry.layer.module,
            "type": entry.layer.type,
            "parameters": entry.parameters,
            "rule": entry.rule,
        }
        for entry in plan.kept
    ]
    return {
        "format": 1,
        "facts": _plain(facts),
        "totals": {
            "dense_parameters": plan.dense_parameters,
            "parameters": plan.structured_parameters,
            "cf": _round(plan.cf),
            "bits": _round(plan.bits),
        },
        "types": [_type(kind, layers) for kind in dict.fromkeys(layer["type"] for layer in layers)],
        "layers": layers,
        "kept": kept,
        "notes": list(plan.notes),
    }


def _layer(planned: PlannedLayer, record: Mapping[str, Any]) -> dict[str, Any]:
    spec = planned.spec
    found = {
        "module": planned.layer.module,
        "type": planned.layer.type,
        "structure": spec.structure,
        "shape": [spec.out_features, spec.in_features],
        "rank": spec.describe(),
        "equal_rank": _round(rank_on_curve(spec)),
        "dense_parameters": spec.dense_parameters,
        "parameters": spec.parameters,
        "bits": _round(planned.bits / spec.dense_parameters),
        "error": _round(record["error"]),
        "rule": planned.rule,
        "notes": list(record.get("notes", [])),
    }
    if record.get("weighted_error") is not None:
        found["weighted_error"] = _round(record["weighted_error"])
    if record.get("curve"):
        found["curve"] = [_round(value) for value in record["curve"]]
    return found


def rank_on_curve(spec: Spec) -> float:
    """The rank whose low-rank factors would hold as many parameters, which is what curves are over."""
    return spec.parameters / (spec.in_features + spec.out_features)


def _type(kind: str, layers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    chosen = [layer for layer in layers if layer["type"] == kind]
    return {
        "type": kind,
        "layers": len(chosen),
        "dense_parameters": sum(layer["dense_parameters"] for layer in chosen),
        "parameters": sum(layer["parameters"] for layer in chosen),
        **mean_errors(kind, layers),
    }


def mean_errors(kind: str, layers: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Of the layers of a type: the means of what is known."""
    found = dict[str, float | None]()
    for name in ("error", "weighted_error"):
        known = [x[name] for x in layers if x["type"] == kind and _known(x.get(name))]
        found[name] = _round(mean(known)) if known else None
    return found


def report_html(data: Mapping[str, Any]) -> str:
    """The page: well-formed XHTML with inline style and SVG, no script, nothing loaded."""
    facts = data["facts"]
    name = str(facts.get("name", "checkpoint"))
    sections = [
        _summary(data),
        _loss(data.get("loss")),
        _healing(data.get("healing")),
        _errors_by_type(data["types"]),
        _errors_by_layer(data),
        _sizes(data["types"]),
        _spectra(data),
        _rules(data),
        _fallbacks(data),
    ]
    title = escape(f"{name}, compressed by blr")
    return PAGE.format(title=title, style=STYLE, body="\n".join(filter(None, sections)))


def _summary(data: Mapping[str, Any]) -> str:
    totals = data["totals"]
    rows = [
        ("replaced layers", str(len(data["layers"]))),
        ("kept dense on purpose", str(len(data["kept"]))),
        ("parameters of these", f"{totals['dense_parameters']:,} → {totals['parameters']:,}"),
        ("compression factor", f"{totals['cf']:.4g}"),
        ("stored bits a weight", _number(totals.get("bits"), ".4g")),
    ]
    skipped = ("name", "cf")
    rows += [(k, _words(v)) for k, v in data["facts"].items() if k not in skipped and v is not None]
    return _table(("", ""), rows, header=False)


def _number(value: Any, form: str) -> str:
    """As `form` says; a dash for what earlier versions did not record."""
    return format(value, form) if _known(value) else "–"


def _loss(found: Any) -> str:
    if not found:
        return ""
    measured = found.get("perplexity", {})
    rows = [(name, float(value), number(value)) for name, value in measured.items()]
    return f"<h2>Perplexity</h2><p>{escape(told(found))}.</p>{bars(rows) if rows else ''}"


def _healing(found: Any) -> str:
    """The course of a training after the compression: divergence from the dense model by step."""
    if not found:
        return ""
    held = [line for line in found["log"] if "held" in line]
    names = list(held[0]["held"])
    key = "kl" if "kl" in held[0]["held"][names[0]] else "distance"
    series = [
        Series(
            name, [(float(x["step"]), x["held"][name][key]) for x in held], joined=True, colour=colour
        )
        for colour, name in enumerate(names)
    ]
    measures = {"kl": "KL from the dense model, nats a token", "distance": "1 − cosine of embeddings"}
    text = chart(series, "step", measures[key])
    labels = [("own text" if n == "self" else n, colour) for colour, n in enumerate(names)]
    rows = [(k, _words(_plain(v))) for k, v in found["facts"].items() if k not in ("before", "after")]
    return f"<h2>Healing</h2>{legend(labels)}{text}{_table(('', ''), rows, header=False)}"


def _errors_by_type(types: Sequence[dict[str, Any]]) -> str:
    text = ""
    for key, title in (
        ("weighted_error", "Mean relative error of the layer outputs"),
        ("error", "Mean relative error of the weights"),
    ):
        rows = [(t["type"], t[key], f"{t[key]:.4f}") for t in types if _known(t[key])]
        text += f"<h3>{title}</h3>{bars(rows)}" if rows else ""
    return f"<h2>Error by layer type</h2>{text}"


def _errors_by_layer(data: Mapping[str, Any]) -> str:
    colours = _colours(data)
    text = legend(list(colours.items()))
    for key, label in ERRORS.items():
        series = []
        for kind, colour in colours.items():
            chosen = [
                (float(n), layer)
                for n, layer in enumerate(data["layers"])
                if layer["type"] == kind and _known(layer.get(key))
            ]
            titles = [f"{layer['module']}: {layer[key]:.4f}" for _, layer in chosen]
            points = [(n, layer[key]) for n, layer in chosen]
            series.append(Series(kind, points, colour=colour, titles=titles))
        text += chart(series, "layers in the order of the checkpoint", label)
    return f"<h2>Error by layer</h2>{text}"


def _sizes(types: Sequence[dict[str, Any]]) -> str:
    rows: list[tuple[str, float, str]] = []
    colours: list[int] = []
    for n, t in enumerate(types):
        colours += [7, n]
        rows.append((f"{t['type']} before", float(t["dense_parameters"]), f"{t['dense_parameters']:,}"))
        share = t["parameters"] / t["dense_parameters"]
        rows.append(("after", float(t["parameters"]), f"{t['parameters']:,} ({share:.1%})"))
    return f"<h2>Parameters before and after</h2>{bars(rows, colours)}"


def _spectra(data: Mapping[str, Any]) -> str:
    """One chart a layer type: predicted loss saved by each further rank, the chosen rank marked."""
    text = ""
    for kind, colour in _colours(data).items():
        chosen = [layer for layer in data["layers"] if layer["type"] == kind and layer.get("curve")]
        lines = [line for layer in chosen if (line := _line(layer, colour)).points]
        if lines:
            text += f"<h3>{escape(kind)}</h3>"
            text += chart(lines, "rank", "loss saved, of the first", height=220, log=True)
    if not text:
        return ""
    return (
        "<h2>Spectrum against rank</h2><p>Predicted loss that each further rank saves, relative to the "
        "first, a line for every layer. The dot is the rank whose low-rank factors hold as many "
        f"parameters as the chosen structure.</p>{text}"
    )


def _line(layer: Mapping[str, Any], colour: int) -> Series:
    curve, most = layer["curve"], min(layer["shape"])
    first = next((value for value in curve if _known(value) and value > 0), None)
    if first is None:
        return Series(layer["module"], [])
    span = (most - 1) / max(len(curve) - 1, 1)
    points = [
        (1 + n * span, value / first)
        for n, value in enumerate(curve)
        if _known(value) and value > first * 1e-8
    ]
    rank = layer["equal_rank"]
    x, y = min(points, key=lambda point: abs(point[0] - rank))
    mark = (x, y, f"{layer['module']}: {layer['rank']}")
    return Series(layer["module"], points, joined=True, colour=colour, marks=[mark])


def _rules(data: Mapping[str, Any]) -> str:
    key = next((k for k in ERRORS if any(_known(x.get(k)) for x in data["layers"])), "error")
    head = ("module", "structure", "rank or pattern", "parameters", "bits", ERRORS[key], "rule")
    rows = [
        (
            layer["module"],
            layer["structure"],
            layer["rank"],
            f"{layer['parameters']:,}",
            _number(layer.get("bits"), ".3f"),
            f"{layer[key]:.4f}" if _known(layer.get(key)) else "",
            layer["rule"],
        )
        for layer in data["layers"]
    ]
    rows += [(k["module"], "dense", "", f"{k['parameters']:,}", "", "", k["rule"]) for k in data["kept"]]
    return f"<h2>Plan</h2>{_table(head, rows)}"


def _fallbacks(data: Mapping[str, Any]) -> str:
    lines = [*data["notes"], *(f"{x['module']}: {note}" for x in data["layers"] for note in x["notes"])]
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<h2>Notes and fallbacks</h2><ul>{items}</ul>" if items else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], header: bool = True) -> str:
    numeric = [name in ("parameters", "bits", *ERRORS.values()) for name in head]
    top = "".join(f"<th{_class(n)}>{escape(h)}</th>" for h, n in zip(head, numeric, strict=True))
    lines = [zip(row, numeric, strict=True) for row in rows]
    cells = ["".join(f"<td{_class(n)}>{escape(cell)}</td>" for cell, n in line) for line in lines]
    body = "".join(f"<tr>{line}</tr>" for line in cells)
    return f"<table>{f'<tr>{top}</tr>' if header else ''}{body}</table>"


def _class(numeric: bool) -> str:
    return ' class="n"' if numeric else ""


def _colours(data: Mapping[str, Any]) -> dict[str, int]:
    return {entry["type"]: n for n, entry in enumerate(data["types"])}


def _known(value: Any) -> bool:
    return isinstance(value, int | float) and isfinite(value)


def _round(value: float) -> float | None:
    """Six significant digits; None for what JSON has no word for."""
    return float(f"{value:.6g}") if isfinite(value) else None


def _plain(value: Any) -> Any:
    """JSON-ready: numbers rounded, keys text, anything unknown as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return _round(value)
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_words(item)}" for key, item in value.items())
    return ", ".join(map(_words, value)) if isinstance(value, list) else str(value)
