"""Runs one product by the variant that the tables choose for its shape."""

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, partial
from typing import TypeVar

import torch
from torch import Tensor

from blr.kernels.common.available import kernel_device
from blr.kernels.common.replay import Again, Launches
from blr.kernels.common.tables import MOST, REFERENCE, Shape, bucket, choose, heuristic
from blr.kernels.common.tables import forget as forget_tables
from blr.kernels.common.transient import chunks, transient_bytes

MIXED = ("monarch", "blast")  # structures whose products have intermediates of blocks x tokens x ranks
FEWEST = 2048  # tokens of a chunk at least
# Variants that take x [..., i] as it is
ANY_AXES = (REFERENCE, "gemm", "plain", "bmm", "bmm_mix", "permuted_store")
STAGED = ("bmm_mix", "permuted_store")  # of these, those with a stage of launches only
PLANNED = 4096  # plans of a structure that are kept

Variant = Callable[..., Tensor]
Variants = Callable[[], Mapping[str, Variant]]
Plan = Callable[..., Tensor]  # (x, *factors, bias) -> y
Made = TypeVar("Made")


def dispatch(
    structure: str,
    shape: Shape,
    variants: Variants,
    reference: Variant,
    x: Tensor,
    factors: Sequence[Tensor],
    bias: Tensor | None,
    on_cpu: Variant | None = None,
) -> Tensor:
    """``reference(x, *factors, bias)`` for x [n, i], by a kernel where kernels run.

    What runs is decided at the first call for a shape and a power of two of n, and kept.

    Args:
        variants: gives the structure's VARIANTS; called only where kernels run, since variants
            may need Triton. One that a table names and this version lacks is replaced by the
            rule of thumb.
        on_cpu: what runs on a CPU in the reference's place.

    Returns:
        [n, o], contiguous, sharing no memory with an argument.

    Raises:
        TypeError: factors of another dtype than `x`. ValueError: another number of inputs.
    """
    _check(structure, shape, x, factors, bias)
    if x.shape[0] == 0:
        return x.new_zeros(0, shape.outputs)
    n = tokens = len(x)
    _, run, config = _chosen(structure, shape, bucket(n), x.dtype, x.device, variants, reference, on_cpu)
    if run is not on_cpu and structure in MIXED:
        tokens = _tokens(shape, x.dtype, x.device.type)
    if n <= tokens:
        return run(x, *factors, bias=bias, **config).contiguous()
    y = x.new_empty(n, shape.outputs)
    for start, stop in chunks(n, tokens):
        y[start:stop] = run(x[start:stop], *factors, bias=bias, **config)
    return y


def plan(
    structure: str,
    shape: Shape,
    variants: Variants,
    reference: Variant,
    x: Tensor,
    factors: Sequence[Tensor],
    bias: Tensor | None,
    on_cpu: Variant | None = None,
) -> Plan:
    """What `dispatch` does for x [..., i], decided once for all tensors of these shapes and dtypes: a
    function of (x, *factors, bias), which gives [..., o]. Arguments and errors as of `dispatch`."""
    _check(structure, shape, x, factors, bias)
    n = x.numel() // shape.inputs
    if n == 0 or (structure in MIXED and n > FEWEST):
        return partial(_dispatched, structure, shape, variants, reference, on_cpu)
    given = x.dtype, x.device, variants, reference, on_cpu
    name, run, config = _chosen(structure, shape, bucket(n), *given)
    call = partial(run, **config) if config else run
    replays = x.is_cuda and x.dtype.itemsize == 2  # others may change their precision
    if name in ANY_AXES and run is not on_cpu:
        return partial(call, by=Again()) if name in STAGED and replays else call
    flat = partial(_flat, call)
    return Launches(flat) if name in MOST and replays else flat


class Plans(dict[Hashable, Made]):
    """Plans by what they depend on; all of them go at `forget`, and where there are too many."""

    def __init__(self) -> None:
        super().__init__()
        _CLEARS.append(self.clear)

    def keep(self, key: Hashable, made: Made) -> Made:
        """`made`, known from now on."""
        if len(self) >= PLANNED:
            self.clear()
        self[key] = made
        return made


_CLEARS: list[Callable[[], None]] = []  # of all plans


def _dispatched(
    structure: str, shape: Shape, variants: Variants, reference: Variant, on_cpu: Variant | None,
    x: Tensor, *rest: Tensor,
) -> Tensor:  # fmt: skip
    (*factors, bias), flat = rest, x.reshape(-1, x.shape[-1])
    y = dispatch(structure, shape, variants, reference, flat, factors, bias, on_cpu)
    return y.view(*x.shape[:-1], y.shape[-1])


def _flat(call: Variant, x: Tensor, *rest: object) -> Tensor:
    *factors, bias = rest
    if x.dim() == 2:
        return call(x, *factors, bias=bias).contiguous()
    y = call(x.reshape(-1, x.shape[-1]), *factors, bias=bias)
    return y.contiguous().view(*x.shape[:-1], y.shape[-1])


def _check(
    structure: str, shape: Shape, x: Tensor, factors: Sequence[Tensor], bias: Tensor | None
) -> None:
    """What kernels would not notice."""
    for tensor in factors if bias is None else (*factors, bias):
        if tensor.dtype != x.dtype:
            raise TypeError(f"{structure}: input {x.dtype} and factors {tensor.dtype}: cast one of them")
    if x.shape[-1] != shape.inputs:
        raise ValueError(f"{structure}: inputs of {x.shape[-1]} features, expected {shape.inputs}")


def _tokens(shape: Shape, dtype: torch.dtype, device: str) -> int:
    """How many tokens BLR_TRANSIENT has room for at a time: those whose two intermediates [blocks, n,
    rank] are within it, and at least `FEWEST`, below which products of blocks are slower."""
    bound = transient_bytes(device)
    if bound is None:
        return sys.maxsize
    return max(FEWEST, bound // max(2 * shape.blocks * shape.rank * dtype.itemsize, 1))


def forget() -> None:
    """Read tables and BLR_KERNELS again at the next call."""
    _chosen.cache_clear()
    for clear in _CLEARS:
        clear()
    forget_tables()


@cache
def _chosen(
    structure: str,
    shape: Shape,
    n: int,
    dtype: torch.dtype,
    device: torch.device,
    variants: Variants,
    reference: Variant,
    on_cpu: Variant | None,
) -> tuple[str, Variant, dict[str, object]]:
    reference = on_cpu if on_cpu is not None and device.type == "cpu" else reference
    wrong = device.type == "cpu" and dtype == torch.bfloat16  # in Triton's interpreter
    if wrong or not kernel_device(torch.empty(0, device=device)):
        return REFERENCE, reference, {}
    variant, config = choose(structure, shape, n, dtype, device)
    table = variants() if variant != REFERENCE else {}
    if variant not in table:
        variant, config = heuristic(structure, n, dtype)
    return (variant, table[variant], config) if variant in table else (REFERENCE, reference, {})
