"""Variants that are nothing but kernels of ours, done again without the Python that led to them.

What a call allocated and launched (by `launching`) is written down once; a call of the same shapes
then allocates the same, and hands the compiled kernels with the new addresses to the driver. Whatever
is not as it was (strides, devices, alignment, profilers), and other releases of Triton than `RAN`,
goes the usual way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from itertools import accumulate
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from blr.kernels.common.launching import Grid, Launched, noting
from blr.kernels.common.placing import is_elsewhere, on_gpu

if TYPE_CHECKING:
    from triton import JITFunction
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.compiler import CompiledKernel
    from triton.tools.tensor_descriptor import TensorDescriptor

RAN = ("3.6",)  # releases of Triton whose launchers were called so on a GPU (scripts/log)
ALIGNED = 15  # bits of an address that Triton specializes kernels by
LINE = 512  # bytes, at whose multiples torch's allocator begins
Result = TypeVar("Result")
Place = tuple[int, int, int]  # argument or field, tensor, bytes behind that one's start


class Described:
    """A descriptor as launchers read it: an address, and what was said of it at the first call, where
    Triton checked it. block_shape and padding: as of Triton's."""

    __slots__ = ("address", "block_shape", "padding", "shape", "strides")

    def __init__(self, address: int, like: TensorDescriptor) -> None:
        self.address = address
        self.shape, self.strides = like.shape, like.strides
        self.block_shape, self.padding = like.block_shape, like.padding

    @property
    def base(self) -> Described:
        """What is asked for its address."""
        return self

    def data_ptr(self) -> int:
        """The address."""
        return self.address


@dataclass
class Launch:
    """A compiled kernel, its grid and its arguments in order; `places` of them are addresses, as are
    those `inside` of arguments that are tuples; those `described` are descriptors."""

    launcher: Callable[..., object]
    head: tuple[object, ...]  # of the launcher's arguments, those before the stream
    function: tuple[object, ...]  # those behind it
    arguments: list[object]
    places: list[Place]
    inside: list[tuple[int, list[object], list[Place]]]
    described: list[tuple[Place, Described]]

    def __call__(self, stream: int, addresses: Sequence[int]) -> None:
        arguments = self.arguments.copy()
        for at, tensor, offset in self.places:
            arguments[at] = addresses[tensor] + offset
        for (at, tensor, offset), like in self.described:
            arguments[at] = Described(addresses[tensor] + offset, like)
        for at, fields, places in self.inside:
            held = fields.copy()
            for field_at, tensor, offset in places:
                held[field_at] = addresses[tensor] + offset
            arguments[at] = tuple(held)
        self.launcher(*self.head, stream, *self.function, *arguments)


