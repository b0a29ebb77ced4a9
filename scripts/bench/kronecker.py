"""Kronecker-sparse factors and layers by every known way.

    python scripts/bench/kronecker.py patterns [--sample 60 | --patterns '(1,48,48,4)…'] [--batch 25088]
    python scripts/bench/kronecker.py layers [--layers '1,4096,1360,1 2,680,2048,1;…'] [--tokens 1,2,4,…]

patterns: single factors of the grid of "Fast Inference with Kronecker-Sparse Matrices" (section 5,
figure 7), by the ways of its appendix A: permute, batched product, permute (bmm, algorithm 1); one
contraction (einsum); a block-sparse product between the two permutations (bsr); the dense matrix with
its zeros (dense); ours. The paper speaks of 600 patterns; its rules give 932, of which 627 stay below
2^31 - 1 elements at batch 25088. layers: chains, by plain torch (bmm) and by what is chosen.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import gcd, prod
from statistics import median

import torch
from case_files import ScriptRow, Way, kernel_case, numbers, options, run, timer_of
from torch import Tensor

from blr.compressor.bench.checks import Expected, expect
from blr.compressor.bench.harness import Case
from blr.compressor.bench.layer_problem import KernelTimer, factor_variant
from blr.compressor.structures.patterns import parse_each
from blr.compressor.structures.specs import Pattern
from blr.kernels.layers.kronecker.op import kronecker_linear
from blr.kernels.layers.kronecker.reference import kronecker_factor
from blr.kernels.layers.kronecker.variants import VARIANTS

BATCH = 25088  # 128 sequences of 196 tokens
LIMIT = 2**31 - 1
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
SIDES = (48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
FEW_COUNTS = (4, 16, 64)  # d where a > 1
LEFT_OUT = ((1024, 256), (128, 512), (64, 256))  # (b, c) where a > 1, and their transposes
DENSE_WORK = 8  # the dense way is left out above this many times the work of bmm
BSR_BLOCK = 64  # largest side of the square blocks that a pattern's blocks are cut into
LAYERS = (
    "1,4096,1360,1 2,680,2048,1;1,4096,2336,1 2,1168,5504,1;1,11008,1488,1 1,1488,4096,1;"
    "1,64,64,64 64,64,64,1;1,256,256,16 16,256,256,1;1,1024,1024,4 4,1024,1024,1;"
    "2,1024,512,2 4,512,1024,1;1,128,512,32;4,128,32,32"
)


def grid(batch: int = BATCH, limit: int = LIMIT) -> list[Pattern]:
    """Every pattern (a, b, c, d) of which input, output and weights have at most `limit` elements,
    at the paper's batch even if `batch` is smaller."""
    blocks = [(b, c) for b, c in product(SIDES, SIDES) if b in (c, 4 * c) or c == 4 * b]
    left_out = {*LEFT_OUT, *((c, b) for b, c in LEFT_OUT)}
    single = [(1, b, c, d) for (b, c), d in product(blocks, COUNTS)]
    several = product(COUNTS[1:], blocks, FEW_COUNTS)
    repeated = [(a, b, c, d) for a, (b, c), d in several if (b, c) not in left_out]
    return [pattern for pattern in single + repeated if largest(pattern, max(batch, BATCH)) <= limit]


def largest(pattern: Pattern, batch: int) -> int:
    """Elements of the largest of input, output and weights."""
    a, b, c, d = pattern
    return max(batch * a * c * d, batch * a * b * d, prod(pattern))


