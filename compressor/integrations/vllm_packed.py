"""A layer in few bits, or of pivots, inside a server: one process holds it whole, as it is stored."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from blr.compressor.integrations.vllm_parts import Part
from blr.compressor.integrations.vllm_split import Share, check_whole
from blr.compressor.modeling.float8 import is_float8, prepare_layer
from blr.compressor.modeling.layers import layer_of
from blr.compressor.structures.specs import Shape, Spec


class PackedPart(Part):
    """The layer called `name`, with what `Part` has; `names` are those of all that a file holds of it.

    Raises CapabilityError for several processes: a cut would go through groups that share a scale,
    or through the places of outputs.
    """

    def __init__(self, name: str, spec: Spec, share: Share, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        check_whole(name, spec, share)
        self.name, self.spec, self.share = name, spec, share
        self.layer = layer_of(spec, bias=False).to(dtype).requires_grad_(False)
        self.names = list(spec.stored())
        self.loaded, self.in_rank_space = set(), False

    def path(self, factor: str) -> str:
        """Where in the module a stored tensor is."""
        return f"layer.{factor}"

    def _get(self, name: str) -> Tensor:
        found: Tensor = self.layer.state_dict(keep_vars=True)[name]
        return found

    def relayout_(self) -> None:
        """Make what products of float8 take beside the weights."""
        for layer in self.layer.modules():
            if is_float8(layer):
                prepare_layer(layer)

    def forward(self, x: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        """[..., i] -> [..., o] without bias; nothing is left to `reduce`."""
        found: Tensor = self.layer(x)
        return found


def make_part(name: str, spec: Spec | None, shape: Shape, share: Share, dtype: torch.dtype) -> Part:
    """What `share` holds of a layer, as `Part` and `PackedPart` say."""
    if spec is not None and (spec.quantized or spec.indices()):
        return PackedPart(name, spec, share, dtype)
    return Part(name, spec, shape, share, dtype)
