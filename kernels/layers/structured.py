"""The layer of a structure as one operator of torch, whose way is planned once for every shape."""

from collections.abc import Callable, Mapping
from math import prod

from torch import Tensor

from blr.kernels.common.dispatch import Plan, Plans, Variant, plan
from blr.kernels.common.inlining import inlined
from blr.kernels.common.registration import Context, apply, autocast, register, rows
from blr.kernels.common.tables import Shape
from blr.kernels.common.watching import is_unwatched


class StructureOperator:
    """``linear(x, U, …, bias)`` of one structure, by the fastest known way.

    Args:
        structure: its folder. factors: as an operator's schema lists them, U first. shape: sizes by the
            factors. variants: gives VARIANTS, where kernels run. reference: in plain torch; on_cpu: in
            its place on a CPU. backward: gradients of x, the factors and the bias, from those of y.
    """

    def __init__(
        self,
        structure: str,
        factors: str,
        shape: Callable[..., Shape],
        variants: Callable[[], Mapping[str, Variant]],
        reference: Variant,
        backward: Callable[[Context, Tensor], tuple[Tensor | None, ...]],
        on_cpu: Variant | None = None,
    ) -> None:
        self.structure, self.shape, self.variants = structure, shape, variants
        self.number, self.reference, self.on_cpu = factors.count("Tensor"), reference, on_cpu
        self.plans: Plans[Plan] = Plans()
        schema = f"(Tensor x, {factors}, Tensor? bias) -> Tensor"
        made = (self.planned, _fake, _setup, backward, reference)
        self.operator = inlined(register(f"{structure}_linear", schema, *made), structure, shape)

    def __call__(self, x: Tensor, *rest: Tensor | None, bias: Tensor | None = None) -> Tensor:
        """The product of x [..., i] with factors and the bias, if there is one."""
        given = rest if len(rest) > self.number else (*rest, bias)
        return self.planned(x, *given) if is_unwatched(x) else self.watched(x, *given)

    def planned(self, x: Tensor, *rest: Tensor | None) -> Tensor:
        """[..., o] of x [..., i], factors and bias, planned once for all of these shapes and dtypes."""
        key = (x.shape, x.dtype, x.device, *[None if t is None else (t.shape, t.dtype) for t in rest])
        run = self.plans.get(key)
        if run is None:
            factors, how = [t for t in rest[:-1] if t is not None], (self.variants, self.reference, x)
            made = plan(self.structure, self.shape(*factors), *how, factors, rest[-1], self.on_cpu)
            run = self.plans.keep(key, made)
        return run(x, *rest)

    def watched(self, x: Tensor, *rest: Tensor | None) -> Tensor:
        """The same where somebody looks on: autograd, autocast or a trace."""
        x, *given = autocast(x, *rest)
        y = apply(self.operator, rows(x), *given)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])


def blocks_of(x: Tensor, blocks: int) -> Tensor:
    """[n, b·p] as [b, n, p]."""
    return x.unflatten(1, (blocks, -1)).transpose(0, 1)


def _fake(x: Tensor, U: Tensor, *rest: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], prod(U.shape[:-1]))


def _setup(ctx: Context, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:-1])
