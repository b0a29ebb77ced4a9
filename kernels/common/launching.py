"""Launches Triton kernels past Triton's own look-up, which takes 30 to 60 µs with twenty arguments.

A tuple of what Triton specializes is looked up instead, and the compiled kernel called.
"""

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from blr.kernels.common.placing import on_gpu_of

_compiled: dict[Hashable, Any] = {}
_thread = threading.local()  # `noted`: where this thread's launches are noted, if they are


Grid = tuple[int, ...]
Options = Mapping[str, object]


class TritonKernel(Protocol):
    """A function of `triton.jit`."""

    def __getitem__(self, grid: Grid) -> Callable[..., object]: ...


# A kernel, what was compiled for the launch, the grid, arguments and options
Launched = tuple[TritonKernel, object, Grid, Sequence[object], Options]


def run_kernel(kernel: TritonKernel, grid: Grid, *arguments: object, **options: object) -> None:
    """``kernel[grid](*arguments, **options)``, noted while this thread is inside `noting`."""
    with on_gpu_of(arguments):
        made = kernel[grid](*arguments, **options)
    _note((kernel, made, grid, arguments, options))


def _note(launched: Launched) -> None:
    if (noted := getattr(_thread, "noted", None)) is not None:
        noted.append(launched)


@contextmanager
def noting() -> Iterator[list[Launched]]:
    """Lists launches of this thread by `run_kernel` or `launch`."""
    before = getattr(_thread, "noted", None)
    _thread.noted = found = list[Launched]()
    try:
        yield found
    finally:
        _thread.noted = before


def launch(
    kernel: TritonKernel, grid: Grid, arguments: Sequence[object], constants: Options, **options: object
) -> None:
    """``kernel[grid](*arguments, **constants, **options)``, noted as by `run_kernel`.

    Args:
        arguments: tensors, descriptors and numbers, in the order of the kernel. constants: those that
            it is compiled for, in its order, after all others.
    """
    with on_gpu_of(arguments):
        key = _key(kernel, arguments, constants, options)
        found = _compiled.get(key)
        if found is not None:
            found[(*grid, 1, 1)[:3]](*arguments, *constants.values())
        else:
            found = kernel[grid](*arguments, **constants, **options)
            if _callable(kernel, found, len(arguments), constants):
                _compiled[key] = found
    _note((kernel, found, grid, arguments, constants))


def _key(
    kernel: TritonKernel, arguments: Sequence[object], constants: Options, options: Options
) -> Hashable:
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1
    held = (*constants.values(), *options.items())
    return (id(kernel), device, *map(_kind, arguments), held)


def _kind(argument: Any) -> Hashable:
    """What Triton compiles anew for."""
    if isinstance(argument, int):
        return (argument == 1) + 2 * (argument % 16 == 0) + 4 * (abs(argument) >= 1 << 31)
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    block = getattr(argument, "block_shape", None)
    return float if block is None else (argument.base.dtype, *block)


def _callable(kernel: TritonKernel, made: object, given: int, constants: Options) -> bool:
    """Whether what a launch gave can be called with all arguments in the kernel's order."""
    names = getattr(kernel, "arg_names", ())
    return hasattr(made, "run") and list(names[given:]) == list(constants)
