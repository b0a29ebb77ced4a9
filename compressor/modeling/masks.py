"""Keeps transformers from asking for the values of masks in passes that must not wait for the GPU. It
asks whether there is padding, and whether a row holds several sequences, for a faster kernel of
attention. While a CUDA graph is captured it cannot ask and makes a whole mask."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import masking_utils

_lock = threading.Lock()


@dataclass
class _Answered:
    """A function of transformers that gives some threads an answer without looking."""

    native: Callable[..., object]
    answer: object
    threads: list[int] = field(default_factory=list)  # once for each that is inside

    def __call__(self, *args: object, **kwargs: object) -> object:
        asked = threading.get_ident() not in self.threads
        return self.native(*args, **kwargs) if asked else self.answer


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
        found: Any = getattr(masking_utils, name)
        if not isinstance(found, _Answered):
            found = _Answered(found, answer)
            setattr(masking_utils, name, found)
        found.threads.append(me)
    try:
        yield
    finally:
        with _lock:
            found.threads.remove(me)
            if not found.threads:
                setattr(masking_utils, name, found.native)
