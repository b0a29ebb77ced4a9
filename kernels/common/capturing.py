"""CUDA graphs are captured, on any GPU, whatever becomes of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


@contextmanager
def capturing(graph: Any, **options: Any) -> Iterator[None]:
    """`torch.cuda.graph` on the current GPU's stream for it: torch's own is of the GPU that was captured
    on first, and on another a graph would be empty. Where it fails, torch's generator is left waiting
    for it, and every random number drawn on the GPU from then on would be an error: it goes on from its
    state before."""
    device = torch.cuda.current_device()
    generator = torch.cuda.default_generators[device]
    before = generator.clone_state()
    try:
        with torch.cuda.graph(graph, stream=_capture_stream(device), **options):
            yield
    except BaseException:
        generator.graphsafe_set_state(before)
        raise


@cache
def _capture_stream(device: int) -> Any:
    """One for all captures: graphs that share a pool share memory of the same stream alone."""
    return torch.cuda.Stream(device)
