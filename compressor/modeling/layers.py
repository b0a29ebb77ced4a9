"""The structured layers of `modeling_blr.py` with kernels for products, where the package is installed.
`KERNELS` has one entry a structure. On a GPU the factors lie in memory as the kernels read them
(`relayout_`); names, shapes and what is saved are the same everywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from blr.compressor.modeling import modeling_blr
from blr.compressor.modeling.after_import import after_import
from blr.compressor.modeling.float8 import float8_product, is_float8, prepare_layer
from blr.compressor.modeling.packed_products import cpu_product, packed_product
from blr.compressor.modeling.ranks import RankRequest, in_ranks
from blr.compressor.modeling.stages import Packed, packed_factor
from blr.compressor.structures.specs import CorrectedSpec, Spec, spec_from_dict
from blr.kernels.common.inlining import add_decompositions
from blr.kernels.common.layout import ALIGNED, relaid, spaced, wide_rank, with_zeros
from blr.kernels.common.orders import order_of
from blr.kernels.common.watching import is_unwatched
from blr.kernels.layers.blast.op import blast_linear
from blr.kernels.layers.kronecker.op import kronecker_linear
from blr.kernels.layers.lowrank.op import lowrank_linear
from blr.kernels.layers.lowrank.reference import grouped_lowrank_linear
from blr.kernels.layers.monarch.op import monarch_linear
from blr.kernels.layers.packed.op import WHOLE, packed_linear

if TYPE_CHECKING:
    from blr.compressor.modeling.shared_input import SharedInput


@dataclass(frozen=True)
class Kernels:
    """How kernels compute with a structure.

    product: computes ``x Wᵀ + bias`` from a layer's spec, x, the bias and the factors in order; None:
    the formula does. widens: whether the last axis of every factor is the rank, so that a product of low
    rank can be added to the weight as more columns of the factors. packed: the factors of a product of
    matrices, in the order in which they are multiplied."""

    product: Callable[..., Tensor] | None = None
    widens: bool = False
    packed: tuple[str, ...] = ()


def _low_rank(spec: Spec, x: Tensor, bias: Tensor | None, U: Tensor, V: Tensor) -> Tensor:
    if U.dim() == 3:
        return grouped_lowrank_linear(x, U, V, bias, side=getattr(spec, "side", "out"))
    return lowrank_linear(x, U, V, bias)


# Structure -> its kernels; others compute by the formula of `modeling_blr.STRUCTURES`
KERNELS = {
    "svd": Kernels(_low_rank, widens=True, packed=("V", "U")),
    "dense": Kernels(packed=("weight",)),
    "monarch": Kernels(lambda _, x, bias, U, V: monarch_linear(x, U, V, bias)),
    "blast": Kernels(lambda _, x, bias, U, S, V: blast_linear(x, U, S, V, bias), widens=True),
    "ks": Kernels(lambda _, x, bias, *factors: kronecker_linear(x, list(factors), bias)),
}
FORMULA = Kernels()


class KernelLinear(modeling_blr.FormulaLinear):
    """A layer whose products are kernels. spec: of its structure. packing: how its factors are packed.
    exported: whether they lie as kernels read them. cpu_weights: see `cpu_product`."""

    cpu_weights: Any = None

    def __init__(self, spec: Spec, bias: bool, exported: bool = False) -> None:
        super().__init__(spec.to_dict(), bias, exported)
        self.exported = exported
        self._describe(spec)

    def _describe(self, spec: Spec) -> None:
        self.spec, self.packing = spec.plain, spec.packing
        self.kernels = KERNELS.get(spec.structure, FORMULA)

    def respecify(self, spec: Spec) -> None:
        """Make it a layer of another `spec`, whose factors it has been given."""
        self.entry = spec.to_dict()
        self.held = {
            factor.name: factor for factor in modeling_blr.factors_of(self.entry, self.exported)
        }
        self._describe(spec)

    @property
    def described(self) -> Spec:
        """The spec by which it is stored: packed, or as `spec`."""
        return self.packing or self.spec

    def __getattr__(self, name: str) -> Any:
        """Find factors that are stored in another form, by their names in the structure."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            factor = self.__dict__.get("held", {}).get(name)
            if factor is None or factor.names == (name,):
                raise
            return self.factor(name)

    def factor(self, name: str) -> Tensor:
        """The factor ``U``, ``factors.0``, …, dense."""
        held = self.held[name]
        if held.storage == "integer":
            return held.arranged(self.packed(name).dequantized())
        return super().factor(name)

    def ordered(self) -> list[Tensor]:
        return [self.factor(name) for name in self.held]

    def packed(self, name: str = "weight") -> Packed:
        return packed_factor(self, name)

    def packed_product(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """``x Wᵀ + bias`` of a packed layer by its factors as they are; None: they are dequantized."""
        if is_float8(self) and (y := float8_product(self, x, bias)) is not None:
            return y
        if not (names := self.kernels.packed):
            return None
        y = cpu_product(self, names, x, bias)
        return packed_product(self, names, x, bias) if y is None else y

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.__dict__.pop("float8_prepared", None)
        self.cpu_weights = None
        if is_float8(self):
            prepare_layer(self)
        return self

    def extra_repr(self) -> str:
        sizes = f"{self.in_features} -> {self.out_features}"
        about = f"{self.spec.structure} {sizes}, {self.described.describe()}"
        return f"{about}, bias={self.bias is not None}"


class StructuredLinear(KernelLinear):
    """A product of factors, packed or not. cached: whether a cache of keys and values asks for ranks.
    wide: how many ranks there are with the zeros behind them, and where the factors lay when these were
    put there, or None. shared: the layers of the same input that it may be computed with, or None."""

    cached = False
    wide: tuple[int, tuple[object, ...]] | None = None
    shared: SharedInput | None = None
    _hf_quantized_needs_local_tp = False  # transformers' name for: holds a part of its factors

    def __init__(self, spec: Spec, bias: bool, exported: bool = False) -> None:
        super().__init__(spec, bias, exported)
        self.register_state_dict_post_hook(_contiguous_entries)

    @property
    def has_ranks(self) -> bool:
        """Whether it answers a `RankRequest`: low rank, not cut over processes, no groups of inputs."""
        ranked = self.spec.structure == "svd" and self.entry.get("side", "out") == "out"
        return ranked and not self._hf_quantized_needs_local_tp

    def forward(self, x: Tensor | RankRequest) -> Any:
        """The output [..., o] of a tensor; for a `RankRequest` the ranks and the step that follows."""
        if isinstance(x, RankRequest):
            return in_ranks(x.x, self.U, self.V, self.bias)
        if self.shared is not None and (y := self.shared.take(self, x)) is not None:
            return y
        return self.product(x, self.bias)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.packing is not None and (y := self.packed_product(x, bias)) is not None:
            return y
        if self.kernels.product is None:
            return super().product(x, bias)
        return self.kernels.product(self.spec, x, bias, *self.factors_for(x))

    def ordered(self) -> list[Tensor]:
        if self.packing is None and not self.exported:  # as they are stored: the way of every token
            if (factors := self._modules.get("factors")) is not None:
                return [*factors().values()]
            known: Any = self._parameters  # asked by name each costs the host a microsecond more
            return [known[name] if name in known else getattr(self, name) for name in self.held]
        return super().ordered()

    @property
    def has_own_layout(self) -> bool:
        """Whether its factors, neither packed nor exported, may lie in any order."""
        return self.packing is None and not self.exported

    def relayout_(self) -> Self:
        """Lay the factors in memory as kernels read them fastest. Values stay the same."""
        if self._is_wide() or not self.has_own_layout:
            return self
        for name in self.spec.shapes():
            factor = self.get_parameter(name)
            factor.data = relaid(factor.data, order_of(name, factor.dim()))
        return self

    def widen_(self) -> Self:
        """Put zeros behind ranks that are no multiple of `ALIGNED`. Shapes and values stay the same."""
        rank = int(getattr(self.spec, "rank", ALIGNED)) if self.kernels.widens else ALIGNED
        whole = self.packing is None and getattr(self.spec, "groups", 1) == 1
        if rank % ALIGNED == 0 or self._is_wide() or not whole:
            return self
        width = wide_rank(rank)
        for name, factor in zip(self.spec.shapes(), self.ordered(), strict=True):
            order = order_of(name, factor.dim())
            self.keep(name, spaced(factor.detach(), order, width))
        self.wide = width, self._places()
        return self

    def keep(self, name: str, factor: Tensor) -> None:
        """Store `factor`, which has the same values in another place, as the factor `name`."""
        held = self.held[name]
        stored = factor.permute(sum(held.axes, ())) if held.axes else factor
        self.get_parameter(held.names[0]).data = stored

    def _is_wide(self) -> bool:
        return self.wide is not None and self.wide[1] == self._places()

    def _places(self) -> tuple[object, ...]:
        return tuple([(f.data_ptr(), f.stride()) for f in self.ordered()])

    def factors_for(self, x: Tensor) -> list[Tensor]:
        """The factors, with the zeros behind them where neither gradients nor traces look on."""
        if self.wide is None or not is_unwatched(x) or not self._is_wide():
            return self.ordered()
        return [with_zeros(factor, self.wide[0]) for factor in self.ordered()]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Every move and cast of torch goes through this: on a GPU factors get their kernel layout."""
        if self.shared is not None:
            self.shared.part()
        super()._apply(fn, recurse)
        prepare_layers(self)
        return self


class QuantizedLinear(KernelLinear):
    """A dense weight in few bits; replaces nn.Linear and, transposed, GPT-2's Conv1D."""

    def composed(self) -> Tensor:
        return self.factor("weight")

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x Wᵀ + bias``; at most `WHOLE` weights are dequantized at a time."""
        if (y := self.packed_product(x, bias)) is not None:
            return y
        w, step = self.packed(), rows_at_once(self.in_features)
        if step >= self.out_features:
            return linear(x, w.dequantized(), bias)
        parts = zip(w.packed.split(step), w.scale.split(step), strict=True)
        made = (w._replace(packed=packed, scale=scale).dequantized() for packed, scale in parts)
        y = torch.cat([linear(x, weight) for weight in made], -1)
        return y if bias is None else y + bias


class CorrectedLinear(modeling_blr.SummedLinear):
    """The sum of a dense weight in few bits and a structure. plain: what the factors of a low-rank
    correction were made from, and both in plain numbers."""

    plain: tuple[object, tuple[Tensor, Tensor]] | None = None

    def __init__(self, spec: CorrectedSpec, bias: bool, exported: bool = False) -> None:
        self.spec = self.described = spec
        super().__init__(spec.to_dict(), bias, exported)

    def make(self, part: str, exported: bool) -> KernelLinear:
        return layer_of(dict(self.spec.parts())[part], False, exported)

    def forward(self, x: Tensor) -> Tensor:
        """The output [..., o] of x [..., i]; one operator takes few bits with low rank."""
        if not self._is_one_operator(x):
            return super().forward(x)
        assert isinstance(self.base, QuantizedLinear)
        w, factors = self.base.packed(), self._plain_factors(x)
        return packed_linear(x, w.packed, w.scale, self.bias, w.bits, w.group, w.curved, *factors)

    def _is_one_operator(self, x: Tensor) -> bool:
        """Whether base and correction are as they were made, on one GPU, and of kinds that add up."""
        base, low = self.base, self.correction
        if type(base) is not QuantizedLinear or type(low) is not StructuredLinear or is_float8(base):
            return False
        if low.spec.structure != "svd" or is_float8(low) or low.entry.get("groups", 1) > 1:
            return False
        w, stored = base.packed(), self._stored_factors()
        trained = torch.is_grad_enabled() and any(t.requires_grad for t in stored)
        same = x.dtype == w.scale.dtype and all(t.device == x.device for t in stored)
        return same and not trained and w.runs_kernels()

    def _stored_factors(self) -> list[Tensor]:
        return [t for f in self.correction.held.values() for t in self.correction.stored(f)]

    def _plain_factors(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """U [o, r] and Vᵀ [r, i] of the correction, kept from call to call where nothing traces them."""
        if not is_unwatched(x):
            return self._made_plain(x)
        stored = self._stored_factors()
        key = x.dtype, *[(t.data_ptr(), 0 if t.is_inference() else t._version) for t in stored]
        if self.plain is None or self.plain[0] != key:
            made = key, self._made_plain(x)
            if torch.cuda.is_current_stream_capturing():  # they have values in replays alone
                return made[1]
            self.plain = made
        return self.plain[1]

    def _made_plain(self, x: Tensor) -> tuple[Tensor, Tensor]:
        u, v = (self.correction.factor(name).to(x.dtype) for name in ("U", "V"))
        return u.contiguous(), v.mT.contiguous()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.plain = None
        return super()._apply(fn, recurse)


Replaced = KernelLinear | CorrectedLinear


def layer_of(spec: Spec, bias: bool, exported: bool = False) -> Any:
    """An empty layer for the tensors of `spec`. exported: whether factors lie as kernels read them."""
    if isinstance(spec, CorrectedSpec):
        return CorrectedLinear(spec, bias, exported)
    kind = QuantizedLinear if spec.structure == "dense" else StructuredLinear
    return kind(spec, bias, exported)


def make_layer(entry: modeling_blr.Entry, bias: bool, exported: bool = False) -> Any:
    """An empty layer for an entry of the configuration's layer table (`Spec.to_dict`)."""
    return layer_of(spec_from_dict(entry), bias, exported)


def rows_at_once(width: int) -> int:
    return max(WHOLE // max(width, 1), 1)


# What families of transformers call the layers that make queries, keys and values.
PROJECTIONS = {
    *("q_proj", "k_proj", "v_proj", "query", "key", "value", "q_lin", "k_lin", "v_lin"),
    *("c_attn", "qkv_proj", "qkv", "query_key_value"),
}


after_import("torch._inductor.lowering", add_decompositions)


def prepare_layers(model: nn.Module) -> None:
    """Give the structured layers of `model` that are on a GPU their kernel layout."""
    for module in model.modules():
        if not isinstance(module, StructuredLinear) or module._hf_quantized_needs_local_tp:
            continue
        if any(p.is_cuda for p in module.parameters()):
            module.relayout_()
            module.widen_()


def _contiguous_entries(
    module: StructuredLinear, state: dict[str, Tensor], prefix: str, _: object
) -> None:
    """Copy the entries of a state dict to contiguous memory of their own, as files hold them."""
    for name in (*module.spec.shapes(), *(module._parameters if module.wide else ())):
        tensor = state.get(prefix + name)
        if tensor is None or isinstance(tensor, nn.Parameter):  # which is what keep_vars asks for
            continue
        if not tensor.is_contiguous() or tensor.untyped_storage().nbytes() != tensor.nbytes:
            state[prefix + name] = tensor.clone(memory_format=torch.contiguous_format)
