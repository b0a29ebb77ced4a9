"""Norms and activations that round to float8 what they make.

In a block with float8 weights a norm, a GELU or the gate of an MLP is one kernel that writes its result
and the result in float8: layers that read it find the rows there (`float8.leave_rows`). So is the norm
of the embeddings, which the first block reads. Under `torch.compile` the native module makes the
result, which the compiler drops if only its rows are read.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from blr.compressor.modeling.extended import Extension, extend
from blr.compressor.modeling.float8 import (
    asks_gradient,
    count_readers,
    hindrance,
    is_float8,
    leave_rows,
    product_of_rows,
    refusal,
)
from blr.compressor.modeling.probes import activation_of, gate_of, norm_of
from blr.compressor.structures.specs import QuantizedSpec
from blr.kernels.common.registration import is_traced, rows
from blr.kernels.fp8.op import fp8_rows, fp8_rows_and

BLOCK = re.compile(r"^.*?\.\d+(?=\.|$)")  # the module path of a layer of the model
EMBEDDINGS = "embeddings"  # what modules are called whose norm the first block reads


class Float8Maker(Extension):
    """Mixin before a norm or an activation.

    float8_make: of `reference.MAKES`. float8_eps: of a norm. float8_readers: what a layer with float8
    weights in its block is packed as, by the features of the inputs that it reads.
    """

    float8_make: str
    float8_eps: float
    float8_readers: dict[int, QuantizedSpec]

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As of the module, and its rows."""
        compute: Any = super().forward  # type: ignore[misc]
        gain, shift = getattr(self, "weight", None), getattr(self, "bias", None)
        reader = self.float8_readers.get(x.shape[-1])
        if args or kwargs or reader is None or not _rounds(reader, x, gain, shift):
            return compute(x, *args, **kwargs)
        given = (rows(x), self.float8_make, shift, gain, self.float8_eps)
        if torch.compiler.is_compiling():
            made, y = fp8_rows(*given), compute(x)
        else:
            made, y = fp8_rows_and(*given)
            y = y.view(x.shape)
        leave_rows(y, made)
        return y


class Float8Gate(Extension):
    """Mixin before a gated MLP: ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``."""

    float8_make: str

    def forward(self: Any, x: Tensor) -> Any:
        """As of the module, the product with the gate in float8 alone."""
        down = self.down_proj
        if not _plainly_called(down) or not is_float8(down) or not _rounds(down.packing, x):
            return super().forward(x)  # type: ignore[misc]
        gate, up = self.gate_proj(x), self.up_proj(x)
        whole = type(gate) is type(up) is Tensor and gate.dtype == up.dtype == x.dtype
        if not whole or asks_gradient(up) or hindrance(down, gate) is not None:
            return down(self.act_fn(gate) * up)
        made = fp8_rows(rows(gate), self.float8_make, rows(up))
        return product_of_rows(down, gate, made, down.bias)


def share_rows(model: nn.Module) -> None:
    """Let activations be rounded once for all layers with float8 weights that read them, by what makes
    them, if that is known."""
    count_readers(model)
    readers: dict[str, dict[int, QuantizedSpec]] = {}
    for name, layer in model.named_modules():
        if is_float8(layer) and (block := BLOCK.match(name)):
            readers.setdefault(block[0], {}).setdefault(layer.in_features, layer.packing)
    modules = dict(model.named_modules())
    for name, module in modules.items():
        owner = name.rpartition(".")[0]
        block, first = BLOCK.match(name), next(iter(readers), None)
        home = block[0] if block else first if owner.endswith(EMBEDDINGS) else None
        if home in readers and not hasattr(modules[owner], "up_proj"):
            _equip(module, readers[home])


def _equip(module: Any, readers: dict[int, QuantizedSpec]) -> None:
    down = getattr(module, "down_proj", None)
    if down is not None and is_float8(down):
        if (make := gate_of(module)) is not None:
            extend(module, Float8Gate)
            module.float8_make = make
    elif (found := norm_of(module) or activation_of(module)) is not None:
        extend(module, Float8Maker)
        module.float8_make, module.float8_eps = found
        module.float8_readers = readers


def _rounds(reader: QuantizedSpec, x: Tensor, *others: Tensor | None) -> bool:
    """Whether what is made of x for layers packed as `reader` can be made in float8, too: nobody asks
    for a gradient, or traces."""
    if type(x) is not Tensor or not x.numel() or is_traced() or asks_gradient(x, *others):
        return False
    if any(t is not None and t.dtype != x.dtype for t in others):
        return False
    return refusal(reader, x) is None


def _plainly_called(layer: Any) -> bool:
    """Whether a call is its class's forward and nothing else: no hooks, nothing put in its place."""
    return "forward" not in layer.__dict__ and not layer._forward_hooks and not layer._forward_pre_hooks
