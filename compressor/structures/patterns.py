"""Reads, checks and chooses chains of Kronecker-sparse patterns, without torch.

A chain is written output side first, ``W = K_0 K_1 … K_{L-1}``. Sources: "Fast Inference with
Kronecker-Sparse Matrices"; chainable patterns: arXiv 2411.04506, section 4.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from math import cos, gcd, inf, log, pi, prod, sin, sqrt

from blr.compressor.base.errors import UsageError
from blr.compressor.base.quoting import quote
from blr.compressor.structures.specs import Pattern, written

Chain = tuple[Pattern, ...]

TOLERANCE = 0.02  # the achieved compression factor may exceed the requested one by this much
SNAP_TOLERANCE = 0.01  # of the budget, given up to make the rank a multiple kernels like
RANK_STEPS = (16, 8, 4, 2)
BAND = 0.01  # chains whose predicted errors differ by less than this are equals: h decides
# Added to the log of the predicted error for each e-fold of row classes d1 and of column blocks a2:
# trained matrices have spectra that decay globally, which more blocks cut apart. Measured on the
# projections of tiny-llama and mini-llama: the choices are 0.5% to 1.5% above the error of the best
# grid without statistics, 1.1% to 3.9% with them.
PENALTIES = {"plain": (0.05, 0.05), "calibrated": (0.15, 0.02)}
QUADRATURE = 200
MAX_FEATURES = 2**31  # of a layer; no model comes near

_ONE = r"\(\s*\d{1,9}\s*(?:,\s*\d{1,9}\s*){3}\)"
_WRITTEN = re.compile(rf"\s*(?:{_ONE}\s*(?:,\s*)?)+")  # one way to match: no backtracking


def parse_patterns(text: str, in_features: int | None = None, out_features: int | None = None) -> Chain:
    """Read a chain such as ``"(1,192,48,2)(2,48,192,1)"``, output side first, or the name ``butterfly``
    or ``monarch``, which needs the layer's sizes. Raises UsageError for other texts, and for a name that
    does not exist for these sizes."""
    name = text.strip().lower()
    if name in NAMED:
        if in_features is None or out_features is None:
            raise UsageError(f"pattern {name!r} needs a layer's sizes; write the chain out instead")
        return NAMED[name](in_features, out_features)
    if not _WRITTEN.fullmatch(text):
        raise UsageError(
            f"pattern is {quote(text)}: expected a chain such as (1,192,48,2)(2,48,192,1) "
            f"or one of {', '.join(NAMED)}"
        )
    found = []
    for one in re.findall(_ONE, text):
        a, b, c, d = map(int, re.findall(r"\d+", one))
        found.append((a, b, c, d))
    return tuple(found)


def butterfly(in_features: int, out_features: int) -> Chain:
    """The square-dyadic chain (2^l, 2, 2, n/2^{l+1}), n the smaller size; the outer factor on
    the longer side is as much longer. Raises UsageError unless both sizes are powers of two."""
    n = min(in_features, out_features)
    if n < 2 or any(size & (size - 1) for size in (in_features, out_features)):
        raise UsageError(
            f"butterfly needs sizes that are powers of two, not {out_features}x{in_features}: "
            "write a chain with --pattern, or leave --pattern out to have one chosen"
        )
    depth = n.bit_length() - 1
    b = [2 * out_features // n] + [2] * (depth - 1)
    c = [2] * (depth - 1) + [2 * in_features // n]
    return tuple((2**level, b[level], c[level], n >> (level + 1)) for level in range(depth))


def monarch(in_features: int, out_features: int) -> Chain:
    """Monarch with blocks of rank 1 and the number of blocks nearest √min(i, o) that divides
    both sizes. Raises UsageError if only 1 divides both."""
    common = gcd(in_features, out_features)
    target = log(min(in_features, out_features)) / 2
    blocks = min(_divisors(common), key=lambda n: (abs(log(n) - target), n))
    if blocks == 1:
        raise UsageError(
            f"monarch needs blocks that divide both sizes of {out_features}x{in_features}, and "
            "only 1 does: write a chain with --pattern, or leave --pattern out"
        )
    return two_factor_chain(in_features, out_features, blocks, blocks, 1)


NAMED: dict[str, Callable[[int, int], Chain]] = {"butterfly": butterfly, "monarch": monarch}


def validate_chain(patterns: Sequence[Pattern], in_features: int, out_features: int) -> None:
    """Raise UsageError unless `patterns` is a chain of an out×in matrix that can be factorized:
    neighbours have equal sizes, a_l | a_{l+1}, d_{l+1} | d_l, and the block rank a_l·c_l / a_{l+1} =
    b_{l+1}·d_{l+1} / d_l is an integer."""
    if not patterns or any(len(p) != 4 or min(p) < 1 for p in patterns):
        raise UsageError(
            f"pattern chain {written(patterns)}: expected one or more patterns of four positive "
            "integers; write them as (a,b,c,d)(a,b,c,d)"
        )
    o, i = _rows(patterns[0]), _columns(patterns[-1])
    if (o, i) != (out_features, in_features):
        raise UsageError(
            f"pattern chain {written(patterns)} makes a {o}x{i} matrix but the layer is "
            f"{out_features}x{in_features}: a·b·d of the first factor must be {out_features} and "
            f"a·c·d of the last {in_features} (the output side comes first)"
        )
    for left, right in pairwise(patterns):
        _validate_pair(left, right)


def check_pattern(text: str) -> None:
    """Check a pattern without its layer: whether it is a chain for a layer of some size. Raises
    UsageError as `parse_patterns` and `validate_chain`, and for a size that no layer has."""
    if text.strip().lower() in NAMED:
        return
    patterns = parse_patterns(text)
    o, i = _rows(patterns[0]), _columns(patterns[-1])
    validate_chain(patterns, i, o)
    if max(o, i) > MAX_FEATURES:
        raise UsageError(
            f"pattern chain {written(patterns)} makes a {o}x{i} matrix: expected at most {MAX_FEATURES} "
            "rows and columns; write smaller sizes"
        )


def _validate_pair(left: Pattern, right: Pattern) -> None:
    (a1, _, c1, d1), (a2, _, _, d2) = left, right
    pair = f"patterns {written([left, right])}"
    if _columns(left) != _rows(right):
        raise UsageError(
            f"{pair} do not meet: a·c·d = {_columns(left)} on the left must equal "
            f"a·b·d = {_rows(right)} on the right; change one of them"
        )
    if a2 % a1 or d1 % d2:
        raise UsageError(
            f"{pair} cannot be factorized: a must divide the next a ({a1}, {a2}) and d be a "
            f"multiple of the next d ({d1}, {d2}); change a and d"
        )
    if (a1 * c1) % a2:  # with equal sizes b2·d2/d1 is the same number
        raise UsageError(
            f"{pair} cannot be factorized: the block rank {a1 * c1}/{a2} must be an integer; "
            f"make c of the left a multiple of {a2 // a1} and b of the right the same multiple "
            f"of {d1 // d2}"
        )


def parameters(patterns: Sequence[Pattern]) -> int:
    """The number of parameters of a chain, Σ abcd."""
    return sum(prod(p) for p in patterns)


def chain_h(patterns: Sequence[Pattern]) -> float:
    """The smallest h = (b + c)/(bc) of a chain's factors: the memory traffic that the fused kernel saves
    for each multiplication ("Fast Inference with Kronecker-Sparse Matrices", equation 4)."""
    return min((b + c) / (b * c) for _, b, c, _ in patterns)


def two_factor_chain(i: int, o: int, d1: int, a2: int, rank: int) -> Chain:
    """The chain (1, o/d1, r·a2, d1)(a2, r·d1, i/a2, 1), of r(a2·o + d1·i) parameters. It gives each of
    d1·a2 blocks (rows equal modulo d1, columns in a2 runs) its own rank r."""
    return (1, o // d1, rank * a2, d1), (a2, rank * d1, i // a2, 1)


def two_factor_chains(i: int, o: int) -> Iterator[tuple[int, int, int, int]]:
    """All grids of d1 row classes and a2 column blocks, with the largest block rank that can matter and
    the parameters of each unit of rank: (d1, a2, limit, a2·o + d1·i)."""
    for d1 in _divisors(o):
        for a2 in _divisors(i):
            yield d1, a2, min(o // d1, i // a2), a2 * o + d1 * i


def choose_patterns(
    i: int, o: int, cf: float, *, calibrated: bool = False, tolerance: float = TOLERANCE
) -> tuple[Chain, str]:
    """Choose the two-factor chain for compression factor `cf`: accuracy first, then h; also why, in
    words for the plan. Maximizing h alone leads to rank 1 in many tiny blocks, which approximates
    trained matrices badly.

    1. Each grid takes the largest rank within the budget i·o/cf, made a multiple of 16, 8, 4 or 2 where
       that gives up at most 1% of the budget. The grid 1×1 is `svd`, taken only if no other fits.
    2. Kept are the chains whose factor is at most cf·(1 + tolerance), else the nearest below the budget.
    3. `predicted_log_error` ranks them. Among those within `BAND` of the best the largest h wins, then
       the fewest blocks.

    calibrated: whether the fit will be weighted by activations, which favours column blocks. Raises
    UsageError where not even rank 1 fits the budget.
    """
    budget = i * o / cf
    all_grids = _within(i, o, budget)
    grids = [grid for grid in all_grids if grid[:2] != (1, 1)] or all_grids
    if not grids:
        raise UsageError(
            f"cf {cf:g} leaves no Kronecker-sparse chain for a {o}x{i} layer: two factors reach at "
            f"most cf {i * o / (i + o):.4g} there; lower --cf, --exclude it or give a longer --pattern"
        )
    chains = {grid: two_factor_chain(i, o, *grid) for grid in grids}
    floor = min(budget / (1 + tolerance), max(map(parameters, chains.values())))
    penalties = PENALTIES["calibrated" if calibrated else "plain"]
    scored = [
        (predicted_log_error(i, o, *grid, penalties), grid, chain)
        for grid, chain in chains.items()
        if parameters(chain) >= floor
    ]
    best = min(score for score, _, _ in scored)
    equals = [entry for entry in scored if entry[0] <= best + BAND]
    _, (d1, a2, rank), chain = min(equals, key=lambda e: (-chain_h(e[2]), e[1][0] * e[1][1], e[1]))
    reason = (
        f"{written(chain)}: grid {d1}x{a2} of rank {rank}, least predicted error of {len(scored)} "
        f"chain{'s' * (len(scored) > 1)} at cf {i * o / parameters(chain):.3f}"
        f"{f', the largest h of {len(equals)} equals' if len(equals) > 1 else ''}"
        f" (h = {chain_h(chain):.4f})"
    )
    return chain, reason


def predicted_log_error(
    i: int, o: int, d1: int, a2: int, rank: int, penalties: tuple[float, float] = PENALTIES["plain"]
) -> float:
    """The logarithm of the expected relative error of d1·a2 blocks of one rank, up to a constant; -inf
    if exact. It is that of a matrix with independent entries, whose block spectra follow the
    Marchenko-Pastur law, plus `penalties` for each e-fold of row classes and of column blocks."""
    m, n = sorted((o // d1, i // a2))
    lost = _marchenko_pastur_tail(m / n, min(rank / m, 1.0))
    error = log(lost) / 2 if lost > 0 else -inf
    return error + penalties[0] * log(d1) + penalties[1] * log(a2)


@cache
def _marchenko_pastur_tail(aspect: float, kept: float) -> float:
    """The share of ‖M‖² that all but the largest singular values have, for random M [m, n].
    aspect: m/n. kept: the share of singular values that are the largest."""
    low, high = (1 - sqrt(aspect)) ** 2, (1 + sqrt(aspect)) ** 2
    angles = [pi * (k + 0.5) / QUADRATURE for k in range(QUADRATURE)]
    values = [(low + high) / 2 - (high - low) / 2 * cos(t) for t in angles]  # ascending
    counts = [sin(t) ** 2 / value for t, value in zip(angles, values, strict=True)]
    left = (1 - kept) * sum(counts)
    tail = 0.0
    for value, count in zip(values, counts, strict=True):
        taken = min(count, left)
        tail, left = tail + value * taken, left - taken
    return tail / sum(v * n for v, n in zip(values, counts, strict=True))


def _within(i: int, o: int, budget: float) -> list[tuple[int, int, int]]:
    """Every grid (d1, a2, r) whose rank 1 fits `budget`, with the largest rank r that does."""
    chains = ((d1, a2, min(limit, budget / unit)) for d1, a2, limit, unit in two_factor_chains(i, o))
    return [(d1, a2, _snap(rank)) for d1, a2, rank in chains if rank >= 1]


def _snap(rank: float) -> int:
    for step in RANK_STEPS:
        if (snapped := rank // step * step) >= rank * (1 - SNAP_TOLERANCE):
            return int(snapped)
    return int(rank)


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, int(sqrt(n)) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def _rows(pattern: Pattern) -> int:
    return pattern[0] * pattern[1] * pattern[3]


def _columns(pattern: Pattern) -> int:
    return pattern[0] * pattern[2] * pattern[3]
