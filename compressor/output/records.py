"""What a finished output says of its layers, read back from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from blr.compressor.checkpoint.extras import LAYERS, MAX_BYTES
from blr.compressor.checkpoint.header import read_header
from blr.compressor.checkpoint.regular import read_json
from blr.compressor.planning.plan import Plan
from blr.compressor.structures.specs import spec_from_dict


def read_records(folder: Path) -> dict[str, dict[str, Any]]:
    """What compression recorded for every layer of an output: spec, type and relative error."""
    return _read(folder / LAYERS) if "blr" in _read(folder / "config.json") else {}


def _read(path: Path) -> dict[str, Any]:
    return read_json(path, MAX_BYTES, constants=True)


def is_layer(record: dict[str, Any]) -> bool:
    """Whether a record of a run's journal is a fitted layer's: there are those of whole blocks, texts
    and statistics as well."""
    return "spec" in record


def as_recorded(plan: Plan, records: dict[str, dict[str, Any]]) -> Plan:
    """`plan` with its layers as an output has them: a run that found it whole has measured nothing, and
    its own plan is that of headers alone."""
    made = {module: spec_from_dict(record["spec"]) for module, record in records.items()}
    layers = [replace(p, spec=made.get(p.layer.module, p.spec)) for p in plan.layers]
    return replace(plan, layers=layers)


def tensor_bytes(path: Path) -> int:
    """Bytes of tensor data in one shard."""
    return sum(entry.nbytes for entry in read_header(path).entries.values())


def by_type(records: dict[str, Any], name: str) -> dict[str, float]:
    """Mean of what records call `name`, by layer type; of those that have it."""
    found: dict[str, list[float]] = {}
    for record in records.values():
        if record.get(name) is not None:
            found.setdefault(record["type"], []).append(record[name])
    return {kind: sum(values) / len(values) for kind, values in found.items()}
