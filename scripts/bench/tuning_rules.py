"""What was measured turned into rules: the winners, and what of noise does not decide.

Rules of exact shapes come first; rules for all other shapes follow, naming for each number of tokens
the variant that loses least over the shapes that were measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import inf, log
from operator import itemgetter
from statistics import fmean
from typing import Any

import torch

from blr.kernels.common.tables import BUCKETS, DENSE, PLAIN, Shape, heuristic

MARGIN = 1.02  # a time within this of the best is as good: noise, and rules that hold for longer
OURS = 1.03  # times as fast as the plain form a kernel of ours must be to be chosen in its place


@dataclass(frozen=True)
class Candidate:
    """A variant with its arguments."""

    variant: str
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """As "gemv" or 'mix {"BN": 64}'."""
        return self.variant + (f" {json.dumps(self.config)}" if self.config else "")


Measured = tuple[str, Shape, str, int]  # structure, shape, dtype and tokens, as tables know them


@dataclass(frozen=True)
class TunedPoint:
    """What was measured of one layer, or product, at one number of tokens: label to milliseconds."""

    structure: str
    shape: Shape
    dtype: str
    n: int
    times: Mapping[str, float]


def rules_of(points: Sequence[TunedPoint], known: Mapping[str, Candidate]) -> list[dict[str, Any]]:
    """Rules that choose what was fastest of all that was measured. known: candidates by label."""
    rules: list[dict[str, Any]] = []
    groups: dict[tuple[str, Shape, str], list[TunedPoint]] = {}
    for point in points:
        groups.setdefault((point.structure, point.shape, point.dtype), []).append(point)
    for (structure, shape, dtype), measured in groups.items():
        where: dict[str, Any] = {"structure": structure, "dtype": dtype}
        where |= {name: [size, size] for name, size in shape._asdict().items()}
        measured.sort(key=lambda point: point.n)
        tokens = [point.n for point in measured]
        rules += _rules(where, tokens, _winners(measured), known)
    for structure, dtype in dict.fromkeys((p.structure, p.dtype) for p in points):
        same = [p for p in points if (p.structure, p.dtype) == (structure, dtype)]
        tokens = sorted({point.n for point in same})
        winners = (_least_loss([p for p in same if p.n == n], known) for n in tokens)
        rules += _rules({"structure": structure, "dtype": dtype}, tokens, winners, known)
    return rules


def _rules(
    where: dict[str, Any],
    tokens: Sequence[int],
    winners: Iterable[str | None],
    known: Mapping[str, Candidate],
) -> Iterator[dict[str, Any]]:
    """A rule for every range of tokens with one winner."""
    for n, label in ranges(tokens, winners):
        config = {"config": dict(known[label].config)} if known[label].config else {}
        yield {**where, "n": n, "variant": known[label].variant, **config}


def fastest(point: TunedPoint) -> tuple[str, float] | None:
    """Label and time of the fastest structured candidate; None if none came out right."""
    times = {label: ms for label, ms in point.times.items() if label != DENSE}
    return min(times.items(), key=lambda item: item[1]) if times else None


def _winners(measured: Sequence[TunedPoint]) -> Iterator[str | None]:
    """The fastest candidates; in place of each one that is as good: a plain form above all, so that
    noise never chooses ours, then what won at fewer tokens, so that there are fewer rules, or the rule
    of thumb."""
    before: str | None = None
    for point in measured:
        if (best := fastest(point)) is None:
            yield (before := None)
            continue
        times, dtype = point.times, getattr(torch, point.dtype)
        plain = [p for p in PLAIN[point.structure] if times.get(p, inf) <= OURS * best[1]]
        usual = (before or "", heuristic(point.structure, point.n, dtype)[0])
        good = (label for label in usual if times.get(label, inf) <= MARGIN * best[1])
        before = min(plain, key=times.__getitem__) if plain else next(good, best[0])
        yield before


def _least_loss(points: Sequence[TunedPoint], known: Mapping[str, Candidate]) -> str | None:
    """The candidate without arguments that loses least, by the geometric mean over the shapes that
    any candidate ran; it must have run all of those. A plain form where ours is no better."""
    free = [label for label, c in known.items() if not c.config]
    best = [(point.times, found[1]) for point in points if (found := fastest(point))]
    losses = {
        label: fmean(log(times[label] / ms) for times, ms in best)
        for label in free
        if best and all(label in times for times, _ in best)
    }
    if not losses:
        return None
    least = min(losses.values())
    plain = [
        label for label in PLAIN[points[0].structure] if losses.get(label, inf) <= least + log(OURS)
    ]
    return min(plain or losses, key=losses.__getitem__)


def ranges(
    tokens: Sequence[int], winners: Iterable[str | None], first: int = BUCKETS[0]
) -> Iterator[tuple[list[int], str]]:
    """Numbers of tokens, from and to, with one winner: a measurement speaks for those above the one
    before it (`first` on), the last one for all that follow."""
    lows = [first, *(n + 1 for n in tokens)]
    highs = [*tokens[:-1], BUCKETS[-1]]
    for label, same in groupby(zip(lows, highs, winners, strict=False), key=itemgetter(2)):
        found = [*same]
        if label is not None:
            yield [found[0][0], found[-1][1]], label


def merged(rules: Sequence[dict[str, Any]], old: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`rules` and those of an older table about what `rules` say nothing of, exact shapes first."""
    said = {_about(rule) for rule in rules}
    every = [*rules, *(rule for rule in old if _about(rule) not in said)]
    return sorted(every, key=lambda rule: "inputs" not in rule)


def _about(rule: Mapping[str, object]) -> str:
    kept = {key: value for key, value in rule.items() if key not in ("n", "variant", "config")}
    return json.dumps(kept, sort_keys=True)
