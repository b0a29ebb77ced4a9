"""Experts of mixtures with kernels: few tokens take one launch for all experts that they chose. Many
take grouped products with weights that are made plain for the time of the call. Else they are those of
`modeling_blr.py`, which multiply by one expert after the other."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn

from blr.compressor.modeling.float8 import is_float8
from blr.compressor.modeling.layers import CorrectedLinear, QuantizedLinear, StructuredLinear
from blr.compressor.modeling.modeling_blr import Experts
from blr.compressor.modeling.probes import stacked_gate_of
from blr.kernels.common.available import HALF, kernel_device
from blr.kernels.common.watching import is_traced
from blr.kernels.fused.launch import gated
from blr.kernels.layers.experts.op import (
    Stack,
    Weight,
    add_mixed,
    expert_low_rank,
    expert_mixed,
    expert_products,
    expert_sums,
    expert_weights,
    mixes,
    stack_of,
)

FEW = 512  # pairs of a token and an expert up to which each is multiplied by itself
MOST = 1 << 29  # weights of a stack that are plain at once
BYTE = 1 << 8  # experts whose numbers are bytes
ALIGNED = 8  # numbers that rows of grouped products are a multiple of


# Called with the inputs [n, K], their experts and weights [n, count], and the residual stream [n, K]
Adding = Callable[[Tensor, Tensor, Tensor, Tensor], None]


@dataclass(frozen=True)
class Table:
    """Where the weights of a stack lie. stack: what kernels take; None where they cannot. first: one of
    its tensors. made_of: those that plain factors of corrections were made of. marks: of `marks_of`."""

    stack: Stack | None
    first: Tensor
    made_of: list[Tensor]
    marks: list[int]


def marks_of(first: Tensor, made_of: list[Tensor]) -> list[int]:
    """Numbers that change where `first` moves or one of `made_of` is written to."""
    return [first.data_ptr(), *[t._version for t in made_of]]


class KernelExperts(Experts):
    """Experts whose layers are in few bits, dense or with a correction, or of any other kind."""

    def __init__(self, native: nn.Module, parts: dict[str, list[str]]) -> None:
        super().__init__(native, parts)
        self.tables: dict[tuple[str, torch.dtype], Table] = {}

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        x, chosen = hidden_states.flatten(0, -2).contiguous(), top_k_index.flatten()
        stacks = self._stacks(x)
        few = len(chosen) <= FEW
        if not stacks or not (few or self._takes_many(x, stacks)):
            return super().forward(hidden_states, top_k_index, top_k_weights)
        if not few:
            return self._by_expert(x, top_k_index, top_k_weights, stacks).view_as(hidden_states)
        return self._by_pair(x, chosen, top_k_weights, stacks).view_as(hidden_states)

    def _by_pair(self, x: Tensor, chosen: Tensor, weights: Tensor, stacks: list[Stack]) -> Tensor:
        first, last = stacks
        if self.is_gated:
            inner = expert_products(x, chosen, first, self.gate_kind or "")
            return expert_mixed(inner, chosen, weights, last)
        gate_up = self._biased("gate_up_proj", expert_products(x, chosen, first), chosen)
        down = expert_products(self._gated(gate_up), chosen, last, early=True)
        return expert_sums(self._biased("down_proj", down, chosen), None, weights)

    def adding(self, like: Tensor, count: int) -> Adding | None:
        """A function that adds the outputs of `count` experts of each token to the residual stream, by
        our kernels alone; None where these do not take inputs [n, K] such as `like`."""
        stacks = self._stacks(like) if len(like) * count <= FEW and self.is_gated else []
        if not stacks or not all(stack.bits for stack in stacks) or not mixes(stacks[1], count):
            return None

        def add(x: Tensor, chosen: Tensor, weights: Tensor, y: Tensor) -> None:
            inner = expert_products(x, chosen.flatten(), stacks[0], self.gate_kind or "")
            add_mixed(inner, chosen.flatten(), weights, stacks[1], y)

        return add

    @property
    def is_gated(self) -> bool:
        """Whether the kernel of the first product also computes ``act(gate) ⊙ up``."""
        return self.gate_kind is not None and not self.has_bias

    @cached_property
    def gate_kind(self) -> str | None:
        """The name of the gate, if one kernel computes it."""
        return stacked_gate_of(self)

    def _gated(self, gate_up: Tensor) -> Tensor:
        if self.gate_kind is None:
            return self.native._apply_gate(self, gate_up).contiguous()
        gate, up = gate_up.chunk(2, -1)
        return gated(gate, up, self.gate_kind)

    def _by_expert(self, x: Tensor, index: Tensor, weights: Tensor, stacks: list[Stack]) -> Tensor:
        """What the experts give to many tokens, as `forward`."""
        kind = torch.uint8 if self.count <= BYTE else torch.int32  # sorted in one pass
        chosen, order = index.flatten().to(kind).sort(stable=True)
        experts = torch.arange(self.count, device=x.device).to(kind)
        ends = torch.searchsorted(chosen, experts, right=True, out_int32=True)
        gate_up = grouped_products(x, order // index.shape[-1], ends, stacks[0])
        inner = self._gated(self._biased("gate_up_proj", gate_up, chosen))
        down = self._biased("down_proj", grouped_products(inner, None, ends, stacks[1]), chosen)
        places = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=x.device))
        return expert_sums(down, places.view_as(index), weights)

    def _biased(self, name: str, y: Tensor, chosen: Tensor) -> Tensor:
        return y + getattr(self, f"{name}_bias")[chosen.long()] if self.has_bias else y

    def _stacks(self, x: Tensor) -> list[Stack]:
        """What kernels take of both stacks, if they compute with them for x."""
        watched = torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type) or is_traced()
        if watched or x.dtype not in HALF or not len(x) or not kernel_device(x):
            return []
        found = [self._stack(name, x) for name in ("gate_up_proj", "down_proj")]
        return [stack for stack in found if stack is not None] if None not in found else []

    def _takes_many(self, x: Tensor, stacks: list[Stack]) -> bool:
        """Whether many tokens are multiplied with all weights of a stack at once."""
        sizes = [(stack.addresses.shape[1] * stack.rows, stack.K) for stack in stacks]
        if not any(stack.bits for stack in stacks):
            return True
        even = all(size % ALIGNED == 0 for shape in sizes for size in shape)
        small = all(self.count * rows * K <= MOST for rows, K in sizes)
        return even and small and x.dtype == torch.bfloat16

    def _stack(self, name: str, x: Tensor) -> Stack | None:
        table = self.tables.get((name, x.dtype))
        if torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return None if table is None else table.stack  # nothing can be made here
        if table is None or marks_of(table.first, table.made_of) != table.marks:
            table = self.tables[name, x.dtype] = self._table(name, x)
        return table.stack

    def _table(self, name: str, x: Tensor) -> Table:
        parts = [getattr(self, part) for part in self.parts.get(name, ())]
        layers = [list(each) for each in zip(*parts, strict=True)]
        flat = [layer for each in layers for layer in each]
        forms = {form_of(layer, x) for layer in flat}
        corrected = [layer for layer in flat if isinstance(layer, CorrectedLinear)]
        stored = [t for layer in corrected for t in layer._stored_factors() if not t.is_inference()]
        first = next((t for layer in flat for t in (*layer.buffers(), *layer.parameters())), x)
        stack, form = None, next(iter(forms), None)
        if len(forms) == 1 and form is not None:
            weights = [[weight_of(layer, x) for layer in each] for each in layers]
            if all(weight.is_readable for each in weights for weight in each):
                stack = stack_of(weights, *form)
        return Table(stack, first, stored, marks_of(first, stored))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.tables = {}
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, object]:
        """What a copy takes: its tensors lie elsewhere."""
        return {**vars(self), "tables": {}}


def grouped_products(x: Tensor, index: Tensor | None, ends: Tensor, stack: Stack) -> Tensor:
    """The products [pairs, P · R] of many pairs, arguments as of `expert_low_rank`."""
    if not stack.bits:
        return expert_low_rank(x, index, ends, None, stack)
    x = x if index is None else x[index]
    y = torch._grouped_mm(x, expert_weights(ends, stack, x).mT, offs=ends)
    return expert_low_rank(x, None, ends, y, stack) if stack.ranks else y


def form_of(layer: Any, x: Tensor) -> tuple[int, int, int, int, bool] | None:
    """Rows, width, bits, group and grid of a layer that kernels compute with; bits 0 of low rank. None
    of another kind, or where its tensors are elsewhere."""
    sizes, there = (layer.out_features, layer.in_features), [*layer.buffers(), *layer.parameters()]
    if any(t.device != x.device for t in there):
        return None
    if type(layer) is StructuredLinear and layer.has_own_layout and layer.like().dtype == x.dtype:
        return (*sizes, 0, 0, False) if layer.has_ranks and layer.entry.get("groups", 1) == 1 else None
    base = layer.base if isinstance(layer, CorrectedLinear) and layer._is_one_operator(x) else layer
    if type(base) is not QuantizedLinear or is_float8(base):
        return None
    w = base.packed()
    return (*sizes, w.bits, w.group, w.curved) if w.scale.dtype == x.dtype else None


def weight_of(layer: Any, x: Tensor) -> Weight:
    """The weight of a layer that has a form."""
    if isinstance(layer, StructuredLinear):
        return Weight(None, None, layer.U, layer.V.mT)
    corrected = isinstance(layer, CorrectedLinear)
    w = layer.base.packed() if corrected else layer.packed()
    return Weight(w.packed, w.scale, *(layer._plain_factors(x) if corrected else ()))
