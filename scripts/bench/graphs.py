"""CUDA graphs of what the scripts beside this file time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def captured(*runs: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A graph of `runs` in turn. Two of them have run once before, on a stream of their own, so that
    what they compile and allocate once is there."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for run in runs[:2]:
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    return graph
