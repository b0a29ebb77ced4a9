"""What transformers makes of masks in passes that must not wait.

It asks masks for their values (is there padding, are there several sequences in a row), since attention
without a mask takes a faster kernel. While a CUDA graph is captured nothing can be asked, and a whole
mask is made.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import masking_utils

_lock = threading.Lock()


@dataclass
class _Answered:
    """A function of transformers that some threads get an answer of without asking."""

    native: Any
    threads: list[int] = field(default_factory=list)  # once for each that is inside


_answered: dict[str, _Answered] = {}


@contextmanager
def unpacked() -> Iterator[None]:
    """While active, this thread's passes are not searched for several sequences in a row of tokens."""
    with _answering("find_packed_sequence_indices", None):
        yield


@contextmanager
def unmasked() -> Iterator[None]:
    """While active, passes of this thread that are given no mask make none, captured or not."""
    with unpacked(), _answering("is_tracing", False):
        yield


def is_full(mask: Any) -> bool:
    """Whether it is a mask [B, T] of padding that hides nothing. Waits for the GPU."""
    whole = isinstance(mask, Tensor) and mask.dim() == 2 and not mask.is_floating_point()
    return whole and bool(mask.all())


@contextmanager
def _answering(name: str, answer: object) -> Iterator[None]:
    """`answer` in this thread, where this release of transformers has the function."""
    if not hasattr(masking_utils, name):
        yield
        return
    me = threading.get_ident()
    with _lock:
        if name not in _answered:
            _answered[name] = found = _Answered(getattr(masking_utils, name))
            setattr(masking_utils, name, _function(found, answer))
        _answered[name].threads.append(me)
    try:
        yield
    finally:
        with _lock:
            _answered[name].threads.remove(me)
            if not _answered[name].threads:
                setattr(masking_utils, name, _answered.pop(name).native)


def _function(answered: _Answered, answer: object) -> object:
    def function(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() in answered.threads:
            return answer
        return answered.native(*args, **kwargs)

    return function
