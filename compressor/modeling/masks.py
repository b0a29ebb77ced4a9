"""What transformers makes of masks in passes that must not wait. Shipped inside every checkpoint.

It asks masks for their values (is there padding, are there several sequences in a row), since attention
without a mask takes a faster kernel. While a CUDA graph is captured nothing can be asked, and a whole
mask is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import masking_utils


@contextmanager
def unpacked() -> Iterator[None]:
    """While active, transformers does not look for several sequences in a row of tokens."""
    with _in_place_of("find_packed_sequence_indices", lambda position_ids: None):
        yield


@contextmanager
def without_padding() -> Iterator[None]:
    """While active, a pass that is given no mask of padding makes none for a capture either."""
    with _in_place_of("is_tracing", lambda *_: False):
        yield


def is_full(mask: Any) -> bool:
    """Whether it is a mask [B, T] of padding that hides nothing. Waits for the GPU."""
    whole = isinstance(mask, Tensor) and mask.dim() == 2 and not mask.is_floating_point()
    return whole and bool(mask.all())


@contextmanager
def _in_place_of(name: str, function: Callable[..., Any]) -> Iterator[None]:
    """`function` as one of transformers', where its release has it."""
    found = getattr(masking_utils, name, None)
    if found is None:
        yield
        return
    setattr(masking_utils, name, function)
    try:
        yield
    finally:
        setattr(masking_utils, name, found)
