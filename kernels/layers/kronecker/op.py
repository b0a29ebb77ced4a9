"""Kronecker-sparse linear layer, ``y = K_0 … K_{L-1} x + bias``: the operator `blr::kronecker_linear`.

One factor w [a, b, c, d] is a batch of a·d products, y_il = w_i··l x_il. Backward of each, from the
output side to the input side, g [n, a, b, d] the gradient of its output and x [n, a, c, d] its input
(computed again):

    dx_il = w_i··lᵀ g_il      dw_i··l = Σ_n g_il x_ilᵀ
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from blr.kernels.common.dispatch import Variant, dispatch
from blr.kernels.common.inlining import called
from blr.kernels.common.placing import on_gpu
from blr.kernels.common.registration import apply, autocast, register, rows
from blr.kernels.common.tables import Shape
from blr.kernels.layers.kronecker.reference import kronecker_factor
from blr.kernels.layers.kronecker.reference import kronecker_linear as reference


def kronecker_linear(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None = None) -> Tensor:
    """`reference.kronecker_linear` by the fastest known way: with factors stored [a, d, b, c]."""
    x, *given = autocast(x, bias, *factors)
    y = apply(_LINEAR, rows(x), given[1:], given[0])
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])


def variants() -> Mapping[str, Variant]:
    """VARIANTS of this structure, taking factors one by one, imported where kernels run."""
    from blr.kernels.layers.kronecker.variants import VARIANTS

    return {name: _spread(run) for name, run in VARIANTS.items()}


def _spread(run: Callable[..., Tensor]) -> Variant:
    def call(x: Tensor, *factors: Tensor, bias: Tensor | None = None, **config: object) -> Tensor:
        return run(x, factors, bias, **config)

    return call


def _chain(x: Tensor, *factors: Tensor, bias: Tensor | None) -> Tensor:
    return reference(x, factors, bias)


def _outputs(factors: Sequence[Tensor]) -> int:
    a, b, _, d = factors[0].shape
    return a * b * d


def _forward(x: Tensor, factors: list[Tensor], bias: Tensor | None) -> Tensor:
    shape = Shape(x.shape[1], _outputs(factors), len(factors))
    with on_gpu(x.device):
        return dispatch("kronecker", shape, variants, _chain, x, factors, bias)


def _fake(x: Tensor, factors: list[Tensor], bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], _outputs(factors))


class _Kept(Protocol):
    """As `registration.Context`, of an operator that takes a list."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, list[bool], bool]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


def _setup(ctx: _Kept, inputs: tuple[Tensor, list[Tensor], Tensor | None], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], *inputs[1])


def _backward(ctx: _Kept, g: Tensor) -> tuple[object, ...]:
    x, *factors = ctx.saved_tensors
    for_x, for_factors, for_bias = ctx.needs_input_grad
    dbias = g.sum(0) if for_bias else None
    inputs = [x]  # of the factors, the rightmost first
    for w in reversed(factors[1:]):
        inputs.append(kronecker_factor(inputs[-1], w))
    gradients: list[Tensor | None] = []
    for position, (w, needed) in enumerate(zip(factors, for_factors, strict=True)):
        x = inputs.pop()
        gradients.append(_factor_gradient(g, x, w) if needed else None)
        if for_x or any(for_factors[position + 1 :]):
            g = kronecker_factor(g, w.transpose(1, 2))
    return g if for_x else None, gradients, dbias


def _factor_gradient(g: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """dw [a, b, c, d] of a factor from g [n, abd] and its input x [n, acd]."""
    a, b, c, d = w.shape
    g = g.reshape(-1, a, b, d).permute(1, 3, 2, 0)  # [a, d, b, n]
    x = x.reshape(-1, a, c, d).permute(1, 3, 0, 2)  # [a, d, n, c]
    return (g @ x).permute(0, 2, 3, 1)


_LINEAR = called(
    register(
        "kronecker_linear",
        "(Tensor x, Tensor[] factors, Tensor? bias) -> Tensor",
        *(_forward, _fake, _setup, _backward, reference),
    )
)
