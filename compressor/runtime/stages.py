"""Linear layers as stages of the decoding kernels: lists of [B, R, K] weights, read in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from blr.compressor.modeling.quantized import Packed, packed_stages


@dataclass(frozen=True)
class Stage:
    """One blockwise product, as `kernels.gemv.segments.Segment` takes it.

    w: [B, R, K], a view of the layer's own factor. bias: [B·R]. mix: [B, B, R]. part: see there.
    """

    w: Tensor | Packed
    bias: Tensor | None = None
    mix: Tensor | None = None
    part: int | None = None

    @property
    def rows(self) -> int:
        """Number of outputs."""
        return self.w.shape[0] * self.w.shape[1]

    @property
    def bytes(self) -> int:
        """What one token has to read of it."""
        return sum(size_in_bytes(t) for t in (self.w, self.bias, self.mix))


def size_in_bytes(tensor: Tensor | Packed | None) -> int:
    return 0 if tensor is None else tensor.nbytes


def kind_of(w: Tensor | Packed) -> int:
    """Bits of packed weights, 0 for others: stages of one `dual` have the same."""
    return w.bits if isinstance(w, Packed) else 0


def stages_of(module: nn.Module) -> tuple[Stage, ...] | None:
    """The stages of a dense or structured layer; None for one that only its own forward computes.

    A structured layer is known by its `spec`; `U`, `V` and `S` are its factors in their canonical
    shapes, of any strides.
    """
    packed = packed_stages(module)
    if packed is not None:
        return tuple(Stage(*stage) for stage in packed)
    if type(module) is nn.Linear:
        return (Stage(module.weight[None], module.bias),)
    structure = getattr(getattr(module, "spec", None), "structure", "")
    make = {"svd": _lowrank, "monarch": _monarch, "blast": _blast}.get(structure)
    return None if make is None else make(module)


def _lowrank(module: Any) -> tuple[Stage, ...]:
    U, V, bias = module.U, module.V, module.bias
    if U.dim() == 2:
        return Stage(V.T[None]), Stage(U[None], bias)
    if module.spec.side == "in":  # the outputs sum over the groups: one product over all ranks
        return Stage(V.transpose(1, 2)), Stage(U.movedim(0, 1).flatten(1)[None], bias)  # a copy of U
    return Stage(V.transpose(1, 2)), Stage(U, bias)


def _monarch(module: Any) -> tuple[Stage, ...]:
    U, V = module.U, module.V
    return Stage(V.transpose(1, 2), part=V.shape[2] // V.shape[0]), Stage(U, module.bias)


def _blast(module: Any) -> tuple[Stage, ...]:
    return Stage(module.V.transpose(1, 2), mix=module.S), Stage(module.U, module.bias)
