"""What this release of transformers calls a cache of keys and values: `cache` since 5.24, before that
`past_key_values`.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

NAMES = ("cache", "past_key_values")


def cache_name(model: Any) -> str:
    """The argument of `model`, called, that takes a cache."""
    taken = signature(model.forward).parameters
    return next((name for name in NAMES if name in taken), NAMES[-1])
