"""Keeps transformers from asking for the values of masks in passes that must not wait for the GPU.

It asks whether there is padding, and whether a row holds several sequences, since attention without a
mask takes a faster kernel. While a CUDA graph is captured it cannot ask and makes a whole mask.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor
from transformers import masking_utils

_lock = threading.Lock()


@dataclass
class _Answered:
    """A function of transformers that answers some threads without looking."""

    native: Callable[..., object]
    threads: list[int] = field(default_factory=list)  # once for each that is inside


_answered: dict[str, _Answered] = {}


@contextmanager
def unpacked() -> Iterator[None]:
    """While active, transformers does not search this thread's passes for several sequences in a row."""
    with _answering("find_packed_sequence_indices", None):
        yield


@contextmanager
def unmasked() -> Iterator[None]:
    """While active, this thread's passes without a mask make none, captured or not."""
    with unpacked(), _answering("is_tracing", False):
        yield


def is_full(mask: object) -> bool:
    """Whether `mask` is one [B, T] of padding that hides nothing. Waits for the GPU."""
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.is_floating_point():
        return False
    return bool(mask.all())


@contextmanager
def _answering(name: str, answer: object) -> Iterator[None]:
    """While active, the function `name` of transformers returns `answer` in this thread."""
    if not hasattr(masking_utils, name):
        yield
        return
    me = threading.get_ident()
    with _lock:
        if name not in _answered:
            _answered[name] = found = _Answered(getattr(masking_utils, name))
            setattr(masking_utils, name, _replaced(found, answer))
        _answered[name].threads.append(me)
    try:
        yield
    finally:
        with _lock:
            _answered[name].threads.remove(me)
            if not _answered[name].threads:
                setattr(masking_utils, name, _answered.pop(name).native)


def _replaced(answered: _Answered, answer: object) -> Callable[..., object]:
    def function(*args: object, **kwargs: object) -> object:
        asked = threading.get_ident() not in answered.threads
        return answered.native(*args, **kwargs) if asked else answer

    return function
