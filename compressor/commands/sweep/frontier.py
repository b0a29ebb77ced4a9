"""What the points of a sweep say: losses, the line of plain quantization, and the frontier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise


@dataclass(frozen=True)
class Found:
    """A point that was made: `bits` a weight; `losses` in nats a token over the dense model, by text;
    `speed` in tokens a second, predicted, None where that cannot be; `commands` make it, one
    for each seed. Of several seeds all figures are the mean (calibrated ranks, and so bits, go with the
    seed) but `seconds`, which are the sum, `spread` how far the largest is from the
    least, None where one alone could be made."""

    name: str
    kind: str
    plain: bool
    heal: float
    bits: float
    losses: tuple[float, ...]
    speed: float | None
    commands: tuple[str, ...]
    bytes: int = 0
    seconds: float = 0.0
    spread: tuple[float, ...] | None = None


def over_seeds(found: Sequence[Found], setting: str) -> Found:
    """One point of those that differ in their seed alone, named after the `setting`."""
    if len(found) == 1 and found[0].name == setting:
        return found[0]
    by_text = list(zip(*(point.losses for point in found), strict=True))
    return replace(
        found[0],
        name=setting,
        bits=round(sum(point.bits for point in found) / len(found), 6),
        bytes=round(sum(point.bytes for point in found) / len(found)),
        losses=tuple(sum(losses) / len(losses) for losses in by_text),
        spread=tuple(max(losses) - min(losses) for losses in by_text) if len(found) > 1 else None,
        commands=tuple(line for point in found for line in point.commands),
        seconds=sum(point.seconds for point in found),
    )


def frontier(found: Sequence[Found]) -> list[Found]:
    """Points to which no other is equal or better in bits and in all losses, by falling bits."""
    kept = [point for point in found if not any(_beats(other, point) for other in found)]
    return sorted(kept, key=lambda point: -point.bits)


def _beats(one: Found, other: Found) -> bool:
    mine, its = (one.bits, *one.losses), (other.bits, *other.losses)
    return mine != its and all(a <= b for a, b in zip(mine, its, strict=True))


def line_at(plain: Sequence[Found], bits: float, text: int) -> float | None:
    """The loss that plain quantization has at so many bits, on straight lines between its points; None
    beyond them."""
    points = sorted((point.bits, point.losses[text]) for point in plain)
    for (low, high_loss), (high, low_loss) in pairwise(points):
        if low <= bits <= high:
            share = (bits - low) / (high - low) if high > low else 0.0
            return high_loss + share * (low_loss - high_loss)
    return None


def share_of_plain(found: Sequence[Found], point: Found, text: int) -> float | None:
    """A point's loss over what plain quantization, healed as long, has at the same bits."""
    plain = [other for other in found if other.plain and other.heal == point.heal]
    line = None if point.plain else line_at(plain, point.bits, text)
    return None if line is None or line <= 0 else point.losses[text] / line
