"""Makes Triton's interpreter faster by what it does in vain.

The functions of its language are replaced once a launch: it does so again whenever one function of a
kernel calls another, looking through the whole language, which is half of its time where kernels are
made of small functions. Whether integers overflow is left out: it works that out at every sum and
product of them, and tells nobody unless it is debugged. What NumPy calls a dtype is looked up once, and
a type of blocks, its sizes and the type that two others are computed in are made once a launch, where
it makes them anew, and checks them, for each operand of every operation.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
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
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    if not hasattr(TritonSemantic, "_cast_to_computation_type"):
        return  # an older release, whose interpreter stays as it is

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    replaced: set[frozenset[int]] = set()
    forget = make_types_once()

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
            forget()

    dtypes: dict[str, Any] = {}
    look_up = interpreter._get_np_dtype

    def numpy_dtype(dtype: Any) -> Any:
        if dtype.name not in dtypes:
            dtypes[dtype.name] = look_up(dtype)
        return dtypes[dtype.name]

    def call(member: Any) -> Any:
        inner = getattr(member, "__wrapped__", member)  # without a look at its arguments

        def called(*arguments: Any, **options: Any) -> Any:
            options["_semantic"] = interpreter.interpreter_semantic
            return inner(*arguments, **options)

        return called

    @cache
    def calls(package: Any) -> dict[str, Any]:
        members = inspect.getmembers(package, tl.core.is_builtin)
        return {name: call(member) for name, member in members}

    def replace_all(package: Any, _: Any, scope: Any) -> None:
        for name, called in calls(package).items():
            scope.set_attr(package, name, called)

    interpreter._patch_lang = replace_first
    interpreter._patch_builtin = replace_all
    interpreter.GridExecutor.__call__ = launch_anew
    interpreter._get_np_dtype = numpy_dtype
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def make_types_once() -> Callable[[], None]:
    """Types of blocks, their sizes, and the types that operands of two are computed in; what is returned
    forgets them, and with them the types that they are made of."""
    import triton.language.core as tl
    from triton.language.semantic import TritonSemantic

    block_type, tensor, constexpr = tl.block_type, tl.tensor, tl.constexpr
    made, computed, unwrap = dict[Any, Any](), dict[Any, Any](), tl._unwrap_if_constexpr
    make, compute = block_type.__init__, TritonSemantic.computation_type_impl
    cast, share = TritonSemantic._cast_to_computation_type, TritonSemantic.broadcast_impl_value
    plain = {tensor, int, float, bool, str, type(None), block_type, tl.dtype, tl.pointer_type}

    def unwrapped(value: Any) -> Any:
        if type(value) is constexpr:
            return value.value
        return value if type(value) in plain else unwrap(value)

    def block(kind: Any, element: Any, shape: Any) -> Any:
        key = (id(element), *map(unwrapped, shape))
        if key not in made:
            new = object.__new__(kind)
            make(new, element, shape)
            new.sizes = tl.tuple([constexpr(size) for size in new.shape]), constexpr(new.numel)
            made[key] = new
        return made[key]

    def hold(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = kind.sizes

    def type_for(self: Any, a: Any, a_scalar: bool, b: Any, b_scalar: bool, divided: bool) -> Any:
        key = (a.name, a_scalar, b.name, b_scalar, divided)
        if key not in computed:
            computed[key] = compute(self, a, a_scalar, b, b_scalar, divided)
        return computed[key]

    def same(self: Any, value: Any, dtype: Any) -> Any:
        return value if type(value) is tensor and value.dtype is dtype else cast(self, value, dtype)

    def shaped(self: Any, a: Any, b: Any) -> Any:
        return (a, b) if a.shape is b.shape else share(self, a, b)

    tl.dtype.sizes = tl.tuple([]), constexpr(1)
    block_type.__new__, block_type.__init__ = block, lambda *_: None
    block_type.to_ir = lambda self, builder: self
    tensor.__init__, tl._unwrap_if_constexpr = hold, unwrapped
    TritonSemantic.computation_type_impl, TritonSemantic.broadcast_impl_value = type_for, shaped
    TritonSemantic._cast_to_computation_type = same
    return made.clear
