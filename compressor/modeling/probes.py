"""Finds out what a module computes, by asking it on a few numbers, and which layers read one input."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from blr.compressor.recipe.architectures import SIBLINGS
from blr.kernels.fp8.reference import MAKES

GATED = {"swiglu": nn.functional.silu, "geglu": lambda x: nn.functional.gelu(x, approximate="tanh")}
ACTIVATIONS = ("gelu", "gelu_tanh")
SMALL = 8  # features of what modules are asked for
CLOSE = 1e-5


def numbers(*shape: int) -> Tensor:
    """Random numbers to ask modules about, on the CPU and in single precision under any defaults."""
    generator = torch.Generator("cpu").manual_seed(0)
    return 2 * torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)


@torch.no_grad()
def computes(call: Callable[[Tensor], object], x: Tensor, expected: Tensor) -> bool:
    """Whether ``call(x)`` is what is expected; False where it fails."""
    try:
        found = call(x)
    except Exception:  # it wants what a few numbers have not: another kind of module
        return False
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return False
    return torch.allclose(found, expected, rtol=CLOSE, atol=CLOSE)


def norm_of(module: nn.Module) -> tuple[str, float] | None:
    """The name in `MAKES` of the norm that a module computes, and its eps; None for other modules."""
    gain, shift = (module._parameters.get(name) for name in ("weight", "bias"))
    eps = next((getattr(module, n) for n in ("variance_epsilon", "eps") if hasattr(module, n)), None)
    if gain is None or gain.dim() != 1 or not isinstance(eps, float) or len(module._parameters) > 2:
        return None
    x, make = numbers(3, SMALL), "rms" if shift is None else "layer"
    by, plus = numbers(2, SMALL) + 1
    added = None if shift is None else plus
    small = _alike(module, {"weight": by} | ({"bias": added} if "bias" in module._parameters else {}))
    return (make, eps) if computes(small.forward, x, MAKES[make](x, added, by, eps)) else None


def _alike(module: nn.Module, parameters: dict[str, Tensor | None]) -> nn.Module:
    """A module of the same class and settings with other parameters, of `SMALL` features."""
    made = type(module).__new__(type(module))
    made.__dict__.update(module.__dict__)
    made.__dict__["_parameters"] = parameters
    if "normalized_shape" in made.__dict__:
        made.__dict__["normalized_shape"] = (SMALL,)
    return made


def activation_of(module: nn.Module) -> tuple[str, float] | None:
    """The name in `MAKES` of an activation and 0, as of `norm_of`; None for other modules."""
    home = type(module).__module__
    if home not in ("transformers.activations", "torch.nn.modules.activation"):
        return None
    x = numbers(4, SMALL)
    found = (n for n in ACTIVATIONS if computes(module.forward, x, MAKES[n](x, None, None, 0.0)))
    return next(((name, 0.0) for name in found), None)


def gate_of(module: nn.Module) -> str | None:
    """The name in `MAKES` of a gated MLP's gate; None for other modules."""
    if not all(hasattr(module, name) for name in ("gate_proj", "up_proj", "act_fn")):
        return None
    gate, up = numbers(2, SMALL, SMALL)
    parts = {"gate_proj": lambda x: x @ gate, "up_proj": lambda x: x @ up, "down_proj": lambda x: 3 * x}
    stub = SimpleNamespace(**parts, act_fn=module.act_fn)
    x = numbers(3, SMALL)
    for make, act in GATED.items():
        if computes(lambda x: type(module).forward(stub, x), x, 3 * act(x @ gate) * (x @ up)):
            return make
    return None


def stacked_gate_of(experts: nn.Module) -> str | None:
    """The name in `MAKES` of the gate of `Experts`, whose gate and up are one product; else None."""
    native: Any = getattr(experts, "native", None)
    x, stub = numbers(3, 2 * SMALL), SimpleNamespace(act_fn=getattr(experts, "act_fn", None))
    gate, up = x.chunk(2, -1)
    for make, act in GATED.items():
        if computes(lambda x: native._apply_gate(stub, x), x, act(gate) * up):
            return make
    return None


def siblings(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Every group of layers with one input, in the order of their block. Encoder-decoder models have
    none: keys and values may have another input than queries."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return
    for parent in model.modules():
        for names in SIBLINGS:
            found = [child for name, child in parent.named_children() if name in names]
            if len(found) > 1:
                yield found
