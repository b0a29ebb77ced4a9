"""The part of a structured layer in one process of a server: its share of the factors, and its product.

A server splits a layer by its outputs or inputs: a cut of U or V along one axis, and of what couples
blocks. Inputs leave a sum over the processes, for plain low rank behind V: r numbers a token, not o."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from blr.compressor.base.errors import CapabilityError
from blr.compressor.modeling.experts import KernelExperts
from blr.compressor.modeling.float8 import is_float8, prepare_layer
from blr.compressor.modeling.layers import KERNELS, layer_of
from blr.compressor.modeling.modeling_blr import STRUCTURES
from blr.compressor.modeling.models import replace_layers
from blr.compressor.modeling.splitting import AXES
from blr.compressor.structures.specs import LowRankSpec, Shape, Spec
from blr.kernels.common.layout import relaid
from blr.kernels.common.orders import order_of

Reduce = Callable[[Tensor], Tensor]
SHARED = "shared_V"  # where the first of several parts has the Vs of all


class Part(nn.Module):
    """The part `share` of the layer `name` [o, i]: parameters named as on disk, "." as "_". Whole
    layers, and low-rank ones cut by outputs, run on blr's kernels; other cuts are batched products.
    `spec` is None for a dense weight. Raises CapabilityError as `local_shapes`."""

    def __init__(
        self, name: str, spec: Spec | None, shape: Shape, share: Share, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.name, self.spec, self.share = name, spec, share
        plain = isinstance(spec, LowRankSpec) and spec.groups == 1
        self.in_rank_space = plain and share.side == "in" and share.size > 1
        self.can_share_input = plain and not self.in_rank_space
        self.loaded: set[str] = set()
        self.names = list(shapes := local_shapes(name, spec, shape, share))
        for factor, size in shapes.items():
            empty = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
            self.register_parameter(self.path(factor), empty)

    def path(self, factor: str) -> str:
        return factor.replace(".", "_")

    def load(self, factor: str, whole: Tensor) -> None:
        """Take this part of a factor. Raises ValueError for an unknown factor or a wrong shape."""
        if factor not in self.names:
            raise ValueError(f"{self.name}.{factor}: expected one of {', '.join(self.names)}")
        mine, found = self._get(factor), local(self.name, self.spec, factor, whole, self.share)
        if mine.shape != found.shape:
            raise ValueError(f"{self.name}.{factor}: {list(found.shape)}, expected {list(mine.shape)}")
        mine.data.copy_(found)
        self.loaded.add(factor)

    def relayout_(self) -> None:
        """Lay whole factors in memory as the kernels read them. Values stay the same."""
        if self.spec is None:
            return
        for name in self.names:
            factor = self._get(name)
            factor.data = relaid(factor.data, order_of(name, factor.dim()))

    def forward(self, x: Tensor, reduce: Reduce) -> Tensor:
        """[..., i'] -> [..., o'], no bias; with cut inputs a part of a sum unless `reduce` takes it."""
        factors = [self._get(name) for name in self.names]
        if self.spec is None:
            return nn.functional.linear(x, *factors)
        if self.in_rank_space:
            U, V = factors
            return nn.functional.linear(reduce(x @ V), U)
        own = self.share.size == 1 or isinstance(self.spec, LowRankSpec)
        product = KERNELS[self.spec.structure].product if own else None
        if product is not None:
            return product(self.spec, x, None, *factors)
        return STRUCTURES[self.spec.structure].product(self.spec.to_dict(), x, None, *factors)

    def _get(self, name: str) -> Tensor:
        return self.get_parameter(self.path(name))


def shares_input(parts: Sequence[nn.Module]) -> bool:
    """Whether parts of one input are low-rank ones that can be computed together."""
    return len(parts) > 1 and all(isinstance(p, Part) and p.can_share_input for p in parts)


def pack(parts: Sequence[nn.Module]) -> None:
    """Store the Vs of `parts` in one tensor [Σ r, i], so that one product goes through all ranks."""
    stored = torch.cat([part.get_parameter("V").detach().mT for part in parts])
    parts[0].register_buffer(SHARED, stored, persistent=False)
    for part, rows in zip(parts, stored.split(_ranks(parts)), strict=True):
        part.get_parameter("V").data = rows.mT


def product(parts: Sequence[nn.Module], x: Tensor, reduce: Reduce) -> Tensor:
    """Outputs of all `parts` for x [..., i'], side by side [..., Σ o'], without bias."""
    if hasattr(parts[0], SHARED):
        inner = (x @ parts[0].get_buffer(SHARED).mT).split(_ranks(parts), -1)
        Us = (part.get_parameter("U") for part in parts)
        return torch.cat([nn.functional.linear(z, U) for z, U in zip(inner, Us, strict=True)], -1)
    found = [part(x, reduce) for part in parts]
    return found[0] if len(found) == 1 else torch.cat(found, -1)


def _ranks(parts: Sequence[nn.Module]) -> list[int]:
    return [part.get_parameter("V").shape[1] for part in parts]


class PackedPart(Part):
    """A layer in few bits, held whole. Raises CapabilityError for several processes,
    which would cut groups that share a scale."""

    def __init__(self, name: str, spec: Spec, share: Share, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        if share.size > 1:
            found = f"{name}: {spec.structure} {spec.describe()} over {share.size} processes"
            remedy = "expected factors in the model's dtype; serve it in one process"
            raise CapabilityError(f"{found}; {remedy}")
        self.name, self.spec, self.share = name, spec, share
        self.layer = layer_of(spec, bias=False).to(dtype).requires_grad_(False)
        self.names = list(spec.stored())
        self.loaded, self.in_rank_space, self.can_share_input = set(), False, False

    def path(self, factor: str) -> str:
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


def make_experts(
    native: nn.Module, stacks: dict[str, list[str]], specs: Mapping[str, Spec]
) -> KernelExperts:
    """Empty experts in the place of `native`, those of transformers on the meta device, in its dtype.
    Each of the `stacks` becomes a list of layers: of `specs` ("gate_proj.3") or dense."""
    made = KernelExperts(native, stacks)
    replace_layers(made, {name: spec.to_dict() for name, spec in specs.items()})
    return made.to_empty(device=torch.get_default_device()).requires_grad_(False)


def load_experts(experts: KernelExperts, weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
    """Take tensors by their names on disk: "gate_proj.3.U", of dense layers "3.gate_proj.weight". Gives
    their names in `experts`. Raises ValueError for an unknown name or a wrong shape."""
    stored = experts.state_dict(keep_vars=True)
    for name, tensor in weights:
        first, *rest = name.split(".")
        mine = ".".join([rest[0], first, *rest[1:]]) if first.isdigit() else name
        if mine not in stored or stored[mine].shape != tensor.shape:
            expected = list(stored[mine].shape) if mine in stored else "no such tensor"
            raise ValueError(f"expert {name}: {list(tensor.shape)}, expected {expected}")
        stored[mine].data.copy_(tensor)
        yield mine


def make_part(name: str, spec: Spec | None, shape: Shape, share: Share, dtype: torch.dtype) -> Part:
    """What `share` holds of a layer, as `Part` and `PackedPart` say."""
    if spec is not None and spec.quantized:
        return PackedPart(name, spec, share, dtype)
    return Part(name, spec, shape, share, dtype)


Side = Literal["out", "in"]


@dataclass(frozen=True)
class Share:
    """Part `rank` of `size` equal ones of a layer's outputs or inputs."""

    side: Side = "out"
    rank: int = 0
    size: int = 1


def local_shapes(name: str, spec: Spec | None, shape: Shape, share: Share) -> dict[str, Shape]:
    """Shapes of the factors that `share` holds. Raises CapabilityError for a structure that is not
    split, or blocks that the processes do not divide."""
    found = {}
    for factor, whole in ({"weight": shape} if spec is None else spec.shapes()).items():
        axis = _axis(name, spec, factor, share)
        if axis is not None and (whole[axis] % share.size or getattr(spec, "blocks", 0) % share.size):
            raise CapabilityError(
                f"{name}: {spec.describe() if spec else 'dense'} over {share.size} processes; expected "
                "blocks that they divide; take fewer, or compress with --blocks a multiple of them"
            )
        found[factor] = tuple(n // share.size if k == axis else n for k, n in enumerate(whole))
    return found


def local(name: str, spec: Spec | None, factor: str, whole: Tensor, share: Share) -> Tensor:
    axis = _axis(name, spec, factor, share)
    if axis is None:
        return whole
    width = whole.shape[axis] // share.size
    return whole.narrow(axis, share.rank * width, width)


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
