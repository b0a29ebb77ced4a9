"""The measured tables that kernels are chosen by: rules from whoever reads tables, and nobody at first.

`blr.compressor` reads the user's of `blr tune` and those shipped in configs/tuned/, and says so here
when it is imported. A checkpoint's copy of the kernels has the shipped tables as a Python file in the
place of this one (`compressor/loading/vendor.py` writes it), with the same function.
"""

from __future__ import annotations

from functools import cache

TYPE_CHECKING = False  # not from typing: the first import of all (`compressor/__init__.py`)
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Rules = list[dict[str, Any]]

_READERS: list[Callable[[str], Rules]] = []


def read_rules_with(reader: Callable[[str], Rules]) -> None:
    """Let `reader` give the rules for a GPU by its key, [] if nobody measured it."""
    _READERS[:] = [reader]
    tuned_rules.cache_clear()


@cache
def tuned_rules(gpu: str) -> Rules:
    """Rules for a GPU by its key, the first that holds counts."""
    return [rule for reader in _READERS for rule in reader(gpu)]
