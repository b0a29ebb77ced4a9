"""Products of layers with float8 weights, and float8 activations that several layers share. Activations
are rounded once for all layers that read one input; a norm, a GELU or the gate of an MLP writes its
result in float8, too. Elsewhere weights are dequantized, of which a warning tells once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor, nn

from blr.compressor.modeling.extended import Extension, GatedMlp, extend
from blr.compressor.modeling.probes import activation_of, gate_of, norm_of, siblings
from blr.compressor.modeling.settings import warn_once
from blr.compressor.structures.specs import QuantizedSpec, Spec
from blr.kernels.common.available import HALF
from blr.kernels.common.dispatch import Plans
from blr.kernels.common.names import FOLDERS
from blr.kernels.common.registration import rows
from blr.kernels.common.watching import is_traced
from blr.kernels.decode.quantized.formats import ROW
from blr.kernels.fp8.op import STRUCTURES, fp8_device, fp8_product, fp8_rows, fp8_rows_and
from blr.kernels.fp8.reference import Factors, Rows, Scales, aligned, even_ranks, scales_of

if TYPE_CHECKING:
    from blr.compressor.modeling.stages import Packed

HELD = "_blr_float8"  # where an input keeps its rows for the layers that read it next
_DECIDED: Any = Plans()  # by the id of a packing, which is kept so that no other one gets it


class HeldRows(NamedTuple):
    """Float8 rows that an input keeps, its version when they were made, and how many layers are yet to
    read them (None before the first has)."""

    rows: Rows
    version: int
    left: int | None


class Float8Layer(Protocol):
    """A layer whose weights are packed, as `layers.KernelLinear`."""

    in_features: int
    bias: Tensor | None
    packing: QuantizedSpec

    def buffers(self) -> Iterator[Tensor]: ...
    def packed(self, name: str = "weight") -> Packed: ...
    def factor(self, name: str) -> Tensor: ...


def float8_product(layer: Float8Layer, x: Tensor, bias: Tensor | None) -> Tensor | None:
    """``x Wᵀ + bias`` in float8, [..., i] -> [..., o]; None where the layer is to dequantize."""
    if (reason := hindrance(layer, x)) is not None:
        if reason:
            warn_once(f"float8 weights are dequantized at every product: {reason}")
        return None
    return product_of_rows(layer, x, shared_rows(layer, x), bias)


def product_of_rows(layer: Float8Layer, x: Tensor, made: Rows, bias: Tensor | None) -> Tensor:
    """``x Wᵀ + bias`` of the float8 rows of x; of x [..., i] itself only dtype and shape count."""
    scales, weights = prepared(layer, x)
    y = fp8_product(structure_of(layer.packing), made, weights, scales, x.dtype, bias)
    return y.view(*x.shape[:-1], y.shape[-1])


def structure_of(packing: Spec) -> str:
    """The folder of a layer's kernels, or dense."""
    return FOLDERS.get(packing.structure, packing.structure)


def is_float8(layer: object) -> TypeGuard[Float8Layer]:
    return bool(getattr(getattr(layer, "packing", None), "fp8", False))


def prepared(layer: Float8Layer, x: Tensor) -> tuple[Scales, list[Tensor]]:
    """The scales that products of a layer with inputs like x are multiplied by, and the layer's weights
    with rows that kernels read fast. Made once."""
    held = layer.__dict__.get("float8_prepared")
    if held is None or held[0].second.device != x.device:
        held = layer.__dict__["float8_prepared"] = _prepared(layer)
    return held  # type: ignore[no-any-return]


def prepare_float8(model: nn.Module) -> None:
    """Prepare all float8 layers of a model on a GPU that multiplies in float8: no compiler can do so."""
    for layer in filter(is_float8, model.modules()):
        prepare_layer(layer)


def prepare_layer(layer: Float8Layer) -> None:
    """Prepare one layer, if it is on a GPU and does not dequantize anyway."""
    device = next(buffer.device for buffer in layer.buffers())
    if device.type == "cuda":
        with torch.no_grad():
            like = torch.empty(1, 1, dtype=torch.bfloat16, device=device)
            if unfit(layer.packing, like) is None:
                prepared(layer, like)


def shared_rows(layer: object, x: Tensor) -> Rows:
    """x [..., i] in float8, as rows [n, i]. Of the layers that share x (`share_rows`) the first makes
    them and leaves them at x, until the last layer has taken them or x is written to."""
    left, held = getattr(layer, "float8_siblings", 1), getattr(x, HELD, None)
    if held is not None and held.version == version_of(x):
        left, made = left if held.left is None else held.left, held.rows
    else:
        made = fp8_rows(rows(x))
    if held is not None or left > 1:
        setattr(x, HELD, HeldRows(made, version_of(x), left - 1) if left > 1 else None)
    return made


def hindrance(layer: Float8Layer, x: Tensor) -> str | None:
    """Why a product is not computed in float8: None if it is, "" for a reason not worth a warning."""
    if is_traced() or not x.numel():
        return ""
    if torch.compiler.is_compiling() and getattr(layer, "float8_prepared", None) is None:
        return ""  # a device that they were not prepared for
    if asks_gradient(x, layer.bias):
        return "a gradient is asked for, which torch.no_grad() does not"
    return refusal(layer.packing, x)


