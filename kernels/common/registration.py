"""Makes a structure's product one operator of `torch.library`, and calls it with little overhead.

`torch.compile` sees one node with known shapes. What is traced to run elsewhere (`torch.export`, ONNX,
`torch.jit.trace`) holds the reference's plain products. Without gradients and tracing, `apply` calls the
implementation itself: the dispatcher and autograd's Python cost 6 µs a call on a CPU of 2024.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload

from blr.kernels.common.watching import is_traced

NAMESPACE = "blr"
Call = Callable[..., object]
T = TypeVar("T")
_libraries: list[torch.library.Library] = []  # an operator lives as long as its library object


class Context(Protocol):
    """What is kept of a call for its gradients, as `torch.autograd.Function` has it."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: Sequence[bool]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


class ContextOf(Context, Protocol[T]):
    """The same with `more` beside the tensors."""

    more: T


@dataclass(frozen=True)
class Operator(Generic[T]):
    """A registered operator, the Python function behind it and the same in plain torch, of one
    signature. bare: the operator without its gradients, which a compiled graph calls."""

    run: Callable[..., T]
    op: Callable[..., T]
    plain: Callable[..., T]
    bare: Callable[..., T]


def register(
    name: str,
    schema: str,
    run: Callable[..., T],
    fake: Call,
    setup: Callable[..., None] | None,
    backward: Callable[..., object] | None,
    plain: Callable[..., T],
) -> Operator[T]:
    """Register ``blr::<name><schema>``.

    Several copies of this package may be in one process (the installed one, and those inside
    checkpoints loaded with trust_remote_code), each of its own version: a name that is taken gets
    the first free number, so that every copy runs its own code.

    Args:
        schema: as "(Tensor x, Tensor U, Tensor? bias) -> Tensor"; nothing is written in place.
        run: the implementation on any device; its results never share memory with arguments.
        fake: shapes and dtypes of the results, as `torch.library.register_fake` takes it.
        setup, backward: as `torch.library.register_autograd` takes them; None of an operator that has
            no gradients, whose results ask for none. It costs 3 µs a call then, else 13 and more, the
            rest being Python of autograd's (a CPU of 2024).
        plain: `run` in torch's own operations, whatever the device.
    """
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    _libraries.append(library)
    bare = _implemented(library, name if backward is None else f"{name}_bare", schema, run, fake)
    library.impl(bare, torch.library.fallthrough_kernel, "Autograd")
    if backward is None:
        return Operator(run, _found(bare), plain, _found(bare))
    full = _implemented(library, name, schema, run, fake)
    torch.library.register_autograd(f"{NAMESPACE}::{full}", backward, setup_context=setup, lib=library)
    return Operator(run, _found(full), plain, _found(bare))


def _implemented(library: torch.library.Library, name: str, schema: str, run: Call, fake: Call) -> str:
    """The name of an operator that has still to be told of gradients: the first that is free."""
    names = (f"{name}_{number}" if number else name for number in count())
    free = next(each for each in names if not hasattr(getattr(torch.ops, NAMESPACE), each))
    library.define(free + schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(free, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{free}", fake, lib=library)
    return free


def _found(name: str) -> OpOverload:
    found: OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    return found


def apply(operator: Operator[T], x: Tensor, *arguments: object) -> T:
    """Call `operator` on x [n, i]; through the dispatcher only if somebody listens there."""
    unwatched = type(x) is Tensor and not (torch.is_grad_enabled() or torch.compiler.is_compiling())
    run = operator.plain if is_traced() else operator.run if unwatched else operator.op
    return run(x, *arguments)


def rows(x: Tensor) -> Tensor:
    """x [..., i] as [n, i], a view where strides allow it."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def autocast(x: Tensor, *others: Tensor | None) -> tuple[Tensor, *tuple[Tensor | None, ...]]:
    """`x` and `others` in the dtype that an active `torch.autocast` asks for, else as they are.

    An operator is opaque to autocast, which would otherwise act on its inside only.
    """
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x, *others
    dtype = torch.get_autocast_dtype(device)
    return x.to(dtype), *(None if tensor is None else tensor.to(dtype) for tensor in others)
