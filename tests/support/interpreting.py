"""Makes Triton's interpreter faster by what it does in vain.

The functions of its language are replaced once a launch: it does so again whenever one function of a
kernel calls another, looking through the whole language, which is half of its time where kernels are
made of small functions. Whether integers overflow is left out: it works that out at every sum and
product of them, and tells nobody unless it is debugged. What NumPy calls a dtype is looked up once.
"""

from __future__ import annotations

import os
from dataclasses import replace
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

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    replaced: set[frozenset[int]] = set()

    @cache
    def seen(fn: Any) -> frozenset[int]:
        return frozenset(map(id, fn.__globals__.values())) & {id(tl), id(tl.core)}

    def replace_first(fn: Any) -> Any:
        if seen(fn) in replaced:
            return None
        replaced.add(seen(fn))
        return patch(fn)

    def launch_anew(self: Any, *arguments: Any, **options: Any) -> None:
        replaced.clear()
        try:
            launch(self, *arguments, **options)
        finally:
            replaced.clear()

    dtypes: dict[str, Any] = {}
    look_up = interpreter._get_np_dtype

    def numpy_dtype(dtype: Any) -> Any:
        if dtype.name not in dtypes:
            dtypes[dtype.name] = look_up(dtype)
        return dtypes[dtype.name]

    interpreter._patch_lang = replace_first
    interpreter.GridExecutor.__call__ = launch_anew
    interpreter._get_np_dtype = numpy_dtype
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
