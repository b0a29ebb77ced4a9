"""Which part of a structured layer each process of a tensor-parallel server holds.

A server splits a layer by its outputs (q, k, v, gate, up) or by its inputs (o, down). Both are cuts of
the factors along one axis each: of U by outputs, of V by inputs, and of what couples the blocks that are
left. Outputs are then whole in their part; inputs leave a sum over the processes, which for plain low
rank is taken behind V, in the rank's space: r numbers a token in place of o.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from blr.compressor.base.errors import CapabilityError
from blr.compressor.modeling.splitting import AXES
from blr.compressor.structures.specs import LowRankSpec, Shape, Spec

Side = Literal["out", "in"]


@dataclass(frozen=True)
class Share:
    """Part `rank` of `size` equal ones of a layer's outputs or inputs."""

    side: Side = "out"
    rank: int = 0
    size: int = 1


def shapes_of(spec: Spec | None, shape: Shape) -> dict[str, Shape]:
    """Factors of a layer and their shapes; those of a dense weight of `shape` [o, i] without a spec."""
    return {"weight": shape} if spec is None else spec.shapes()


def local_shapes(name: str, spec: Spec | None, shape: Shape, share: Share) -> dict[str, Shape]:
    """Shapes of the factors of a layer [o, i] that `share` holds. Raises CapabilityError for a
    structure that is not split, or blocks that the processes do not divide."""
    found = {}
    for factor, whole in shapes_of(spec, shape).items():
        axis = _axis(name, spec, factor, share)
        if axis is not None and (whole[axis] % share.size or _blocks(spec) % share.size):
            raise CapabilityError(
                f"{name}: {spec.describe() if spec else 'dense'} over {share.size} processes; expected "
                "blocks that they divide; take fewer, or compress with --blocks a multiple of them"
            )
        found[factor] = tuple(n // share.size if k == axis else n for k, n in enumerate(whole))
    return found


def check_whole(name: str, spec: Spec, share: Share) -> None:
    """Raise CapabilityError where `share` is but a part of a layer that is held whole."""
    if share.size > 1:
        raise CapabilityError(
            f"{name}: {spec.structure} {spec.describe()} over {share.size} processes; expected factors "
            "in the model's dtype and no pivots; serve it in one process"
        )


def local(name: str, spec: Spec | None, factor: str, whole: Tensor, share: Share) -> Tensor:
    """The part of a factor that `share` holds: a view."""
    axis = _axis(name, spec, factor, share)
    if axis is None:
        return whole
    width = whole.shape[axis] // share.size
    return whole.narrow(axis, share.rank * width, width)


def sums_in_rank_space(spec: Spec | None, share: Share) -> bool:
    """Whether the sum over processes is taken between V and U."""
    plain = isinstance(spec, LowRankSpec) and spec.groups == 1
    return plain and share.side == "in" and share.size > 1


def _axis(name: str, spec: Spec | None, factor: str, share: Share) -> int | None:
    kind = "dense" if spec is None else spec.structure
    if isinstance(spec, LowRankSpec) and spec.groups > 1:
        kind = f"groups {spec.side}"
    if share.size == 1:
        return None
    if kind not in AXES:
        raise CapabilityError(
            f"{name}: structure {kind!r} over {share.size} processes; expected one of "
            f"{', '.join(sorted(AXES))}; serve it in one process"
        )
    return AXES[kind][share.side].get(factor)


def _blocks(spec: Spec | None) -> int:
    return getattr(spec, "blocks", 0)
