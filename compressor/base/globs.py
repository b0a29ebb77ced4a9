"""Shell globs over module names: short, and translated once, unlike those of `fnmatch`."""

import re
from collections.abc import Iterable
from fnmatch import translate
from functools import lru_cache

MAX_GLOB = 512  # characters; module names of real models have 100
MAX_GLOBS = 256  # of one list of a recipe


def matches(name: str, glob: str) -> bool:
    """Whether the whole of `name` matches `glob`, case counting; `*` spans dots. Raises ValueError for
    a glob of over `MAX_GLOB` characters."""
    return _compiled(glob).match(name) is not None


def matches_any(name: str, globs: Iterable[str]) -> bool:
    """Whether `name` matches one of `globs`."""
    return any(matches(name, glob) for glob in globs)


@lru_cache(maxsize=8 * MAX_GLOBS)
def _compiled(glob: str) -> re.Pattern[str]:
    if len(glob) > MAX_GLOB:
        raise ValueError(f"a glob of {len(glob)} characters, expected at most {MAX_GLOB}")
    return re.compile(translate(glob))
