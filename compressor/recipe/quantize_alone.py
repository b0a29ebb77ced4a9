"""Which settings ask for dense weights in few bits: those that name bits, and nothing of structure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

NONE = "none"  # takes a setting back
# What says which structure layers get, or of what size
STRUCTURED = frozenset(
    {"method", "cf", "rank", "blocks", "pattern", "pivot", "heads", "solver", "rounds", "base", "bpw"}
    | {"couplings", "allocation", "tokens_per_second"}
)


def stores_alone(data: Mapping[str, Any]) -> bool:
    """Whether the settings of a recipe name `quantize`, and neither a structure nor a size; nor do its
    rules, beside the methods of their own."""
    rules = data.get("rules")
    shaped = isinstance(rules, list) and any(_says(rule, STRUCTURED - {"method"}) for rule in rules)
    return _says(data, ("quantize",)) and not _says(data, STRUCTURED) and not shaped


def _says(settings: object, names: Collection[str]) -> bool:
    return isinstance(settings, Mapping) and any(settings.get(n) not in (None, NONE) for n in names)
