"""`blr bench kernels`: single Kronecker-sparse factors by every known algorithm.

The arms are those of "Fast Inference with Kronecker-Sparse Matrices", appendix A: permute, batched
product, permute (bmm, algorithm 1); one contraction (einsum); a block-sparse product between the
two permutations (bsr); the dense matrix with its zeros (dense); ours. Batch-first is x [n, acd] to
y [n, abd], batch-last x [acd, n] to y [abd, n].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import gcd

import torch
from torch import Tensor

from blr.compressor.bench.patterns import LIMIT, largest
from blr.compressor.bench.peers import Peer
from blr.compressor.bench.precision import Precision
from blr.compressor.bench.runner import Arm, Case, Runner
from blr.compressor.bench.subjects import (
    Subject,
    gaussian,
    our_call,
    our_layout,
    our_variant,
    random_factors,
    reference_of,
)
from blr.compressor.bench.timing import Call
from blr.compressor.planning.roofline import kernels
from blr.compressor.structures.patterns import h
from blr.compressor.structures.specs import KroneckerSpec, Pattern

SEEDS = {"x": 0, "w": 1}
DENSE_WORK = 8  # the dense arm is skipped above this many times the work of bmm
ALGORITHMS = 4  # beside the dense arm
BSR_BLOCK = 64  # largest side of the square blocks that a pattern's blocks are cut into


@dataclass(frozen=True)
class PatternBench:
    """What is the same for all patterns of a run. `last`: the batch is the last axis."""

    batch: int
    last: bool
    runner: Runner
    peers: Sequence[Peer] = ()

    def case(self, pattern: Pattern, precision: Precision) -> Case:
        """All arms of one pattern, timed together; skipped above 2^31 - 1 elements."""
        spec = single_factor(pattern)
        title = f"{spec.describe()} {precision.name}"
        flops = 2.0 * self.batch * spec.parameters * (ALGORITHMS + DENSE_WORK)
        arms = partial(self._arms, title, spec, precision)
        return Case(title, precision, lambda: list(arms()), ALGORITHMS + 1, flops)

    def _arms(self, title: str, spec: KroneckerSpec, precision: Precision) -> Iterator[Arm]:
        (pattern,) = spec.patterns
        subject = self._subject(title, spec, precision)
        a, _, _, d = pattern
        large = f"more than {LIMIT} elements" if largest(pattern, self.batch) > LIMIT else None
        hopeless = f"> {DENSE_WORK}x the work of bmm" if a * d > DENSE_WORK else None
        algorithms = Algorithms(pattern, self.last)
        for name in ("bmm", "einsum", "bsr", "dense"):
            skip = large or (hopeless if name == "dense" else None)
            yield _baseline(name, algorithms, subject, skip)
        yield subject.arm(
            "ours",
            lambda: (_ours(self.last), subject.rotate(our_layout(spec, subject.factors()))),
            variant=our_variant(spec, self.batch, precision, self.runner.device, self.last),
            skip=large,
        )
        yield from subject.peer_arms("ks", self.peers, large)

    def _subject(self, title: str, spec: KroneckerSpec, precision: Precision) -> Subject:
        i, o, device = spec.in_features, spec.out_features, self.runner.device
        fields = {
            **{"case": title, "model": "", "layer": "", "structure": "ks", "spec": spec.describe()},
            **{"in_features": i, "out_features": o, "n": self.batch, "dtype": precision.name},
            **{"cf": i * o / spec.parameters, "h": h(spec.patterns[0])},
        }
        shape = (i, self.batch) if self.last else (self.batch, i)
        return Subject(
            fields,
            cache(lambda: gaussian(shape, 1, precision, device, SEEDS["x"])),
            lambda: random_factors(spec, precision, device, SEEDS["w"]),
            reference_of("ks"),
            list(kernels(spec, self.batch)),
            self.runner.l2,
            self.last,
        )


def single_factor(pattern: Pattern) -> KroneckerSpec:
    """The layer that one factor is."""
    a, b, c, d = pattern
    return KroneckerSpec(a * c * d, a * b * d, (pattern,))


def _baseline(name: str, algorithms: Algorithms, subject: Subject, skip: str | None) -> Arm:
    """An arm that prepares the factor once, in its own form."""
    prepare, call = getattr(algorithms, f"{name}_weight"), getattr(algorithms, name)
    return subject.arm(
        name,
        lambda: (call, subject.rotate((prepare(*subject.factors()),))),
        capture=name != "bsr",  # torch reads the structure of sparse tensors on the host
        skip=skip,
    )


def _ours(last: bool) -> Call:
    if not last:
        return our_call("ks")
    from blr.kernels.common.available import kernel_device
    from blr.kernels.layers.kronecker.variants import kronecker_factor

    def call(x: Tensor, w: Tensor) -> Tensor:
        variant = None if kernel_device(x) else "reference"
        return kronecker_factor(x, w, batch_last=True, variant=variant)

    return call


@dataclass(frozen=True)
class Algorithms:
    """The published ways to apply one factor, each f(x, weight) with a `…_weight(w)` that prepares
    the weight from w [a, b, c, d]. Source: the paper's appendix A."""

    pattern: Pattern
    last: bool

    def bmm_weight(self, w: Tensor) -> Tensor:
        """[a·d, b, c], contiguous."""
        a, b, c, d = self.pattern
        return w.permute(0, 3, 1, 2).reshape(a * d, b, c)

    def bmm(self, x: Tensor, blocks: Tensor) -> Tensor:
        """Permute, one product for each (i, l), permute. Permutations that are views cost nothing."""
        a, b, _, d = self.pattern
        parts = self._split(x)
        if self.last:
            y = torch.bmm(blocks, parts)  # [ad, b, n]
        else:
            y = x.new_empty(len(x), a * d, b)
            torch.bmm(parts.transpose(0, 1), blocks.mT, out=y.transpose(0, 1))
        return self._join(y)

    def einsum_weight(self, w: Tensor) -> Tensor:
        """w itself."""
        return w

    def einsum(self, x: Tensor, w: Tensor) -> Tensor:
        """One contraction over c."""
        a, _, c, d = self.pattern
        if self.last:
            return torch.einsum("acdn,abcd->abdn", x.view(a, c, d, -1), w).reshape(-1, x.shape[1])
        return torch.einsum("nacd,abcd->nabd", x.view(-1, a, c, d), w).reshape(len(x), -1)

    def bsr_weight(self, w: Tensor) -> Tensor:
        """The block-diagonal [a·d·b, a·d·c] in square blocks, the largest powers of two up to
        `BSR_BLOCK` that divide b and c (torch's kernels take no others)."""
        a, b, c, d = self.pattern
        common = gcd(b, c)
        side = min(common & -common, BSR_BLOCK)
        rows, columns, count = b // side, c // side, a * d
        values = self.bmm_weight(w).view(count, rows, side, columns, side).transpose(2, 3)
        starts = torch.arange(count * rows + 1, device=w.device, dtype=torch.int32) * columns
        block = torch.arange(count, device=w.device, dtype=torch.int32)[:, None, None] * columns
        where = block + torch.arange(columns, device=w.device, dtype=torch.int32)
        return torch.sparse_bsr_tensor(
            starts,
            where.expand(count, rows, columns).flatten(),
            values.reshape(-1, side, side),
            (count * b, count * c),
            check_invariants=False,
        )

    def bsr(self, x: Tensor, weight: Tensor) -> Tensor:
        """Permute, block-sparse product, permute."""
        a, b, _, d = self.pattern
        parts = self._split(x)
        if self.last:
            return self._join((weight @ parts.flatten(0, 1)).view(a * d, b, -1))
        return self._join(torch.nn.functional.linear(parts.flatten(1), weight).view(-1, a * d, b))

    def dense_weight(self, w: Tensor) -> Tensor:
        """K [a·b·d, a·c·d] with its zeros."""
        a, b, c, d = self.pattern
        dense = w.new_zeros(a, b, d, a, c, d)
        dense.diagonal(0, 0, 3).diagonal(0, 1, 3).copy_(w.permute(1, 2, 0, 3))  # [b, c, a, d]
        return dense.view(a * b * d, a * c * d)

    def dense(self, x: Tensor, weight: Tensor) -> Tensor:
        """One product with all of K."""
        return weight @ x if self.last else torch.nn.functional.linear(x, weight)

    def _split(self, x: Tensor) -> Tensor:
        """x as [n, a·d, c], batch-last [a·d, c, n], contiguous."""
        a, _, c, d = self.pattern
        if self.last:
            return x.view(a, c, d, -1).transpose(1, 2).reshape(a * d, c, -1)
        return x.view(-1, a, c, d).transpose(2, 3).reshape(-1, a * d, c)

    def _join(self, y: Tensor) -> Tensor:
        """[n, a·d, b], batch-last [a·d, b, n], as the output of the layer."""
        a, b, _, d = self.pattern
        if self.last:
            return y.view(a, d, b, -1).transpose(1, 2).reshape(a * b * d, -1)
        return y.view(-1, a, d, b).transpose(2, 3).reshape(-1, a * b * d)
