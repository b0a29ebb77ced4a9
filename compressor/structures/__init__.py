"""The structured families: one module each with `fit` and `reconstruct`, and their registry."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

_MODULES = {"svd": "lowrank", "monarch": "monarch", "blast": "blast", "ks": "kronecker"}
STRUCTURES = tuple(_MODULES)


def family(structure: str) -> ModuleType:
    """The module that factorizes `structure`: it has ``fit`` and ``reconstruct`` (imports torch)."""
    return import_module(f"{__name__}.{_MODULES[structure]}")
