"""Products of layers with float8 weights, and activations that several layers share.

Where the device multiplies in float8, the activations are rounded, too, a scale a token: once for all
layers that read one input. Elsewhere weights are dequantized, which is said once. In a block with such
weights a norm, a GELU or the gate of an MLP is one kernel that writes its result and that in float8; so
is the norm of the embeddings, which the first block reads. Under `torch.compile` the native module
makes the result, which the compiler drops if only its rows are read.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from blr.compressor.modeling.extended import Extension, extend
from blr.compressor.modeling.probes import activation_of, gate_of, norm_of
from blr.compressor.modeling.settings import warn_once
from blr.compressor.modeling.siblings import siblings
from blr.compressor.structures.specs import QuantizedSpec, Spec
from blr.kernels.common.available import HALF
from blr.kernels.common.dispatch import Plans
from blr.kernels.common.names import FOLDERS
from blr.kernels.common.registration import is_traced, rows
from blr.kernels.common.tables import Shape, bucket, prefers_dequantized
from blr.kernels.decode.quantized.formats import ROW
from blr.kernels.fp8.op import (
    STRUCTURES,
    fp8_device,
    fp8_product,
    fp8_rows,
    fp8_rows_and,
)
from blr.kernels.fp8.reference import Factors, Rows, Scales, aligned, even_ranks, scales_of

HELD = "_blr_float8"  # where an input keeps its rows for the layers that read it next
_DECIDED: Any = Plans()  # by a packing, which is kept so that no other one gets its id


class HeldRows(NamedTuple):
    """What an input keeps: its rows, its version when they were made, and how many layers are yet to
    read them; None: nobody has read them."""

    rows: Rows
    version: int
    left: int | None


def float8_product(layer: object, x: Tensor, bias: Tensor | None) -> Tensor | None:
    """``x Wᵀ + bias`` in float8, [..., i] -> [..., o]; None where the layer is to dequantize.

    Dequantized is, too, where the measured tables say that it is faster for so many tokens; not under
    `torch.compile`, whose graphs are of any number.

    Args:
        layer: with `packing` in float8, `packed`, and `described`.
    """
    if (reason := hindrance(layer, x)) is not None:
        if reason:
            warn_once(f"float8 weights are dequantized at every product: {reason}")
        return None
    return product_of_rows(layer, x, shared_rows(layer, x), bias)


def product_of_rows(layer: object, x: Tensor, made: Rows, bias: Tensor | None) -> Tensor:
    """The same of rows that there are; of x [..., i] only its dtype and shape count."""
    structure = structure_of(layer)
    scales, weights = prepared(layer, structure, x)
    y = fp8_product(structure, made, weights, scales, x.dtype, bias)
    return y.view(*x.shape[:-1], y.shape[-1])


def structure_of(layer: Any) -> str:
    """The folder of a layer's kernels, or dense."""
    return FOLDERS.get(layer.packing.structure, layer.packing.structure)


def is_float8(layer: object) -> bool:
    """Whether it is a layer of ours with float8 weights."""
    return bool(getattr(getattr(layer, "packing", None), "fp8", False))


@cache
def known_by(spec: Spec) -> tuple[str, Shape]:
    """What tables know a layer with float8 factors of `spec` by."""
    blocks, rank = getattr(spec, "blocks", 1), 0
    if spec.structure in FOLDERS:
        rank = spec.shapes()["U"][-1]
    shape = Shape(spec.in_features, spec.out_features, blocks, rank)
    return FOLDERS.get(spec.structure, spec.structure), shape


def prepared(layer: object, structure: str, x: Tensor) -> tuple[Scales, list[Tensor]]:
    """What products of a layer with inputs like x are scaled by, and its weights with rows that kernels
    read fast: made once."""
    held = layer.__dict__.get("float8_prepared")
    if held is None or held[0].second.device != x.device:
        held = _prepared(layer, structure)
        layer.__dict__["float8_prepared"] = held
    return held  # type: ignore[no-any-return]


def prepare_float8(model: nn.Module) -> None:
    """Make what products take beside the weights, which no compiler can, for layers on a GPU that
    multiplies in float8."""
    for layer in model.modules():
        if is_float8(layer):
            prepare_layer(layer)


def prepare_layer(layer: Any) -> None:
    """The same of one layer, if it is on a GPU and does not dequantize anyway."""
    device = next(buffer.device for buffer in layer.buffers())
    if device.type == "cuda":
        with torch.no_grad():
            like = torch.empty(1, 1, dtype=torch.bfloat16, device=device)
            if unfit(layer.packing, like) is None:
                prepared(layer, structure_of(layer), like)


