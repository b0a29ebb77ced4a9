"""What an output consists of, read from its small files: no torch, no weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from blr.compressor.checkpoint.header import open_regular, parse_json, read_exactly
from blr.compressor.errors import InputError
from blr.compressor.structures.specs import spec_from_dict

MAX_BYTES = 64 * 2**20


def inspect_output(folder: Path) -> dict[str, Any]:
    """One row a structured layer and the totals.

    Raises InputError when `folder` is not an output of `blr compress`.
    """
    try:
        records = _read(folder / "blr_layers.json")
        layers = [_row(name, record) for name, record in records.items()]
        dense = sum(row["dense_parameters"] for row in layers)
        structured = sum(row["parameters"] for row in layers)
        if not layers and "export" not in _read(folder / "config.json")["blr"]:
            raise ValueError("no structured layers")
        cf = dense / structured if layers else 1.0  # an export of a dense model
        totals = {"dense_parameters": dense, "parameters": structured, "cf": cf}
    except (InputError, ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise InputError(
            f"{folder}: not an output of blr compress ({error}); give the folder it wrote"
        ) from None
    return {"output": str(folder), "layers": layers, **totals}


def _read(path: Path) -> dict[str, Any]:
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_BYTES:
            raise ValueError(f"{path.name} of {size} bytes")
        return parse_json(read_exactly(file, path, 0, size), path)


def _row(name: str, record: dict[str, Any]) -> dict[str, Any]:
    spec = spec_from_dict(record["spec"])
    return {
        "module": name,
        "type": record["type"],
        "structure": spec.structure,
        "shape": [spec.out_features, spec.in_features],
        "rank": spec.describe(),
        "dense_parameters": spec.dense_parameters,
        "parameters": spec.parameters,
        "cf": spec.dense_parameters / spec.parameters,
        "error": record["error"],
        "notes": record["notes"],
    }


def inspect_text(result: dict[str, Any]) -> str:
    """The table of `inspect_output` as aligned text."""
    head = ("module", "structure", "shape", "rank or pattern", "parameters", "cf", "error")
    rows = [
        (
            row["module"],
            row["structure"],
            "x".join(map(str, row["shape"])),
            row["rank"],
            f"{row['parameters']:,}",
            f"{row['cf']:.3f}",
            f"{row['error']:.4f}",
        )
        for row in result["layers"]
    ]
    widths = [max(len(row[n]) for row in (head, *rows)) for n in range(len(head))]
    lines = ["  ".join(t.ljust(w) for t, w in zip(row, widths, strict=True)) for row in (head, *rows)]
    total = f"{len(rows)} layers, {result['dense_parameters']:,} -> {result['parameters']:,}"
    return "\n".join([*(line.rstrip() for line in lines), f"{total} parameters, cf {result['cf']:.3f}"])
