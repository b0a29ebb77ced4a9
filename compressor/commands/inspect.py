"""What an output consists of, read from its small files: no torch, no weights.

A model that was loaded, perhaps trained, and saved by transformers has the table of its layers in
config.json alone: what an error was measured against is no longer there.
"""

import math
from pathlib import Path
from typing import Any

from blr.compressor.base.errors import InputError
from blr.compressor.base.quoting import quote
from blr.compressor.base.tables import aligned
from blr.compressor.checkpoint.extras import LAYERS
from blr.compressor.checkpoint.header import MAX_ELEMENTS, check_name
from blr.compressor.checkpoint.regular import read_json
from blr.compressor.checkpoint.source import check_is_output
from blr.compressor.output.report import layer_facts
from blr.compressor.structures.specs import DenseSpec, LowRankSpec, QuantizedSpec, spec_from_dict
from blr.compressor.workspace.manifest import MANIFEST, check_listed, saved_by

PAIRS = "pairs"  # in config.blr of an export as plain: its factors, which are two linear layers each
MAX_BYTES = 64 * 2**20
MOST_BITS = 1e6  # a weight: more than any rank makes of it


def inspect_output(folder: Path, verify: bool = False) -> dict[str, object]:
    """One row a structured layer, and totals; `verify` hashes the weights. Raises InputError for another
    folder, or one that differs from its manifest."""
    check_is_output(folder, "one that blr compress wrote")
    check_listed(folder, "all" if verify else "small")
    try:
        path = folder / "config.json"  # a file of llama.cpp has none
        config = read_json(path, MAX_BYTES) if path.exists() else {}
        table = config.get("blr") or {}
        if not table and not (folder / LAYERS).exists():
            raise ValueError("a dense checkpoint, whose config.json names no structured layers")
        saved = None if (folder / MANIFEST).exists() else saved_by(config)
        records = {} if saved or PAIRS in table else read_json(folder / LAYERS, MAX_BYTES)
        records = _packed(records or _unmeasured(table), table.get("export") or {})
        width = 32 if config.get("dtype", config.get("torch_dtype")) == "float32" else 16
        layers = [_row(name, record, width) for name, record in records.items()]
        dense = sum(row["dense_parameters"] for row in layers)
        structured = sum(row["parameters"] for row in layers)
        if not layers and not {"export", PAIRS} & table.keys():
            raise ValueError("no structured layers")
        cf = dense / structured if layers else 1.0  # an export of a dense model
        bits = sum(row["bits"] * row["dense_parameters"] for row in layers) / dense if layers else None
        totals = {"dense_parameters": dense, "parameters": structured, "cf": cf, "bits": bits}
    except (InputError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        said = f"not an output of blr compress ({quote(error, 200)[1:-1]})"
        raise InputError(f"{folder}: {said}; give the folder it wrote") from None
    return {"output": str(folder), "layers": layers, **totals, **({"saved": saved} if saved else {})}


def _unmeasured(table: dict[str, Any]) -> dict[str, object]:
    """Records of the layers in config.json, without errors; pairs are of an export as plain."""
    if PAIRS in table:
        layers = {name: {"structure": LowRankSpec.structure, **s} for name, s in table[PAIRS].items()}
    else:
        layers = table["layers"]
    return {name: _record(name, spec) for name, spec in layers.items()}


def _packed(records: dict[str, Any], export: dict[str, Any]) -> dict[str, Any]:
    """`records` with the layers that an export has packed; their errors are not measured."""
    bits = int(str(export.get("quantize") or "int0").removeprefix("int"))
    packed: dict[str, dict[str, object]] = {}
    if bits:  # else a head alone
        specs = {n: r["spec"] for n, r in records.items() if n not in export.get("plain", [])}
        packed |= {n: {**s, "bits": bits} for n, s in specs.items() if {"bits", "base"}.isdisjoint(s)}
        for name, (o, i) in export.get("dense", {}).items():
            packed[name] = QuantizedSpec(DenseSpec(i, o), bits).to_dict()
    packed |= export.get("head", {})
    return records | {name: _record(name, spec) for name, spec in packed.items()}


def _record(name: str, spec: dict[str, object]) -> dict[str, object]:
    return {"type": name.rpartition(".")[2], "spec": spec, "error": None, "notes": []}


def _row(name: str, record: dict[str, Any], width: int) -> dict[str, Any]:
    """The row of a layer, whose numbers have `width` bits unless its record says. Raises ValueError and
    others for a record that blr does not write."""
    check_name(name, Path(LAYERS))
    spec = spec_from_dict(record["spec"])
    shapes = ((spec.in_features, spec.out_features), *spec.shapes().values())
    if not all(type(size) is int and 0 < size < MAX_ELEMENTS for shape in shapes for size in shape):
        raise ValueError(f"layer {quote(name)} of sizes that are none")
    kind, notes = record["type"], record["notes"]
    for error in (record["error"], record.get("weighted_error")):
        measured = isinstance(error, int | float) and type(error) is not bool and math.isfinite(error)
        if type(kind) is not str or not (measured or error is None):
            raise ValueError(f"layer {quote(name)} of type {quote(kind, 40)}, error {quote(error, 40)}")
    if type(notes) is not list or not all(type(note) is str for note in notes):
        raise ValueError(f"layer {quote(name)} with notes that are no texts")
    bits = record.get("bits", spec.stored_bits(width) / spec.dense_parameters)
    if type(bits) not in (int, float) or not 0 < bits < MOST_BITS:
        raise ValueError(f"layer {quote(name)} of {quote(bits, 40)} bits a weight")
    return {
        **layer_facts(name, kind, spec),
        "cf": spec.dense_parameters / spec.parameters,
        "bits": bits,
        "output_error": record.get("weighted_error"),
        "error": record["error"],
        "notes": record["notes"],
    }


def inspect_text(result: dict[str, Any]) -> str:
    """The table of `inspect_output` as aligned text."""
    known = any(row["output_error"] is not None for row in result["layers"])
    error, of = ("output_error", "error of outputs") if known else ("error", "error of weights")
    head = ("module", "structure", "shape", "rank or pattern", "parameters", "cf", "bits", of)
    rows = []
    for row in result["layers"]:
        shape = "x".join(map(str, row["shape"]))
        numbers = f"{row['parameters']:,}", f"{row['cf']:.3f}", f"{row['bits']:.3f}"
        lost = "-" if row[error] is None else f"{row[error]:.4f}"
        rows.append((row["module"], row["structure"], shape, row["rank"], *numbers, lost))
    total = f"{len(rows)} layers, {result['dense_parameters']:,} -> {result['parameters']:,}"
    bits = f", {result['bits']:.3f} bits a weight" if result["bits"] else ""
    fewer = f", {result['cf']:.3f} times fewer" if result["cf"] > 1 else ""
    ends = [f"{total} parameters{fewer}{bits}", result.get("saved")]
    return aligned([head, *rows, *filter(None, ends)], numbers=(4, 5, 6, 7))
