"""Times the phases of a token."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from blr.compressor.runtime.failures import ContextError
from blr.compressor.runtime.memory import bucket_of


def measure(decoder: Any, steps: int) -> list[tuple[str, float, int]]:
    """See `Decoder.profile`."""
    groups: dict[str, list[Any]] = defaultdict(list)
    for phase in decoder.plan.phases:
        groups[re.sub(r"^layer\.\d+\.", "layer.*.", phase.name)].append(phase)
    groups["token"] = decoder.plan.phases
    room = decoder.context - decoder.position - 2  # a whole token moves on by one slot each time
    if room < 1:
        raise ContextError("profile: the cache is full; expected room for two tokens at least")
    steps = min(steps, room)
    shape = decoder.rows, bucket_of(decoder.position + steps + 2)
    binder = decoder.binder(*shape)
    kept = [t.clone() for t in (decoder.state.tokens, decoder.state.pos)]
    measured = []
    for name, phases in groups.items():
        whole = name == "token"
        count = 1 if whole else len(phases)
        run = decoder.token(*shape) if whole else decoder.capture(binder.bind_all(phases))
        seconds = average(run, steps, kept[0].device)
        size = sum(decoder.bytes_of(phase) for phase in phases) // count
        measured.append((name, seconds * 1e6 / count, size))
        for tensor, value in zip((decoder.state.tokens, decoder.state.pos), kept, strict=True):
            tensor.copy_(value)
    return measured


def average(run: Callable[[], Any], steps: int, device: torch.device) -> float:
    """Seconds that a call of `run` takes on `device`, one uncounted call before."""
    run()
    if device.type != "cuda":
        begun = perf_counter()
        for _ in range(steps):
            run()
        return (perf_counter() - begun) / steps
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(steps):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / steps
