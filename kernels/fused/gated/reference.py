"""What gates an MLP, in plain torch: an activation of the gate, rounded to its dtype, times up."""

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import gelu, silu


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) ⊙ up``, [..., K]."""
    return silu(gate) * up


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """``gelu(gate) ⊙ up`` with the approximation by tanh, [..., K]."""
    return gelu(gate, approximate="tanh") * up


GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"swiglu": swiglu, "geglu": geglu}
