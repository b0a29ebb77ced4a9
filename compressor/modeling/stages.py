"""What the decoding kernels take of a linear layer. Shipped in every checkpoint."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class Stage(NamedTuple):
    """One blockwise product, as `blr.kernels.decode.gemv.segments.Segment` takes it.

    w: [B, R, K], a view of the layer's own factor, or a `modeling.quantized.Packed` of that shape.
    bias: [B·R]. mix: [B, B, R]. part: see there. correction: of packed w, what else is added.
    places: [o], of a last stage whose outputs stand behind those of the stage before: output k is number
    ``places[k]`` of both, to which the bias [o] is then added.
    """

    w: Any
    bias: Tensor | None = None
    mix: Tensor | None = None
    part: int | None = None
    correction: Corrections | None = None
    places: Tensor | None = None

    @property
    def rows(self) -> int:
        """Number of outputs."""
        return self.w.shape[0] * self.w.shape[1]

    @property
    def bytes(self) -> int:
        """What one token has to read of it."""
        more = 0 if self.correction is None else self.correction.first.bytes + self.correction.u.nbytes
        return more + sum(t.nbytes for t in (self.w, self.bias, self.mix, self.places) if t is not None)


class Corrections(NamedTuple):
    """``U z`` of a structure beside packed weights: z [B·r] is what its first stage gives, u [B, q, r] a
    `blr.kernels.decode.quantized.segments.Narrow`."""

    first: Stage
    u: Any
