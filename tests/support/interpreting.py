"""Makes Triton's interpreter faster: the functions of its language are replaced once a launch.

It does so again whenever one function of a kernel calls another, looking through the whole language,
which is half of its time where kernels are made of small functions.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import Any


def replace_once() -> None:
    """Change the interpreter of this process, if kernels are interpreted in it. What it replaced is the
    same for all functions that see the same modules of the language."""
    if os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    replace, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    replaced: set[frozenset[int]] = set()

    @cache
    def seen(fn: Any) -> frozenset[int]:
        return frozenset(map(id, fn.__globals__.values())) & {id(tl), id(tl.core)}

    def replace_first(fn: Any) -> Any:
        if seen(fn) in replaced:
            return None
        replaced.add(seen(fn))
        return replace(fn)

    def launch_anew(self: Any, *arguments: Any, **options: Any) -> None:
        replaced.clear()
        try:
            launch(self, *arguments, **options)
        finally:
            replaced.clear()

    interpreter._patch_lang = replace_first
    interpreter.GridExecutor.__call__ = launch_anew
