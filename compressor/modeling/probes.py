"""What a module computes: asked of itself on a few numbers, and not of its name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from blr.kernels.fp8.reference import MAKES

GATED = {"swiglu": nn.functional.silu, "geglu": lambda x: nn.functional.gelu(x, approximate="tanh")}
ACTIVATIONS = ("gelu", "gelu_tanh")
SMALL = 8  # features of what modules are asked for
CLOSE = 1e-5


def numbers(*shape: int) -> Tensor:
    """Numbers that modules are asked about, on the CPU and in single precision: models are made under
    other defaults."""
    generator = torch.Generator("cpu").manual_seed(0)
    return 2 * torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)


@torch.no_grad()
def computes(made: Any, x: Tensor, expected: Tensor) -> bool:
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
    return (make, eps) if computes(small.forward, x, MAKES[make](x, plus, by, eps)) else None


def _alike(module: Any, parameters: dict[str, Any]) -> Any:
    """A module of the same class and settings with other parameters, of `SMALL` features."""
    kind: Any = type(module)
    made = kind.__new__(kind)
    made.__dict__.update(module.__dict__)
    made.__dict__["_parameters"] = parameters
    if "normalized_shape" in made.__dict__:
        made.__dict__["normalized_shape"] = (SMALL,)
    return made


def activation_of(module: Any) -> tuple[str, float] | None:
    """The name in `MAKES` of an activation that has no parameters."""
    home = type(module).__module__
    if home not in ("transformers.activations", "torch.nn.modules.activation"):
        return None
    x = numbers(4, SMALL)
    for make in ACTIVATIONS:
        if computes(module.forward, x, MAKES[make](x, None, None, 0.0)):
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
        if computes(lambda x: type(module).forward(stub, x), x, 3 * act(x @ gate) * (x @ up)):
            return make
    return None
