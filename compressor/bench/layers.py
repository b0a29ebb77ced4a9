"""`blr bench layers`: the layers of published models, dense and in every structure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from blr.compressor.bench.float8 import float8_arms
from blr.compressor.bench.peers import Peer
from blr.compressor.bench.precision import Precision
from blr.compressor.bench.runner import Arm, Case, Runner
from blr.compressor.bench.shapes import Layer
from blr.compressor.bench.subjects import (
    Subject,
    dense_kernel,
    gaussian,
    our_call,
    our_layout,
    our_variant,
    random_factors,
    reference_of,
)
from blr.compressor.bench.timing import Call
from blr.compressor.planning.roofline import kernels
from blr.compressor.structures.specs import Spec

SEEDS = {"x": 0, "dense": 1, "structured": 2}
DRAWN = 32  # tokens whose products take a CPU as long as drawing the weights


@dataclass(frozen=True)
class LayerBench:
    """What is the same for all layers of a run.

    Attributes:
        compiled: numbers of tokens at which there are torch.compile arms.
    """

    precision: Precision
    runner: Runner
    peers: Sequence[Peer] = ()
    compiled: Sequence[int] = ()

    def case(self, layer: Layer, specs: Sequence[Spec], n: int) -> Case:
        """The dense arms of a layer for n tokens and those of every spec, timed together."""
        title = f"{layer.title} n={n}"
        dense = layer.in_features * layer.out_features
        numbers = dense + 2 * sum(spec.parameters for spec in specs)
        count, flops = 1 + 2 * len(specs), 2.0 * (n + DRAWN) * numbers
        arms = partial(self._arms, title, layer, specs, n)
        return Case(title, self.precision, lambda: list(arms()), count, flops)

    def _arms(self, title: str, layer: Layer, specs: Sequence[Spec], n: int) -> Iterator[Arm]:
        device = self.runner.device
        x = cache(lambda: gaussian((n, layer.in_features), 1, self.precision, device, SEEDS["x"]))
        yield from self._dense(self._subject(title, layer, None, n, x), n)
        for spec in specs:
            yield from self._structured(self._subject(title, layer, spec, n, x), spec, n)

    def _subject(
        self, title: str, layer: Layer, spec: Spec | None, n: int, x: Callable[[], Tensor]
    ) -> Subject:
        i, o, device = layer.in_features, layer.out_features, self.runner.device
        name = "dense" if spec is None else spec.structure
        fields = {
            **{"case": title, "model": layer.model, "layer": layer.name, "structure": name},
            **{"spec": "" if spec is None else spec.describe(), "in_features": i, "out_features": o},
            **{"n": n, "dtype": self.precision.name},
            "cf": 1.0 if spec is None else i * o / spec.parameters,
        }

        def factors() -> tuple[Tensor, ...]:
            if spec is None:
                return (gaussian((o, i), i, self.precision, device, SEEDS["dense"]),)
            return random_factors(spec, self.precision, device, SEEDS["structured"])

        work = [dense_kernel(n, i, o)] if spec is None else list(kernels(spec, n))
        return Subject(fields, x, factors, reference_of(name), work, self.runner.l2)

    def _dense(self, subject: Subject, n: int) -> Iterator[Arm]:
        call = reference_of("dense")
        yield subject.arm("dense", lambda: (call, subject.rotation))
        if n in self.compiled:
            yield subject.arm("dense-compile", lambda: (compiled_call(call), subject.rotation))
        yield from float8_arms(subject, None, self.runner.device)

    def _structured(self, subject: Subject, spec: Spec, n: int) -> Iterator[Arm]:
        name = spec.structure
        call = reference_of(name)
        yield subject.arm("plain", lambda: (call, subject.rotation))
        if n in self.compiled:
            yield subject.arm("compile", lambda: (compiled_call(call), subject.rotation))
        yield subject.arm(
            "ours",
            lambda: (our_call(name), subject.rotate(our_layout(spec, subject.factors()))),
            variant=our_variant(spec, n, self.precision, self.runner.device),
        )
        yield from float8_arms(subject, spec, self.runner.device)
        yield from subject.peer_arms(name, self.peers)


def compiled_call(call: Call) -> Call:
    """`call` under torch.compile, one compilation a shape: what is fastest, if it pays."""
    return torch.compile(call, dynamic=False)