@dataclass
class Replay:
    """What one call allocated and launched: `made` are shape, dtype and device of the allocations, all
    on one device. `results`: which of the arguments and, behind them, the allocations it gave, in a
    tuple if `several`. strides: of the input, None of one without gaps, in whatever shape. layouts:
    of the arguments behind it.

    Allocations that are no results share one: each allocation costs as much as a launch.
    """

    strides: tuple[int, ...] | None
    layouts: tuple[object, ...]
    made: list[tuple[tuple[int, ...], torch.dtype, torch.device]]
    results: list[int]
    several: bool
    launches: list[Launch]
    device: int
    kept: list[int] = field(init=False)  # allocations that are results
    offsets: list[int] = field(init=False)  # of the others, in the one that they share
    size: int = field(init=False)  # of that one, in bytes
    order: list[int] = field(init=False)  # where every allocation is among those kept and the others

    def __post_init__(self) -> None:
        first, numbers = 1 + len(self.layouts), range(len(self.made))
        self.kept = [n for n in numbers if n + first in self.results]
        others = [n for n in numbers if n not in self.kept]
        self.order = [[*self.kept, *others].index(n) for n in numbers]
        sizes = [math.prod(self.made[n][0]) * self.made[n][1].itemsize for n in others]
        *self.offsets, self.size = accumulate((-(-size // LINE) * LINE for size in sizes), initial=0)

    def __call__(self, x: Tensor, *rest: Tensor | None) -> Any:
        """The same with other tensors of the same shapes; None where it is to be done the usual way."""
        given = (x, *rest)
        addresses = [0 if t is None else t.data_ptr() for t in given]
        bits = 0
        for address in addresses:
            bits |= address
        same = x.is_contiguous() if self.strides is None else x.stride() == self.strides
        if bits & ALIGNED or not same or _layouts(rest) != self.layouts:
            return None
        if torch._C._cuda_getDevice() != self.device or _is_profiled():
            return None
        made = [_empty(*self.made[n]) for n in self.kept]
        places = [t.data_ptr() for t in made]
        if self.size:
            shared = _empty(self.size, torch.uint8, x.device)  # held until all is launched
            start = shared.data_ptr()
            places += [start + offset for offset in self.offsets]
        addresses += [places[n] for n in self.order]
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        for launch in self.launches:
            launch(stream, addresses)
        first = len(given)
        found = [given[n] if n < first else made[self.order[n - first]] for n in self.results]
        return tuple(found) if self.several else found[0]


@dataclass
class Launches(Generic[Result]):
    """``run(x, *rest)`` of launches only, by a `Replay` from the second call on: a tensor, or a tuple of
    tensors. One object a shape of all arguments."""

    run: Callable[..., Result]
    known: Replay | None = None
    tries: int = 2

    def __call__(self, x: Tensor, *rest: Tensor | None) -> Result:
        """What `run` gives."""
        if is_elsewhere(x):
            with on_gpu(x.device):
                return self(x, *rest)
        again: Result | None = None if self.known is None else self.known(x, *rest)
        if again is not None:
            return again
        if self.tries <= 0:
            return self.run(x, *rest)
        self.tries -= 1
        found, self.known = recorded(self.run, x, *rest)
        return found


class Again:
    """Runs the stage of a variant that is launches only, by a `Replay` from its second call on. One
    object a shape of all arguments and a stage."""

    def __init__(self) -> None:
        self.launches: Launches[Tensor] | None = None

    def __call__(self, stage: Callable[..., Tensor], x: Tensor, *rest: Tensor | None) -> Tensor:
        """``stage(x, *rest)``."""
        self.launches = self.launches or Launches(stage)
        return self.launches(x, *rest)


def at_once(stage: Callable[..., Tensor], x: Tensor, *rest: Tensor | None) -> Tensor:
    """The same without a replay."""
    return stage(x, *rest)


def recorded(
    run: Callable[..., Result], x: Tensor, *rest: Tensor | None
) -> tuple[Result, Replay | None]:
    """``run(x, *rest)``, a tensor or a tuple of tensors, and how to do it again, None if it is not
    launches alone.

    run: launches kernels by `launching` and in no other way.
    """
    with noting() as seen, _Allocations() as memory:
        y = run(x, *rest)
    try:
        return y, _replay((x, *rest), y, seen, memory)
    except (LookupError, TypeError, AttributeError, ValueError):
        return y, None  # what a kernel was given is more than numbers and parts of these tensors


class _Allocations(TorchDispatchMode):
    """Lists uninitialized tensors that are made; `foreign` tells of anything but those and views."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []
        self.foreign = False

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format:
            self.made.append(out)
        elif not any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns):
            self.foreign = True
        return out


def _replay(
    given: Sequence[Tensor | None], y: object, seen: Sequence[Launched], memory: _Allocations
) -> Replay | None:
    x, *rest = given
    assert x is not None
    tensors = (*given, *memory.made)
    parts = y if isinstance(y, tuple) else (y,)
    results = [_number(given, memory.made, part) for part in parts]
    if memory.foreign or not seen or min(results) < 0 or not _is_known() or _is_profiled():
        return None
    if torch._C._cuda_getDevice() != x.device.index or any(t.device != x.device for t in memory.made):
        return None
    if any(t.data_ptr() & ALIGNED for t in tensors if t is not None):
        return None
    spans = [(0, 0) if t is None else (t.data_ptr(), _bytes(t)) for t in tensors]
    launches = [_launch(spans, *launch) for launch in seen]
    shapes = [tuple(t.shape) for t in memory.made]
    for number, tensor in zip(results, parts, strict=True):
        if number >= len(given):
            shapes[number - len(given)] = tuple(tensor.shape)
    made = [(shape, t.dtype, t.device) for shape, t in zip(shapes, memory.made, strict=True)]
    strides = None if x.is_contiguous() else x.stride()
    several = isinstance(y, tuple)
    return Replay(strides, _layouts(rest), made, results, several, launches, x.device.index)


def _empty(size: int | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=dtype, device=device)


def _number(given: Sequence[Tensor | None], made: Sequence[Tensor], y: Tensor) -> int:
    """Which argument or, all of it and in its order, which allocation `y` is; -1 if none."""
    same = [tensor is y for tensor in given]
    same += [(t.data_ptr(), t.numel()) == (y.data_ptr(), y.numel()) and y.is_contiguous() for t in made]
    return same.index(True) if True in same else -1


def _launch(
    spans: Sequence[tuple[int, int]],
    kernel: JITFunction,
    compiled: CompiledKernel,
    grid: Grid,
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> Launch:
    named = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
    arguments = [named[name] for name in kernel.arg_names]
    inside, described = [], []
    for at, value in enumerate(arguments):
        if hasattr(value, "block_shape"):
            described.append(((at, *_within(spans, value.base.data_ptr())), Described(0, value)))
            arguments[at] = None
        elif isinstance(value, tuple):
            fields: list[object] = list(value)
            if found := _addresses(spans, fields):
                inside.append((at, fields, found))
                arguments[at] = None  # or what was given would live as long as this
    places = _addresses(spans, arguments)
    head = (*grid, *(1,) * (3 - len(grid)))
    launcher, flags = _driver(compiled.run)
    function = (compiled.function, *flags, compiled.packed_metadata, None, None, None)
    return Launch(launcher, head, function, arguments, places, inside, described)


def _driver(launcher: CudaLauncher) -> tuple[Callable[..., object], tuple[object, ...]]:
    """What hands a kernel to the driver, and what it takes behind the function: of a kernel without
    scratch memory the launch inside Triton's, which asks for that memory first."""
    scratch = [getattr(launcher, f"{kind}_scratch_size", None) for kind in ("global", "profile")]
    if any(size != 0 for size in scratch):
        return launcher, ()
    return launcher.launch, (launcher.launch_cooperative_grid, launcher.launch_pdl, None, None)


def _addresses(spans: Sequence[tuple[int, int]], values: list[object]) -> list[Place]:
    """Where tensors are among `values`, whose places are zeros then."""
    places = []
    for at, value in enumerate(values):
        if isinstance(value, Tensor):
            places.append((at, *_within(spans, value.data_ptr())))
            values[at] = 0
        elif _holds_addresses(value):
            raise TypeError("addresses further inside, or in a descriptor")
    return places


def _holds_addresses(value: object) -> bool:
    if isinstance(value, tuple):
        return any(map(_holds_addresses, value))
    return isinstance(value, Tensor) or hasattr(value, "base")


def _within(spans: Sequence[tuple[int, int]], address: int) -> tuple[int, int]:
    """The tensor that an address is in, and how far. Raises LookupError where there is not just one."""
    found = [n for n, (start, size) in enumerate(spans) if start <= address < start + size]
    if len(found) != 1:
        raise LookupError
    return found[0], address - spans[found[0]][0]


def _bytes(tensor: Tensor) -> int:
    """From its first element to behind its last."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


def _layouts(tensors: Sequence[Tensor | None]) -> tuple[object, ...]:
    """Strides and devices, None of an absent one."""
    return tuple([None if t is None else (t.stride(), t.get_device()) for t in tensors])


@cache
def _is_known() -> bool:
    return ".".join(_triton().__version__.split(".")[:2]) in RAN


def _is_profiled() -> bool:
    """Whether somebody listens to launches."""
    hook = _triton().knobs.runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook))


@cache
def _triton() -> ModuleType:
    return import_module("triton")