def sample(patterns: Sequence[Pattern], size: int) -> list[Pattern]:
    """`size` patterns, or all if there are fewer, such that the first of them are a sample as well.

    Patterns sorted by stratum and size are taken at equal distances, so shares in the sample estimate
    shares in `patterns`. They come in steps of the golden section through that order, so a run that
    stops early has seen every stratum. No randomness.
    """
    if size >= len(patterns):
        return list(patterns)
    ordered = sorted(patterns, key=lambda p: (stratum(p), prod(p) * p[0] * p[3], p))
    chosen = [ordered[(2 * n + 1) * len(ordered) // (2 * size)] for n in range(size)]
    step = next((s for s in range(round(0.618 * size), 0, -1) if gcd(s, size) == 1), 1)
    return [chosen[n * step % size] for n in range(size)]


def stratum(pattern: Pattern) -> tuple[bool, str, str]:
    """(a > 1, shape of a block, class of d)."""
    a, b, c, d = pattern
    shape = "square" if b == c else "tall" if b > c else "wide"
    return a > 1, shape, "1" if d == 1 else "2-15" if d < 16 else "16-128"


@dataclass(frozen=True)
class Algorithms:
    """The published ways to apply one factor to x [n, acd], each f(x, weight) with a `…_weight(w)` that
    prepares the weight from w [a, b, c, d]. Source: the paper's appendix A."""

    pattern: Pattern

    def bmm_weight(self, w: Tensor) -> Tensor:
        """[a·d, b, c], contiguous."""
        a, b, c, d = self.pattern
        return w.permute(0, 3, 1, 2).reshape(a * d, b, c)

    def bmm(self, x: Tensor, blocks: Tensor) -> Tensor:
        """Permute, one product for each (i, l), permute. Permutations that are views cost nothing."""
        a, b, _, d = self.pattern
        y = x.new_empty(len(x), a * d, b)
        torch.bmm(self._split(x).transpose(0, 1), blocks.mT, out=y.transpose(0, 1))
        return self._join(y)

    def einsum_weight(self, w: Tensor) -> Tensor:
        """w itself."""
        return w

    def einsum(self, x: Tensor, w: Tensor) -> Tensor:
        """One contraction over c."""
        a, _, c, d = self.pattern
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
            *(starts, where.expand(count, rows, columns).flatten(), values.reshape(-1, side, side)),
            *((count * b, count * c),),
            check_invariants=False,
        )

    def bsr(self, x: Tensor, weight: Tensor) -> Tensor:
        """Permute, block-sparse product, permute."""
        a, b, _, d = self.pattern
        parts = self._split(x).flatten(1)
        return self._join(torch.nn.functional.linear(parts, weight).view(-1, a * d, b))

    def dense_weight(self, w: Tensor) -> Tensor:
        """K [a·b·d, a·c·d] with its zeros."""
        a, b, c, d = self.pattern
        dense = w.new_zeros(a, b, d, a, c, d)
        dense.diagonal(0, 0, 3).diagonal(0, 1, 3).copy_(w.permute(1, 2, 0, 3))  # [b, c, a, d]
        return dense.view(a * b * d, a * c * d)

    def dense(self, x: Tensor, weight: Tensor) -> Tensor:
        """One product with all of K."""
        return torch.nn.functional.linear(x, weight)

    def _split(self, x: Tensor) -> Tensor:
        """x as [n, a·d, c], contiguous."""
        a, _, c, d = self.pattern
        return x.view(-1, a, c, d).transpose(2, 3).reshape(-1, a * d, c)

    def _join(self, y: Tensor) -> Tensor:
        """[n, a·d, b] as the output of the layer."""
        a, b, _, d = self.pattern
        return y.view(-1, a, d, b).transpose(2, 3).reshape(-1, a * b * d)


def ours(x: Tensor, w: Tensor) -> Tensor:
    """By the variant that is chosen."""
    return kronecker_linear(x, [w])


def pattern_case(timer: KernelTimer, pattern: Pattern, batch: int) -> Case:
    """One factor by all ways."""
    a, _, c, d = pattern

    def made() -> tuple[Expected, dict[str, Way]]:
        make = partial(torch.randn, device=timer.device, dtype=timer.precision.dtype)
        x, w, algorithms = make(batch, a * c * d), make(pattern) / c**0.5, Algorithms(pattern)
        ways: dict[str, Way] = {"ours": (ours, (x, w))}
        for name in ("bmm", "einsum", "bsr", "dense"):
            if name != "dense" or a * d <= DENSE_WORK:
                ways[name] = getattr(algorithms, name), (x, getattr(algorithms, f"{name}_weight")(w))
        return expect(kronecker_factor, x, (w,)), ways

    return kernel_case(timer, f"{pattern}, {timer.precision.name}", made)


def layer_case(timer: KernelTimer, patterns: list[Pattern], n: int) -> Case:
    """A chain of factors by plain torch and by what is chosen."""
    reference = lambda x, *factors: VARIANTS["reference"](x, factors)  # noqa: E731

    def made() -> tuple[Expected, dict[str, Way]]:
        make = partial(torch.randn, device=timer.device, dtype=timer.precision.dtype)
        factors = [make(pattern) / pattern[2] ** 0.5 for pattern in patterns]
        a, _, c, d = patterns[-1]
        x = make(n, a * c * d)
        call = lambda way: lambda x, *factors: VARIANTS[way](x, factors)  # noqa: E731
        names = ("bmm", "auto") if timer.device.type == "cuda" else ("reference",)
        ways: dict[str, Way] = {name: (call(name), (x, *factors)) for name in names}
        return expect(reference, x, factors), ways

    chosen = " ".join(factor_variant(pattern, n, timer.precision) for pattern in patterns)
    return kernel_case(timer, f"{patterns}, {n} tokens: {chosen}", made)


def told(rows: Sequence[ScriptRow]) -> str:
    """Share of cases where ours is the fastest, and the median gain over the fastest other."""
    gains = []
    for title in dict.fromkeys(row.case for row in rows):
        times = {row.arm: row.ms for row in rows if row.case == title and row.ms is not None}
        if "ours" in times and len(times) > 1:
            gains.append(min(ms for arm, ms in times.items() if arm != "ours") / times["ours"])
    won = sum(gain > 1 for gain in gains)
    return f"ours fastest in {won} of {len(gains)}" + (
        f", median gain {median(gains):.2f}" if gains else ""
    )


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("what", choices=("patterns", "layers"))
    parser.add_argument("--sample", type=int, default=60)
    parser.add_argument("--patterns", help="these in place of the grid")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--layers", default=LAYERS)
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64,128,256,1024,4096")
    given = parser.parse_args()
    return run(given, cases_of(given, timer_of(given)), told if given.what == "patterns" else None)


def cases_of(given: argparse.Namespace, timer: KernelTimer) -> list[Case]:
    """What the options ask for."""
    if given.what == "patterns":
        asked = parse_each(given.patterns) if given.patterns else sample(grid(given.batch), given.sample)
        return [pattern_case(timer, pattern, given.batch) for pattern in asked]
    chains = [
        [tuple(map(int, factor.split(","))) for factor in layer.split()]
        for layer in given.layers.split(";")
    ]
    return [layer_case(timer, chain, n) for chain, n in product(chains, numbers(given.tokens))]


if __name__ == "__main__":
    sys.exit(main())
