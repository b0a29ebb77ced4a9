"""The measured tables that kernels are chosen by: rules from whoever reads tables, and nobody at first.

`blr.compressor` reads the user's of `blr tune` and those shipped in configs/tuned/, and says so here
when it is imported. A checkpoint's copy of the kernels has the shipped tables as a Python file in the
place of this one (`compressor/loading/vendor.py` writes it), with the same functions but the first.
"""

from __future__ import annotations

TYPE_CHECKING = False  # not from typing: the first import of all (`compressor/__init__.py`)
if TYPE_CHECKING:
    from collections.abc import Callable

    Rules = list[dict[str, object]]

_READERS: list[Callable[[str], Rules]] = []
_READ: dict[str, Rules] = {}  # by GPU; functools would be another import


def read_rules_with(reader: Callable[[str], Rules]) -> None:
    """Let `reader` give the rules for a GPU by its key, [] if nobody measured it."""
    _READERS[:] = [reader]
    forget_rules()


def forget_rules() -> None:
    """Read them again when they are next asked for."""
    _READ.clear()


def tuned_rules(gpu: str) -> Rules:
    """Rules for a GPU by its key, the first that holds counts."""
    if gpu not in _READ:
        _READ[gpu] = [rule for reader in _READERS for rule in reader(gpu)]
    return _READ[gpu]
