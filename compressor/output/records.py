"""What a finished output says of its layers, read back from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from blr.compressor.checkpoint.extras import LAYERS
from blr.compressor.checkpoint.header import read_header


def read_records(folder: Path) -> dict[str, dict[str, Any]]:
    """What compression recorded for every layer of an output: spec, type and relative error."""
    config = json.loads((folder / "config.json").read_bytes())
    return json.loads((folder / LAYERS).read_bytes()) if "blr" in config else {}


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
