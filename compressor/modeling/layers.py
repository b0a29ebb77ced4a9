"""The structured layers as modules, one class a family. Shipped inside every checkpoint.

Each stores the canonical factors under the names of its spec (``U``, ``V``, ``S``,
``factors.n``) beside an optional dense ``bias``, and replaces an ``nn.Linear`` or a GPT-2
``Conv1D``: it maps [..., in_features] to [..., out_features].

On a GPU the factors lie in memory as the kernels read them (`layout.py`); names, shapes and what is
saved are the same everywhere.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from blr.compressor.modeling.after_import import after_import
from blr.compressor.modeling.modeling_blr import DenseWeight
from blr.compressor.modeling.random_init import drawn
from blr.compressor.modeling.ranks import RankRequest, in_ranks
from blr.compressor.modeling.stages import Corrections, Stage
from blr.compressor.structures.specs import (
    BlastSpec,
    KroneckerSpec,
    LowRankSpec,
    MonarchSpec,
    PivotedSpec,
    Spec,
    spec_from_dict,
)
from blr.kernels.common.inlining import add_decompositions
from blr.kernels.common.layout import ALIGNED, relaid, spaced, wide_rank, with_zeros
from blr.kernels.common.orders import order_of
from blr.kernels.common.registration import is_unwatched
from blr.kernels.decode.quantized.segments import Narrow
from blr.kernels.fp8.reference import is_number
from blr.kernels.layers.blast.op import blast_linear
from blr.kernels.layers.kronecker.op import kronecker_linear
from blr.kernels.layers.lowrank.op import lowrank_linear
from blr.kernels.layers.lowrank.reference import grouped_lowrank_linear
from blr.kernels.layers.monarch.op import monarch_linear
from blr.kernels.layers.pivoted.reference import pivoted_linear


class StructuredLinear(nn.Module):
    """Base of the structured layers: allocates the tensors that `spec` names.

    has_ranks: whether it answers a `RankRequest`. cached: whether it does so for a cache.
    wide: ranks with the zeros that lie behind them, and where and how the factors lay when these were
        put there; None without.
    """

    has_ranks = cached = False
    widens = False  # whether the last axis of every factor is the rank
    wide: tuple[int, tuple[Any, ...]] | None = None
    _hf_quantized_needs_local_tp = False  # transformers' name for: holds a part of its factors

    def __init__(self, spec: Spec, bias: bool) -> None:
        super().__init__()
        self.spec = spec
        self.in_features = spec.in_features
        self.out_features = spec.out_features
        self._allocate()
        self.bias = nn.Parameter(torch.zeros(spec.out_features)) if bias else None
        self.register_state_dict_post_hook(_contiguous_entries)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x Wᵀ + bias`` by the factors, [..., i] -> [..., o]."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.bias)

    @property
    def described(self) -> Spec:
        """What a file holds of it."""
        return self.spec

    @property
    def entry(self) -> dict[str, Any]:
        """The same in the table of layers in that file."""
        return self.described.to_dict()

    @property
    def weight(self) -> Tensor:
        """W [o, i] for code that reads it of an `nn.Linear`. Nothing is computed for its dtype."""
        if torch.compiler.is_compiling():
            return self.composed()  # what reads the dtype alone leaves nothing of it in the graph
        return DenseWeight(self, self._like())

    def composed(self) -> Tensor:
        """W [o, i], with gradients to the factors."""
        like = self._like()
        return self.product(torch.eye(self.in_features, dtype=like.dtype, device=like.device), None).mT

    def _like(self) -> Tensor:
        """A tensor of the dtype and on the device that it computes in and on."""
        return next(t for t in (*self.parameters(), *self.buffers()) if is_number(t))

    def ordered(self) -> list[Tensor]:
        """Factors and indices in the order of the spec, in a trace too, where none is a parameter."""
        return [getattr(self, name) for name in (*self.spec.shapes(), *self.spec.indices())]

    def stages(self) -> tuple[Stage, ...] | None:
        """The products that decoding kernels compute it by, in order; None if only `forward` does."""
        return None

    def correction(self) -> Corrections | None:
        """What decoding kernels add by it to a stage of the same input; None if only `forward` does."""
        stages = self.stages()
        if stages is None or len(stages) != 2:
            return None
        first, last = stages
        return Corrections(first, Narrow(last.w.contiguous()))

    def matrix(self, name: str) -> Any:
        """A factor [B, R, K] as a stage takes it: in place."""
        factor: Tensor = getattr(self, name)
        w = factor.permute(order_of(self.spec.structure, name, factor.dim()))
        return w if w.dim() == 3 else w[None]

    def relayout_(self) -> Self:
        """Lay the factors in memory as the kernels read them fastest. Values stay the same."""
        if self._is_wide():
            return self
        for name in self.spec.shapes():
            factor = self.get_parameter(name)
            factor.data = relaid(factor.data, order_of(self.spec.structure, name, factor.dim()))
        return self

    def widen_(self) -> Self:
        """Put zeros behind ranks that are no multiple of `ALIGNED`. Shapes and values stay the same."""
        rank = int(getattr(self.spec, "rank", ALIGNED)) if self.widens else ALIGNED
        if rank % ALIGNED == 0 or self._is_wide() or getattr(self.spec, "groups", 1) > 1:
            return self
        width = wide_rank(rank)
        for name, factor in zip(self.spec.shapes(), self.ordered(), strict=True):
            order = order_of(self.spec.structure, name, factor.dim())
            self._keep(name, spaced(factor.detach(), order, width))
        self.wide = width, self._places()
        return self

    def _keep(self, name: str, factor: Tensor) -> None:
        self.get_parameter(name).data = factor

    def _is_wide(self) -> bool:
        return self.wide is not None and self.wide[1] == self._places()

    def _places(self) -> tuple[Any, ...]:
        """Addresses and strides: what was freed and made again may lie at the same address."""
        return tuple([(f.data_ptr(), f.stride()) for f in self.ordered()])

    def factors_for(self, x: Tensor) -> list[Tensor]:
        """The factors, with the zeros behind them where nobody looks on (`is_unwatched`)."""
        held = self.ordered()
        if self.wide is None or not is_unwatched(x) or not self._is_wide():
            return held
        return [with_zeros(factor, self.wide[0]) for factor in held]

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """What every move and cast goes through: on a GPU, kernel layout."""
        super()._apply(fn, recurse)
        prepare_layers(self)
        return self

    def _allocate(self) -> None:
        for name, shape in self.spec.shapes().items():
            self.register_parameter(name, drawn(name, shape))
        self._allocate_indices()

    def _allocate_indices(self) -> None:
        for name, shape in self.spec.indices().items():
            self.register_buffer(name, torch.arange(shape[0], dtype=torch.int32))

    def extra_repr(self) -> str:
        return (
            f"{self.spec.structure} {self.in_features} -> {self.out_features}, "
            f"{self.spec.describe()}, bias={self.bias is not None}"
        )


class LowRankLinear(StructuredLinear):
    """``y = (x V) Uᵀ + bias``, whole or in groups of heads.

    shared: the layers of the same input that this one may be computed with (`shared_input.py`), or None.
    """

    spec: LowRankSpec
    U: Tensor
    V: Tensor
    widens = True
    shared: Any = None

    @property
    def has_ranks(self) -> bool:  # type: ignore[override]
        """Where it is whole in this process, and each rank is of all its inputs."""
        return self.spec.side == "out" and not self._hf_quantized_needs_local_tp

    def forward(self, x: Any) -> Any:
        """[..., o] of a tensor; of a `RankRequest` its ranks and the step that follows."""
        if isinstance(x, RankRequest):
            return in_ranks(x.x, self.U, self.V, self.bias)
        if self.shared is not None and (y := self.shared.take(self, x)) is not None:
            return y
        return super().forward(x)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        if self.shared is not None:
            self.shared.part()
        return super()._apply(fn, recurse)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        # read once: packed ones are dequantized at each reading
        U, V = (self.U, self.V) if self.wide is None else self.factors_for(x)
        if U.dim() == 3:
            return grouped_lowrank_linear(x, U, V, bias, side=self.spec.side)
        return lowrank_linear(x, U, V, bias)

    def stages(self) -> tuple[Stage, ...] | None:
        return Stage(self.matrix("V")), Stage(self.matrix("U"), self.bias)

    def matrix(self, name: str) -> Any:
        if name == "U" and self.spec.side == "in":  # outputs sum over the groups: one product, a copy
            return self.U.movedim(0, 1).flatten(1)[None]
        return super().matrix(name)

    def keep_v(self, stored: Tensor) -> None:
        """Make V a view of `stored` [r, i], its values in kernel layout. Of whole layers only."""
        self.V.data = stored.mT


class PivotedLinear(StructuredLinear):
    """``y = P [t; U t] + bias`` with ``t = x V``."""

    spec: PivotedSpec
    U: Tensor
    V: Tensor
    places: Tensor

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return pivoted_linear(x, self.U, self.V, self.places, bias)

    def stages(self) -> tuple[Stage, ...] | None:
        last = Stage(self.matrix("U"), self.bias, places=self.places)
        return Stage(self.matrix("V")), last

    def correction(self) -> Corrections | None:
        return None  # half of its outputs are those of the first stage


class MonarchLinear(StructuredLinear):
    """``y_k = Σ_l U_kl V_klᵀ x_l + bias_k``."""

    spec: MonarchSpec
    U: Tensor
    V: Tensor

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return monarch_linear(x, self.U, self.V, bias)

    def stages(self) -> tuple[Stage, ...] | None:
        first = Stage(self.matrix("V"), part=self.spec.block_rank)
        return first, Stage(self.matrix("U"), self.bias)


class BlastLinear(StructuredLinear):
    """``y_k = U_k Σ_l S_kl ⊙ (V_lᵀ x_l) + bias_k``."""

    U: Tensor
    S: Tensor
    V: Tensor
    widens = True

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        U, S, V = (self.U, self.S, self.V) if self.wide is None else self.factors_for(x)
        return blast_linear(x, U, S, V, bias)

    def stages(self) -> tuple[Stage, ...] | None:
        return Stage(self.matrix("V"), mix=self.S), Stage(self.matrix("U"), self.bias)


class Factors(nn.ParameterList):
    """Factors in order, which a call gives: accelerate's offload brings the weights of a module in when
    that is called, and this one, which holds them, is a module of its own."""

    __call__ = nn.Module.__call__

    def forward(self) -> list[Tensor]:
        return list(self)


class KroneckerLinear(StructuredLinear):
    """``y = K_0 K_1 … K_{L-1} x + bias``."""

    factors: Any  # an nn.ParameterList, or a list of views of what is stored

    def _allocate(self) -> None:
        self.factors = Factors([drawn(*each) for each in self.spec.shapes().items()])

    def ordered(self) -> list[Tensor]:
        return self.factors()

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return kronecker_linear(x, self.ordered(), bias)


# What families of transformers call the layers that make queries, keys and values.
PROJECTIONS = {
    *("q_proj", "k_proj", "v_proj", "query", "key", "value", "q_lin", "k_lin", "v_lin"),
    *("c_attn", "qkv_proj", "qkv", "query_key_value"),
}
LAYERS: dict[type[Spec], type[StructuredLinear]] = {
    LowRankSpec: LowRankLinear,
    PivotedSpec: PivotedLinear,
    MonarchSpec: MonarchLinear,
    BlastSpec: BlastLinear,
    KroneckerSpec: KroneckerLinear,
}


after_import("torch._inductor.lowering", add_decompositions)


def structured_linear(fields: dict[str, Any], bias: bool) -> StructuredLinear:
    """The module for one entry of the configuration's layer table (`Spec.to_dict`)."""
    spec = spec_from_dict(fields)
    return LAYERS[type(spec)](spec, bias)


def prepare_layers(model: nn.Module) -> None:
    """Give the structured layers of `model` that are on a GPU their kernel layout."""
    for module in model.modules():
        if not isinstance(module, StructuredLinear) or module._hf_quantized_needs_local_tp:
            continue
        if any(p.is_cuda for p in module.parameters()):
            module.relayout_()
            module.widen_()


def _contiguous_entries(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Entries of a state dict in canonical order and memory of their own, as files hold them."""
    for name in (*module.spec.shapes(), *(module._parameters if module.wide else ())):
        tensor = state.get(prefix + name)
        # the parameter itself is what keep_vars asks for
        if tensor is None or isinstance(tensor, nn.Parameter):
            continue
        if not tensor.is_contiguous() or tensor.untyped_storage().nbytes() != tensor.nbytes:
            state[prefix + name] = tensor.clone(memory_format=torch.contiguous_format)
