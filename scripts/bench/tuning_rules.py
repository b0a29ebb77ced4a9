"""What was measured turned into rules: the winners, and what of noise does not decide.

Rules of exact shapes come first; rules for all other shapes follow, naming for each number of tokens
the variant that loses least over the shapes that were measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, log
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
    """Rules that choose what was fastest.

    Args:
        points: everything measured. known: candidates by label.
    """
    rules: list[dict[str, Any]] = []
    groups: dict[tuple[str, Shape, str], list[TunedPoint]] = {}
    for point in points:
        groups.setdefault((point.structure, point.shape, point.dtype), []).append(point)
    for (structure, shape, dtype), measured in groups.items():
        where = {"structure": structure, "dtype": dtype, **_exactly(shape)}
        measured.sort(key=lambda point: point.n)
        rules += _dense_rules(measured, where)
        rules += _variant_rules(measured, where, known)
    for structure, dtype in dict.fromkeys((p.structure, p.dtype) for p in points):
        same = [p for p in points if (p.structure, p.dtype) == (structure, dtype)]
        rules += _general_rules(same, {"structure": structure, "dtype": dtype}, known)
    return rules


def fastest(point: TunedPoint) -> tuple[str, float] | None:
    """Label and time of the fastest structured candidate; None if none came out right."""
    times = {label: ms for label, ms in point.times.items() if label != DENSE}
    return min(times.items(), key=lambda item: item[1]) if times else None


def _exactly(shape: Shape) -> dict[str, list[int]]:
    return {name: [size, size] for name, size in shape._asdict().items()}


def _dense_rules(measured: Sequence[TunedPoint], where: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Where the dense layer beats every structured candidate."""
    winners = []
    for point in measured:
        best = fastest(point)
        dense = point.times.get(DENSE)
        winners.append(best is not None and dense is not None and dense * MARGIN < best[1])
    for low, high, wins in _ranges([p.n for p in measured], winners):
        if wins:
            yield {**where, "n": [low, high], "variant": DENSE}


def _variant_rules(
    measured: Sequence[TunedPoint], where: dict[str, Any], known: Mapping[str, Candidate]
) -> Iterator[dict[str, Any]]:
    winners: list[str | None] = []
    for point in measured:
        before = winners[-1] if winners else None
        winners.append(_winner(point, before))
    for low, high, label in _ranges([p.n for p in measured], winners):
        if label is not None:
            yield _rule(where, low, high, known[label])


def _winner(point: TunedPoint, before: str | None) -> str | None:
    """The fastest candidate; in its place one that is as good: a plain form above all, so that noise
    never chooses ours, then what won at fewer tokens, so that there are fewer rules, or the rule of
    thumb."""
    best = fastest(point)
    if best is None:
        return None
    if plain := _as_good(point, PLAIN[point.structure], OURS * best[1]):
        return plain
    thumb = heuristic(point.structure, point.n, getattr(torch, point.dtype))[0]
    usual = [label for label in (before, thumb) if label is not None]
    good = [label for label in usual if point.times.get(label, inf) <= MARGIN * best[1]]
    return good[0] if good else best[0]


def _as_good(point: TunedPoint, labels: Sequence[str], limit: float) -> str | None:
    """The fastest of `labels`, if it takes at most `limit` milliseconds."""
    times = {label: point.times[label] for label in labels if label in point.times}
    found = min(times, key=times.__getitem__) if times else None
    return found if found is not None and times[found] <= limit else None


def _general_rules(
    points: Sequence[TunedPoint], where: dict[str, Any], known: Mapping[str, Candidate]
) -> Iterator[dict[str, Any]]:
    """For shapes that were not measured: no arguments, which belong to a shape."""
    tokens = sorted({point.n for point in points})
    winners = [_least_loss([p for p in points if p.n == n], known) for n in tokens]
    for low, high, label in _ranges(tokens, winners):
        if label:
            yield _rule(where, low, high, known[label])


def _least_loss(points: Sequence[TunedPoint], known: Mapping[str, Candidate]) -> str | None:
    """The candidate without arguments that loses least, by the geometric mean over the shapes that
    any candidate ran; it must have run all of those. A plain form where ours is no better."""
    free = [label for label, c in known.items() if not c.config and label != DENSE]
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


def _rule(where: dict[str, Any], low: int, high: int, chosen: Candidate) -> dict[str, Any]:
    config = {"config": dict(chosen.config)} if chosen.config else {}
    return {**where, "n": [low, high], "variant": chosen.variant, **config}


def _ranges(tokens: Sequence[int], winners: Sequence[Any]) -> Iterator[tuple[int, int, Any]]:
    """Neighbouring measurements with one winner as one range of buckets. Each measurement speaks for
    the buckets above the one before it, the last one for all that follow."""
    low = BUCKETS[0]
    for position, (n, winner) in enumerate(zip(tokens, winners, strict=True)):
        last = position + 1 == len(tokens)
        if last or winners[position + 1] != winner:
            high = BUCKETS[-1] if last else n
            yield low, high, winner
            low = 2 * n


def winners_table(points: Sequence[TunedPoint]) -> list[dict[str, Any]]:
    """One entry a point, for people: the winner, its time, and the dense layer's."""
    rows = []
    for point in points:
        best = fastest(point)
        rows.append(
            {
                **{"structure": point.structure, **point.shape._asdict(), "dtype": point.dtype},
                **{"n": point.n, "variant": best[0] if best else None},
                **{"ms": best[1] if best else None, "dense_ms": point.times.get(DENSE)},
            }
        )
    return rows


def merged(rules: Sequence[dict[str, Any]], old: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`rules` and those of an older table about what `rules` say nothing of, exact shapes first."""
    said = {_about(rule) for rule in rules}
    every = [*rules, *(rule for rule in old if _about(rule) not in said)]
    return sorted(every, key=lambda rule: "inputs" not in rule)


def _about(rule: Mapping[str, Any]) -> str:
    kept = {key: value for key, value in rule.items() if key not in ("n", "variant", "config")}
    return json.dumps(kept, sort_keys=True)
