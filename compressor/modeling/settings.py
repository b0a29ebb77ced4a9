"""What an export was made for and what caches hold, as config.json says."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, fields
from typing import Any

from blr.compressor.structures.cached import KV_CACHES

LAYOUT = 2  # version of names, axis orders and packing of what an export stores
_said: set[str] = set()


@dataclass(frozen=True)
class ExportSettings:
    """``config.blr["export"]``.

    `gpu` is a name of configs/gpus.yaml; `batch` sequences at most and `context` tokens of prompt
    and answer (None: not a decoder) are what generation is prepared for; `cache` is what the runtime
    keeps of keys and values, "whole" or "int8"; `quantize` is "int8",
    "int4" or None, and `dense` maps modules to the shape [out, in] of a dense weight that is packed;
    `plain` are structured modules that are left as they are, since packing makes them no smaller.
    `head` maps the output head, if it is packed by itself, to the entry of the table of layers
    that its layer is made from.
    """

    layout: int
    gpu: str
    batch: int
    blr_version: str
    context: int | None = None
    cache: str = "whole"
    quantize: str | None = None
    dense: dict[str, list[int]] = field(default_factory=dict)
    plain: list[str] = field(default_factory=list)
    head: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def bits(self) -> int:
        """Of a packed weight."""
        return int((self.quantize or "int0").removeprefix("int"))


def export_settings(config: object) -> ExportSettings | None:
    """Those of a transformers configuration, None for a model that is no export. Raises ValueError for
    an export of another layout, which this code would misread."""
    found = (getattr(config, "blr", None) or {}).get("export")
    if found is None:
        return None
    if found.get("layout") != LAYOUT:
        raise ValueError(
            f"config.blr.export.layout is {found.get('layout')!r}: this code reads layout {LAYOUT}; "
            "export the checkpoint again with this version of blr, or take the version that wrote it"
        )
    known = {field.name for field in fields(ExportSettings)}
    return ExportSettings(**{key: value for key, value in found.items() if key in known})


def caches_ranks(config: object) -> str | None:
    """What ``config.blr["kv_cache"]`` says of the cache of keys and values: a name of `KV_CACHES`, the
    first in the model's dtype; None for whole ones."""
    found = (getattr(config, "blr", None) or {}).get("kv_cache")
    if found not in (None, *KV_CACHES):
        raise ValueError(f"config.blr.kv_cache is {found!r}: expected one of {', '.join(KV_CACHES)}")
    return found if found is None else str(found)


def warn_once(message: str) -> None:
    """Log a warning, once a process."""
    if message not in _said:
        _said.add(message)
        logging.getLogger("blr").warning("blr: %s", message)
