"""The part of a layer that one process of a server holds, as a module that computes with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from blr.compressor.integrations.vllm_split import Share, local, local_shapes, sums_in_rank_space
from blr.compressor.structures.specs import KroneckerSpec, LowRankSpec, Shape, Spec
from blr.kernels.common.layout import relaid
from blr.kernels.common.orders import order_of
from blr.kernels.layers.blast.op import blast_linear
from blr.kernels.layers.blast.reference import blast_linear as blast_reference
from blr.kernels.layers.kronecker.op import kronecker_linear
from blr.kernels.layers.lowrank.op import lowrank_group, lowrank_linear
from blr.kernels.layers.lowrank.reference import grouped_lowrank_linear
from blr.kernels.layers.monarch.op import monarch_linear
from blr.kernels.layers.monarch.reference import monarch_linear as monarch_reference

Reduce = Callable[[Tensor], Tensor]


class Part(nn.Module):
    """What `share` holds of the layer called `name`: parameters named as on disk, "." as "_".

    Whole layers and those cut by outputs of low rank run on our kernels; blocks that are cut are
    batched products of torch.

    Args:
        spec: of nothing packed; None for a dense weight. shape: [o, i] of the whole layer.

    Raises:
        CapabilityError: as `local_shapes`.
    """

    def __init__(
        self, name: str, spec: Spec | None, shape: Shape, share: Share, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.name, self.spec, self.share = name, spec, share
        self.in_rank_space = sums_in_rank_space(spec, share)
        self.loaded: set[str] = set()
        self.names = list(shapes := local_shapes(name, spec, shape, share))
        for factor, size in shapes.items():
            empty = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
            self.register_parameter(self.path(factor), empty)

    def path(self, factor: str) -> str:
        """Where in the module a factor is."""
        return factor.replace(".", "_")

    def load(self, factor: str, whole: Tensor) -> None:
        """Take this part of a factor as a checkpoint holds it.

        Raises ValueError for a factor that the layer lacks, or of another shape.
        """
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
        """[..., i'] -> [..., o'] without bias; a part of a sum where inputs are cut, unless it is taken
        by `reduce` in between (`in_rank_space`)."""
        factors = [self._get(name) for name in self.names]
        if self.spec is None:
            return nn.functional.linear(x, *factors)
        if self.in_rank_space:
            U, V = factors
            return nn.functional.linear(reduce(x @ V), U)
        if isinstance(self.spec, KroneckerSpec):
            return kronecker_linear(x, factors)
        if isinstance(self.spec, LowRankSpec):
            if self.spec.groups > 1:
                return grouped_lowrank_linear(x, *factors, side=self.spec.side)
            return lowrank_linear(x, *factors)
        return self._blocks(x, factors)

    def _blocks(self, x: Tensor, factors: Sequence[Tensor]) -> Tensor:
        whole = self.share.size == 1
        if len(factors) == 3:
            return (blast_linear if whole else blast_reference)(x, *factors)
        return (monarch_linear if whole else monarch_reference)(x, *factors)

    def _get(self, name: str) -> Tensor:
        return self.get_parameter(self.path(name))


def shares_input(parts: Sequence[nn.Module]) -> bool:
    """Whether parts of one input are low-rank ones that can be computed together."""
    return len(parts) > 1 and all(
        isinstance(p, Part)
        and isinstance(p.spec, LowRankSpec)
        and p.spec.groups == 1
        and not p.in_rank_space
        for p in parts
    )


def pack(parts: Sequence[nn.Module]) -> None:
    """Store the Vs of `parts` in one tensor [Σ r, i], so that one product goes through all ranks."""
    stored = torch.cat([part.get_parameter("V").detach().mT for part in parts])
    ranks = [part.get_parameter("V").shape[1] for part in parts]
    for part, rows in zip(parts, stored.split(ranks), strict=True):
        part.get_parameter("V").data = rows.mT


def product(parts: Sequence[nn.Module], x: Tensor, reduce: Reduce) -> Tensor:
    """Outputs of all `parts` for x [..., i'], side by side [..., Σ o'], without bias."""
    if shares_input(parts):
        Us, Vs = ([part.get_parameter(name) for part in parts] for name in "UV")
        return torch.cat(lowrank_group(x, Us, Vs), -1)
    found = [part(x, reduce) for part in parts]
    return found[0] if len(found) == 1 else torch.cat(found, -1)