def asks_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def refusal(packing: QuantizedSpec, x: Tensor) -> str | None:
    """`unfit`, remembered for each kind of packing, dtype and device."""
    if torch.compiler.is_compiling():
        return unfit(packing, x)
    key = (id(packing), x.dtype, x.device)
    found = _DECIDED.get(key) or _DECIDED.keep(key, (unfit(packing, x), packing))
    return found[0]


def unfit(packing: QuantizedSpec, x: Tensor) -> str | None:
    """Why a layer packed so has no products in float8 with inputs like x; None if it has."""
    if not fp8_device(x.device):
        return f"{x.device.type} has no float8 products, or no kernels for them"
    if x.dtype not in HALF:
        return f"the model computes in {x.dtype}, expected bfloat16 or float16"
    if packing.group != ROW:
        return f"scales are a block of {packing.group}, and products take those of rows"
    if structure_of(packing) not in STRUCTURES or getattr(packing.of, "groups", 1) > 1:
        return f"no float8 products of {packing.describe()}"
    return None


def _prepared(layer: Float8Layer) -> tuple[Scales, list[Tensor]]:
    if (structure := structure_of(layer.packing)) == "dense":
        weight = layer.packed()
        return Scales(None, weight.scale.float().view(-1)), [weight.packed]
    U, V = (layer.packed(name).blocks() for name in ("U", "V"))
    S = layer.factor("S").detach() if structure == "blast" else None
    f = even_ranks(structure, Factors(U.packed, V.packed, U.scale, V.scale, S))
    return scales_of(f.U_scale, f.V, f.V_scale, f.S), [aligned(f.U), f.V]


def version_of(x: Tensor) -> int:
    """A number that changes when x is written to; always 0 where torch does not count that."""
    return 0 if torch.compiler.is_compiling() or x.is_inference() else x._version


BLOCK = re.compile(r"^.*?\.\d+(?=\.|$)")  # the module path of a layer of the model
EMBEDDINGS = "embeddings"  # what modules are called whose norm the first block reads


class Float8Maker(Extension):
    """Mixin before a norm or an activation, which leaves its result in float8 for the layers that read
    it. float8_make: its name in `reference.MAKES`. float8_eps: of a norm. float8_readers: how the float8
    layers of its block are packed, by the features of their inputs."""

    float8_make: str
    float8_eps: float
    float8_readers: dict[int, QuantizedSpec]

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """The native result, with its float8 rows left at it."""
        gain, shift = getattr(self, "weight", None), getattr(self, "bias", None)
        reader = self.float8_readers.get(x.shape[-1])
        if args or kwargs or reader is None or not _rounds(reader, x, gain, shift):
            return super().forward(x, *args, **kwargs)
        given = (rows(x), self.float8_make, shift, gain, self.float8_eps)
        if torch.compiler.is_compiling():
            made, y = fp8_rows(*given), super().forward(x)
        else:
            made, y = fp8_rows_and(*given)
            y = y.view(x.shape)
        setattr(y, HELD, HeldRows(made, version_of(y), None))  # for the layers that read y
        return y


class Float8Gate(GatedMlp):
    """Mixin before a gated MLP. float8_make: the gate's name in `reference.MAKES`."""

    float8_make: str

    def forward(self, x: Tensor) -> Tensor:
        """The native result; what `down_proj` reads is made in float8 alone."""
        down = self.down_proj
        if not _is_plainly_called(down) or not is_float8(down) or not _rounds(down.packing, x):
            return super().forward(x)
        gate, up = self.gate_proj(x), self.up_proj(x)
        whole = type(gate) is type(up) is Tensor and gate.dtype == up.dtype == x.dtype
        if not whole or asks_gradient(up) or hindrance(down, gate) is not None:
            return self.down_proj(self.act_fn(gate) * up)
        made = fp8_rows(rows(gate), self.float8_make, rows(up))
        return product_of_rows(down, gate, made, down.bias)


def share_rows(model: nn.Module) -> None:
    """Have every activation that layers with float8 weights read rounded once, by the module that makes
    it where that is a known one, else by the first layer that reads it."""
    for group in siblings(model):
        found = [layer for layer in group if is_float8(layer)]
        for layer in found if len({layer.in_features for layer in found}) == 1 else []:
            layer.__dict__["float8_siblings"] = len(found)
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


def _equip(module: nn.Module, readers: dict[int, QuantizedSpec]) -> None:
    """Let a module that is a gated MLP, a norm or an activation make what `readers` read."""
    down = getattr(module, "down_proj", None)
    if down is not None and is_float8(down):
        if (make := gate_of(module)) is not None:
            extend(module, Float8Gate).float8_make = make
    elif (found := norm_of(module) or activation_of(module)) is not None:
        maker = extend(module, Float8Maker)
        maker.float8_make, maker.float8_eps = found
        maker.float8_readers = readers


def _rounds(reader: QuantizedSpec, x: Tensor, *others: Tensor | None) -> bool:
    """Whether the module that makes the input of layers packed as `reader` from x can make it in float8:
    nobody asks for a gradient or traces, and all tensors have one dtype."""
    if type(x) is not Tensor or not x.numel() or is_traced() or asks_gradient(x, *others):
        return False
    if any(t is not None and t.dtype != x.dtype for t in others):
        return False
    return refusal(reader, x) is None


def _is_plainly_called(layer: nn.Module) -> bool:
    """Whether a call runs the forward of the layer's class alone, without hooks."""
    return "forward" not in layer.__dict__ and not layer._forward_hooks and not layer._forward_pre_hooks
