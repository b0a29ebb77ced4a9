"""The report of an output, `report.json` and `report.html`, and the records that it is made from.

The same plan, records and facts give the same bytes: no times, no paths, numbers rounded.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypedDict

from blr.compressor.checkpoint.extras import LAYERS, MAX_BYTES, REPORT
from blr.compressor.checkpoint.header import read_header
from blr.compressor.checkpoint.regular import read_json
from blr.compressor.output.page import known, report_html
from blr.compressor.planning.plan import Plan, PlannedLayer
from blr.compressor.structures.specs import Spec, spec_from_dict

CURVE_POINTS = 256
SIZES = ("dense_parameters", "parameters", "dense_bytes", "bytes")


class LayerRecord(TypedDict, total=False):
    """What is kept of a fitted layer: the relative error of its weight and, where a text was given, of
    its outputs; the `curve` of its sensitivity, and how many `tokens` it was fitted to."""

    type: str
    spec: dict[str, object]
    error: float
    weighted_error: float | None
    notes: list[str]
    curve: list[float]
    tokens: int


Records = Mapping[str, LayerRecord]


def report_files(plan: Plan, records: Records, facts: Mapping[str, object]) -> dict[str, bytes]:
    """The report's files; `facts` have `name`, `method`, `cf`, `calibration` and `versions`."""
    layers = [_layer(planned, records[planned.layer.module]) for planned in plan.layers]
    kinds = dict.fromkeys(planned.layer.type for planned in plan.layers)
    kept = [
        {"module": k.layer.module, "type": k.layer.type, "parameters": k.spec.parameters, "rule": k.rule}
        for k in plan.kept
    ]
    data = {
        "format": 1,
        "facts": _plain(facts),
        "totals": {
            "dense_parameters": plan.dense_parameters,
            "parameters": plan.structured_parameters,
            "cf": _round(plan.cf),
            "bits": _round(plan.bits),
        },
        "types": [type_row(kind, layers) for kind in kinds],
        "layers": layers,
        "kept": kept,
        "notes": list(plan.notes),
    }
    return report_pages(data)


def report_pages(data: Mapping[str, object]) -> dict[str, bytes]:
    """The report's files from the content of its JSON, to which a `loss` and a `healing` may have been
    added."""
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False)
    return {REPORT: text.encode() + b"\n", "report.html": report_html(data).encode()}


def thin_curve(curve: Sequence[float], points: int = CURVE_POINTS) -> list[float]:
    """`curve` at no more than `points` evenly spaced ranks, the first and last among them."""
    last = len(curve) - 1
    if last < points:
        return [float(value) for value in curve]
    return [float(curve[round(n * last / (points - 1))]) for n in range(points)]


def layer_facts(module: str, kind: str, spec: Spec) -> dict[str, object]:
    """What is known of a layer by its spec."""
    return {
        **{"module": module, "type": kind, "structure": spec.structure},
        "shape": [spec.out_features, spec.in_features],
        "rank": spec.describe(),
        **{"dense_parameters": spec.dense_parameters, "parameters": spec.parameters},
    }


def _layer(planned: PlannedLayer, record: LayerRecord) -> dict[str, object]:
    spec = planned.spec
    found = {
        **layer_facts(planned.layer.module, planned.layer.type, spec),
        "equal_rank": _round(spec.parameters / (spec.in_features + spec.out_features)),
        "dense_bytes": planned.layer.entry.nbytes,
        "bytes": planned.bits // 8,
        "bits": _round(planned.bits / spec.dense_parameters),
        "error": _round(record["error"]),
        "rule": planned.rule,
        "notes": list(record.get("notes", [])),
    }
    if record.get("weighted_error") is not None:
        found["weighted_error"] = _round(record["weighted_error"])
    if record.get("curve"):
        found["curve"] = [_round(value) for value in record["curve"]]
    return found if record.get("tokens") is None else found | {"tokens": record["tokens"]}


def type_row(kind: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The sizes of all layers of a type, as far as its `rows` know them, and their mean errors, None
    where none was measured."""
    chosen = [row for row in rows if row["type"] == kind]
    sizes = {n: sum(row[n] for row in chosen) for n in SIZES if n in chosen[0]}
    errors = {n: _round(by_type(rows, n).get(kind)) for n in ("error", "weighted_error")}
    return {"type": kind, "layers": len(chosen), **sizes, **errors}


def _round(value: object) -> float | None:
    """`value` with six significant digits; None if it is no finite number."""
    return float(f"{value:.6g}") if known(value) else None


def _plain(value: object) -> object:
    """`value` for JSON: numbers rounded, keys as text, other objects as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return _round(value)
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def read_records(folder: Path) -> dict[str, LayerRecord]:
    """What compression recorded for every layer of an output: spec, type and relative error."""
    return _read(folder / LAYERS) if "blr" in _read(folder / "config.json") else {}


def _read(path: Path) -> dict[str, Any]:
    return read_json(path, MAX_BYTES, constants=True)


def as_recorded(plan: Plan, records: Records) -> Plan:
    """`plan` with the specs of an output, as a run that found it finished measured nothing."""
    made = {module: spec_from_dict(record["spec"]) for module, record in records.items()}
    layers = [replace(p, spec=made.get(p.layer.module, p.spec)) for p in plan.layers]
    return replace(plan, layers=layers)


def tensor_bytes(path: Path) -> int:
    """Bytes of tensor data in one shard."""
    return sum(entry.nbytes for entry in read_header(path).entries.values())


def by_type(rows: Iterable[Mapping[str, object]], name: str) -> dict[str, float]:
    """The mean of `name` by layer type, over the `rows` or records that have it."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if known(value := row.get(name)):
            found.setdefault(str(row["type"]), []).append(value)
    return {kind: fmean(values) for kind, values in found.items()}
