"""How much memory a call takes beside what was there before: by the allocator of a GPU, on a CPU by
the tensors that torch makes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def transient_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """The most that was allocated at one time while `run` ran, above what was at its start."""
    if device.type != "cuda":
        with Tracker() as tracker:
            run()
        return tracker.peak
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


class Tracker(TorchDispatchMode):
    """Counts the bytes of storages that appear in results of torch's operators until they are freed.

    What an operator needs inside and gives back is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if _held(t)}
        for tensor in tree_leaves(result):
            if _held(tensor) and tensor.untyped_storage()._cdata not in given:
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: Any) -> None:
        key = storage._cdata
        if key in self.live:
            return
        self.live[key] = storage.nbytes()
        self.now += self.live[key]
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, key)

    def _remove(self, key: int) -> None:
        self.now -= self.live.pop(key, 0)


def _held(leaf: Any) -> bool:
    """Whether it is a tensor with memory."""
    return isinstance(leaf, Tensor) and not leaf.is_meta
