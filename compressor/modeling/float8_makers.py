"""Norms and activations that round to float8 what they make. Shipped inside every checkpoint.

In a block with float8 weights a norm, a GELU or the gate of an MLP is one kernel that writes its result
and the result in float8: layers that read it find the rows there (`float8.leave_rows`). So is the norm
of the embeddings, which the first block reads. Under `torch.compile` the native module makes the
result, which the compiler drops if only its rows are read.

What a module computes is asked of itself, on a few numbers, and not of its name.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
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
from blr.compressor.structures.specs import QuantizedSpec
from blr.kernels.common.registration import is_traced, rows
from blr.kernels.fp8.op import fp8_rows, fp8_rows_and
from blr.kernels.fp8.reference import MAKES

GATED = {"swiglu": nn.functional.silu, "geglu": lambda x: nn.functional.gelu(x, approximate="tanh")}
ACTIVATIONS = ("gelu", "gelu_tanh")
BLOCK = re.compile(r"^.*?\.\d+(?=\.|$)")  # the module path of a layer of the model
EMBEDDINGS = "embeddings"  # what modules are called whose norm the first block reads
SMALL = 8  # features of what modules are asked for
CLOSE = 1e-5


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
    elif (found := norm_of(module) or _activation_of(module)) is not None:
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


def numbers(*shape: int) -> Tensor:
    """Numbers that modules are asked about, on the CPU."""
    generator = torch.Generator("cpu").manual_seed(0)
    return 2 * torch.randn(shape, generator=generator, device="cpu")


@torch.no_grad()
def _computes(made: Any, x: Tensor, expected: Tensor) -> bool:
    """Whether `made`, called in its own way, gives what is expected."""
    try:
        found = made(x)
    except Exception:  # it wants what a few numbers have not: another kind of module
        return False
    same = isinstance(found, Tensor) and found.shape == expected.shape
    return same and bool(torch.allclose(found, expected, rtol=CLOSE, atol=CLOSE))


def norm_of(module: Any) -> tuple[str, float] | None:
    """What makes a norm of its inputs: its name in `MAKES`, and its eps."""
    gain, shift = (module._parameters.get(name) for name in ("weight", "bias"))
    eps = next((getattr(module, n) for n in ("variance_epsilon", "eps") if hasattr(module, n)), None)
    if gain is None or gain.dim() != 1 or not isinstance(eps, float) or len(module._parameters) > 2:
        return None
    x, make = numbers(3, SMALL), "rms" if shift is None else "layer"
    by, plus = numbers(2, SMALL) + 1
    plus = None if shift is None else plus
    small = _alike(module, {"weight": by} | ({"bias": plus} if "bias" in module._parameters else {}))
    return (make, eps) if _computes(small.forward, x, MAKES[make](x, plus, by, eps)) else None


def _alike(module: Any, parameters: dict[str, Any]) -> Any:
    """A module of the same class and settings with other parameters, of `SMALL` features."""
    kind: Any = type(module)
    made = kind.__new__(kind)
    made.__dict__.update(module.__dict__)
    made.__dict__["_parameters"] = parameters
    if "normalized_shape" in made.__dict__:
        made.__dict__["normalized_shape"] = (SMALL,)
    return made


def _activation_of(module: Any) -> tuple[str, float] | None:
    """The name in `MAKES` of an activation that has no parameters."""
    home = type(module).__module__
    if home not in ("transformers.activations", "torch.nn.modules.activation"):
        return None
    x = numbers(4, SMALL)
    for make in ACTIVATIONS:
        if _computes(module.forward, x, MAKES[make](x, None, None, 0.0)):
            return make, 0.0
    return None


def gate_of(module: Any) -> str | None:
    """The name in `MAKES` of what an MLP puts into `down_proj`, None if it is another kind."""
    if not all(hasattr(module, name) for name in ("gate_proj", "up_proj", "act_fn")):
        return None
    gate, up = numbers(2, SMALL, SMALL)
    parts = {"gate_proj": lambda x: x @ gate, "up_proj": lambda x: x @ up, "down_proj": lambda x: 3 * x}
    stub = SimpleNamespace(**parts, act_fn=module.act_fn)
    x = numbers(3, SMALL)
    for make, act in GATED.items():
        if _computes(lambda x: type(module).forward(stub, x), x, 3 * act(x @ gate) * (x @ up)):
            return make
    return None
