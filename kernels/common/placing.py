"""The GPU that kernels are launched on. torch's own operators run where their tensors are; Triton
launches on the current GPU, and there on its stream, which waits for nothing that another one computes:
a model on the second GPU, or over several (`device_map`), would read what is not written yet.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor

HERE: AbstractContextManager[object] = nullcontext()


@cache
def has_several_gpus() -> bool:
    """Whether the current GPU may be another one than a tensor's."""
    return torch.cuda.is_available() and torch.cuda.device_count() > 1


def on_gpu(device: torch.device) -> AbstractContextManager[object]:
    """Makes `device` the current one inside, if it is a GPU and another one is."""
    if device.type != "cuda" or not has_several_gpus() or device.index == torch.cuda.current_device():
        return HERE
    return torch.cuda.device(device)


def is_elsewhere(x: Tensor) -> bool:
    """Whether `x` is on a GPU that is not the current one."""
    return has_several_gpus() and x.is_cuda and x.get_device() != torch.cuda.current_device()


def on_gpu_of(arguments: Iterable[object]) -> AbstractContextManager[object]:
    """The same of the first tensor among the arguments of a kernel: tensors, descriptors, tuples."""
    found = _first(arguments) if has_several_gpus() else None
    return HERE if found is None else on_gpu(found.device)


def _first(arguments: Iterable[object]) -> Tensor | None:
    for argument in arguments:
        inside = argument if isinstance(argument, tuple) else (getattr(argument, "base", argument),)
        for value in inside:
            if isinstance(value, Tensor):
                return value
    return None
