"""What runs of every command must agree on to finish each other's work: source and versions, and how two
of them differ."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from importlib.metadata import version
from typing import Any

from blr.compressor import __version__
from blr.compressor.checkpoint.source import Source
from blr.compressor.workspace.journal import canonical_json


def headers_digest(source: Source) -> str:
    """SHA-256 of a checkpoint's configuration and of its tensors' names, dtypes and shapes."""
    headers = [[e.name, e.dtype, e.shape, e.file.name] for e in source.entries.values()]
    return hashlib.sha256(canonical_json([source.config, headers])).hexdigest()


def versions() -> dict[str, str]:
    """Of everything that determines the bytes of an output."""
    return {
        "blr": __version__,
        "torch": version("torch"),
        "transformers": version("transformers"),
        "python": platform.python_version(),
    }


COMMANDS = {"recipe": "compress", "teacher": "heal", "export": "export"}  # by what their runs alone have


def changes(left: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs between two fingerprints, named down to the single setting; of what has a digest,
    that it has changed; of two commands' runs, the commands."""
    before, after = (next((COMMANDS[k] for k in COMMANDS if k in run), None) for run in (left, now))
    if before != after:
        return [f"command was {before}, now {after}"]
    return _changes(left, now, "")


def _changes(left: dict[str, Any], now: dict[str, Any], prefix: str) -> list[str]:
    found = []
    for key in {**left, **now}:
        was, is_now = left.get(key), now.get(key)
        if type(was) is dict and type(is_now) is dict:
            found += _changes(was, is_now, f"{prefix}{key}.")
        elif was != is_now:
            digests = _is_digest(was) and _is_digest(is_now)
            said = "has changed" if digests else f"was {_short(was)}, now {_short(is_now)}"
            found.append(f"{prefix}{key} {said}")
    return found


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _short(value: Any) -> str:
    if value is None or _is_digest(value):
        return "none" if value is None else f"{value[:12]}..."
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
