"""Timing of several arms in one run: interleaved samples, cold L2, medians with quartiles.

On a GPU a sample is a run of one arm's calls between two events. Calls rotate through copies of
inputs and weights that together exceed four times the L2, and are captured in a CUDA graph where
that works, so that launch overhead of Python counts for no arm. Before each sample a buffer of
twice the L2 is overwritten: the arm before leaves nothing behind, and the queue is never empty.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from math import ceil
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor

COLD = 4  # times the L2 that rotating copies take together
MAX_COPIES = 256
SAMPLE_MS = 1.0  # a sample repeats its calls until it takes about this long
MIN_ROUNDS = 3  # rounds that even the slowest arm gets
ARM_SECONDS = 0.3  # an arm that has spent this gets no round above MIN_ROUNDS

Key = TypeVar("Key")
Step = Callable[[], Any]
Call = Callable[..., Tensor]
Sampler = Callable[[], float]  # runs an arm once more, and gives milliseconds


@dataclass(frozen=True)
class Spread:
    """Median, first and third quartile of the samples of one arm, in milliseconds."""

    ms: float
    low: float
    high: float
    rounds: int


def spread(samples: Sequence[float]) -> Spread:
    """The spread of at least one sample."""
    if len(samples) == 1:
        return Spread(samples[0], samples[0], samples[0], 1)
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Spread(middle, low, high, len(samples))


def settle(device: torch.device) -> None:
    """Wait for what was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_ms(run: Step, device: torch.device) -> float:
    """Milliseconds of one call by the host's clock, until the device is done."""
    settle(device)
    begun = perf_counter()
    run()
    settle(device)
    return (perf_counter() - begun) * 1e3


def event_ms(run: Step) -> float:
    """Milliseconds of one call on a GPU, between two events."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def interleave(
    samplers: Mapping[Key, Sampler],
    rounds: int,
    failed: Callable[[Key, Exception], None],
    arm_seconds: float = ARM_SECONDS,
    clock: Callable[[], float] = perf_counter,
    times: dict[Key, list[float]] | None = None,
) -> dict[Key, list[float]]:
    """Milliseconds a call of every arm in `rounds` rounds, in which each is sampled once, in turn. One
    that has spent `arm_seconds` stops after MIN_ROUNDS; one that raises is given up, and `failed` is
    called with its name and what it raised. times: takes the samples as they come."""
    times = {} if times is None else times
    times.update({name: [] for name in samplers})
    spent = dict.fromkeys(samplers, 0.0)
    for turn in range(rounds):
        for name in list(times):
            if turn >= MIN_ROUNDS and spent[name] > arm_seconds:
                continue
            started = clock()
            try:
                times[name].append(samplers[name]())
            except Exception as error:
                del times[name]
                failed(name, error)
            spent[name] += clock() - started
    return times


@dataclass
class Rotation:
    """Copies of one arm's arguments, the input first, through which its calls rotate: with the same
    strides, more than an L2 of `l2` bytes holds, made on first use."""

    arguments: tuple[Tensor, ...]
    l2: int
    copies: list[tuple[Tensor, ...]] = field(default_factory=list)

    def all(self) -> list[tuple[Tensor, ...]]:
        """Every set of arguments, the given one first."""
        if not self.copies:
            more = copies_for(sum(map(tensor_bytes, self.arguments)), self.l2) - 1
            clones = [tuple(t.clone() for t in self.arguments) for _ in range(more)]
            self.copies = [self.arguments, *clones]
        return self.copies


def copies_for(size: int, l2: int) -> int:
    """How many copies of `size` bytes exceed `COLD` times an L2 of `l2` bytes, at most MAX_COPIES."""
    return min(max(ceil(COLD * l2 / max(size, 1)), 1), MAX_COPIES)


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of the values of a dense or block-sparse tensor."""
    values = tensor.values() if tensor.layout is torch.sparse_bsr else tensor
    return values.numel() * values.element_size()


class CpuSampler:
    """Calls timed by the host's clock, through all copies of their arguments."""

    def __init__(self, call: Call, rotation: Rotation) -> None:
        sets = rotation.all()
        self.calls = len(sets)
        self.step: Step = lambda: _loop(call, sets)
        self.settle()

    def settle(self) -> None:
        """Choose how many steps a sample has."""
        ms = self._time(1)
        self.steps = ceil(SAMPLE_MS / max(ms, 1e-6)) if ms < SAMPLE_MS else 1

    def sample(self) -> float:
        """Milliseconds of one call."""
        return self._time(self.steps) / (self.steps * self.calls)

    def _run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def _time(self, steps: int) -> float:
        started = perf_counter()
        self._run(steps)
        return (perf_counter() - started) * 1e3


class CudaSampler(CpuSampler):
    """Calls timed by device events.

    Args:
        call: f(*arguments), warmed up.
        rotation: its arguments.
        flush: a buffer of twice the L2.
        pool: memory that the graphs of a run share; None times a plain loop of calls.

    After construction `output` is what the last captured call wrote, None without a graph. It must
    be released before another graph is captured from the same pool.
    """

    def __init__(self, call: Call, rotation: Rotation, flush: Tensor, pool: object = None) -> None:
        self.call, self.rotation, self.flush, self.pool = call, rotation, flush, pool
        self.output: Any = None
        super().__init__(call, rotation)

    def settle(self) -> None:
        if self.pool is not None:
            self.graph, warm = torch.cuda.CUDAGraph(), lambda: self.call(*self.rotation.arguments)
            self.output = _capture(self.graph, self.pool, self.step, warm)
            self.step = self.graph.replay
        self._time(1)
        super().settle()

    def _time(self, steps: int) -> float:
        self.flush.zero_()
        return event_ms(lambda: self._run(steps))


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """One for all captures: memory of a pool is used again only on the stream it was made on."""
    return torch.cuda.Stream(device)


def _capture(graph: torch.cuda.CUDAGraph, pool: Any, step: Step, warm: Step) -> Any:
    """What `step` returns while `graph` records it, after `warm` has run on the same stream. Unlike
    `torch.cuda.graph` this collects no garbage and empties no cache, which would take longer than
    the measurement."""
    stream = _capture_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.stream(stream):
            warm()
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                output = step()
            except BaseException:
                with suppress(Exception):  # the capture is lost; what broke it is the news
                    graph.capture_end()
                raise
            graph.capture_end()
    finally:
        if collecting:
            gc.enable()
    torch.cuda.current_stream().wait_stream(stream)
    return output


def _loop(call: Call, sets: list[tuple[Tensor, ...]]) -> Tensor | None:
    output = None
    for arguments in sets:
        output = None  # the memory of one output serves the next
        output = call(*arguments)
    return output
