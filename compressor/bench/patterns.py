"""The Kronecker-sparse benchmark grid and a stratified sample of it. No torch.

Source of the grid: "Fast Inference with Kronecker-Sparse Matrices", section 5 and figure 7. The
paper speaks of 600 patterns; its rules give 932, of which 627 stay below the limit of 2^31 - 1
elements at batch 25088 (its percentages are multiples of 1/627).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import gcd, prod

from blr.compressor.structures.specs import Pattern

BATCH = 25088  # 128 sequences of 196 tokens
LIMIT = 2**31 - 1
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
SIDES = (48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
FEW_COUNTS = (4, 16, 64)  # d where a > 1
LEFT_OUT = ((1024, 256), (128, 512), (64, 256))  # (b, c) where a > 1, and their transposes


def grid(batch: int = BATCH, limit: int = LIMIT) -> list[Pattern]:
    """Every pattern (a, b, c, d) of which input, output and weights have at most `limit` elements,
    at the paper's batch even if `batch` is smaller."""
    blocks = [(b, c) for b, c in product(SIDES, SIDES) if b in (c, 4 * c) or c == 4 * b]
    left_out = {*LEFT_OUT, *((c, b) for b, c in LEFT_OUT)}
    single = [(1, b, c, d) for (b, c), d in product(blocks, COUNTS)]
    repeated = [
        (a, b, c, d)
        for a, (b, c), d in product(COUNTS[1:], blocks, FEW_COUNTS)
        if (b, c) not in left_out
    ]
    return [pattern for pattern in single + repeated if largest(pattern, max(batch, BATCH)) <= limit]


def largest(pattern: Pattern, batch: int) -> int:
    """Elements of the largest of input, output and weights."""
    a, b, c, d = pattern
    return max(batch * a * c * d, batch * a * b * d, prod(pattern))


def sample(patterns: Sequence[Pattern], size: int) -> list[Pattern]:
    """`size` patterns, or all if there are fewer, such that the first of them are a sample as well.

    Patterns sorted by stratum and size are taken at equal distances, so every stratum is represented
    in proportion: shares in the sample estimate shares in `patterns`. They come in steps of the golden
    section through that order, so a run that stops early has seen every stratum. No randomness.
    """
    if size >= len(patterns):
        return list(patterns)
    ordered = sorted(patterns, key=lambda p: (stratum(p), matrix_size(p), p))
    chosen = [ordered[(2 * n + 1) * len(ordered) // (2 * size)] for n in range(size)]
    step = next((s for s in range(round(0.618 * size), 0, -1) if gcd(s, size) == 1), 1)
    return [chosen[n * step % size] for n in range(size)]


def stratum(pattern: Pattern) -> tuple[bool, str, str]:
    """(a > 1, shape of a block, class of d)."""
    a, b, c, d = pattern
    shape = "square" if b == c else "tall" if b > c else "wide"
    return a > 1, shape, "1" if d == 1 else "2-15" if d < 16 else "16-128"


def matrix_size(pattern: Pattern) -> int:
    """M·N of the matrix, zeros included."""
    a, b, c, d = pattern
    return (a * b * d) * (a * c * d)