def forget_scales(layer: object) -> None:
    """Let `prepared` make them again: what is stored has changed."""
    layer.__dict__.pop("float8_prepared", None)


def shared_rows(layer: object, x: Tensor) -> Rows:
    """x [..., i] as float8 [n, i]. Of layers that share it (`share_rows`) the first makes it and leaves
    it at x, until the last of them has taken it or x is written to."""
    left, held = getattr(layer, "float8_siblings", 1), getattr(x, HELD, None)
    if held is not None and held.version == version_of(x):
        left, made = left if held.left is None else held.left, held.rows
    else:
        made = fp8_rows(rows(x))
    if held is not None or left > 1:
        setattr(x, HELD, HeldRows(made, version_of(x), left - 1) if left > 1 else None)
    return made


def leave_rows(x: Tensor, made: Rows) -> None:
    """Let the layers that read x take its rows, which whoever made x has made."""
    setattr(x, HELD, HeldRows(made, version_of(x), None))


def count_readers(model: nn.Module) -> None:
    """Tell the layers with float8 weights how many of them read one input."""
    for group in siblings(model):
        found: list[Any] = [layer for layer in group if is_float8(layer)]
        for layer in found if len({layer.in_features for layer in found}) == 1 else []:
            layer.__dict__["float8_siblings"] = len(found)


def hindrance(layer: Any, x: Tensor) -> str | None:
    """Why a product is not computed in float8; "" where nobody need know, None if nothing hinders."""
    if is_traced() or not x.numel():
        return ""
    if torch.compiler.is_compiling() and getattr(layer, "float8_prepared", None) is None:
        return ""  # a device that they were not prepared for
    if asks_gradient(x, layer.bias):
        return "a gradient is asked for, which torch.no_grad() does not"
    return refusal(layer.packing, x)


def asks_gradient(*tensors: Tensor | None) -> bool:
    """Whether a gradient is asked for to one of them."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def refusal(packing: QuantizedSpec, x: Tensor) -> str | None:
    """The same of layers so packed and what is known of inputs like x: decided once."""
    if torch.compiler.is_compiling():
        return unfit(packing, x)
    n = bucket(x.numel() // x.shape[-1])
    key = (id(packing), n, x.dtype, x.device)
    found = _DECIDED.get(key) or _DECIDED.keep(key, (_decided(packing, x, n), packing))
    return found[0]  # type: ignore[no-any-return]


def _decided(packing: QuantizedSpec, x: Tensor, n: int) -> str | None:
    if (reason := unfit(packing, x)) is not None:
        return reason
    return "" if prefers_dequantized(*known_by(packing.of), n, x.dtype, x.device) else None


def unfit(packing: QuantizedSpec, x: Tensor) -> str | None:
    """Why no layer so packed has products in float8 with inputs like x, None if it has."""
    if not fp8_device(x.device):
        return f"{x.device.type} has no float8 products, or no kernels for them"
    if x.dtype not in HALF:
        return f"the model computes in {x.dtype}, expected bfloat16 or float16"
    if packing.group != ROW:
        return f"scales are a block of {packing.group}, and products take those of rows"
    structure = FOLDERS.get(packing.structure, packing.structure)
    if structure not in STRUCTURES or getattr(packing.of, "groups", 1) > 1:
        return f"no float8 products of {packing.describe()}"
    return None


def _prepared(layer: Any, structure: str) -> tuple[Scales, list[Tensor]]:
    if structure == "dense":
        weight = layer.packed()
        return Scales(None, weight.scale.float().view(-1)), [weight.packed]
    U, V = (_blocks(layer.packed(name)) for name in ("U", "V"))
    S = layer.S.detach() if structure == "blast" else None
    f = even_ranks(structure, Factors(U.packed, V.packed, U.scale, V.scale, S))
    return scales_of(f.U_scale, f.V, f.V_scale, f.S), [aligned(f.U), f.V]


def _blocks(found: Any) -> Any:
    if found.packed.dim() == 3:
        return found
    return found._replace(packed=found.packed[None], scale=found.scale[None])


def version_of(x: Tensor) -> int:
    """Changes when x is written to; of what cannot tell always the same."""
    return 0 if torch.compiler.is_compiling() or x.is_inference() else x._version


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
