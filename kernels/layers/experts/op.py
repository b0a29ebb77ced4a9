"""Products with the packed weights of experts that tokens choose: operators `blr::expert_products`,
`blr::expert_weights` and `blr::expert_sums`.

A launch takes all experts of a stack wherever their tensors lie, by a table of addresses. So nothing is
copied, and a launch that a CUDA graph holds serves whichever experts later tokens choose.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from blr.kernels.common.available import supports_pdl
from blr.kernels.common.launching import launch
from blr.kernels.common.registration import apply, register
from blr.kernels.decode.gemv.launch import power_of_two
from blr.kernels.decode.quantized.formats import GROUP, PLANES, form_of, grid_of
from blr.kernels.decode.quantized.launch import QuantizedTile, complete, tile_shape
from blr.kernels.layers.packed.prepare import whole_ranks

ALIGNED = 16  # bytes
STEP, FACTOR_ROWS = 256, 8  # columns of a step of a factor, and rows of a program
SUMMED = 1024  # columns of a program of sums
PLAIN_ROWS, RANKS_AT_ONCE = 128, 64  # of a program that makes low rank plain
U, V = 2, 3  # where a table has them


class Weight(NamedTuple):
    """The weight of one layer: packed [R, bytes] and scale [R, groups], None of plain low rank; u [R, r]
    and v [r, K] of low rank or a correction, or None."""

    packed: Tensor | None
    scale: Tensor | None
    u: Tensor | None = None
    v: Tensor | None = None

    @property
    def is_readable(self) -> bool:
        """Whether kernels can read it where it lies."""
        whole = all(t is None or t.is_contiguous() for t in self[:2])
        rows = all(t is None or t.stride(-1) == 1 for t in self[2:])
        return whole and rows and all(t is None or t.data_ptr() % ALIGNED == 0 for t in self)

    def entries(self) -> list[int]:
        """What the table of addresses says of it."""
        ranks = 0 if self.v is None else len(self.v)
        steps = [0 if t is None else t.stride(0) for t in (self.u, self.v)]
        return [*(0 if t is None else t.data_ptr() for t in self), ranks, *steps]


class Stack(NamedTuple):
    """The weights of all experts in one place of a block, P layers each, whose outputs are joined.

    addresses: int64 [E, P, 7], see `triton.py`. rows, K: of a layer. bits: 0 of low rank. ranks: the
    most of a layer. even: whether rows of factors are multiples of 8 numbers apart.
    """

    addresses: Tensor
    rows: int
    K: int
    bits: int
    group: int
    curved: bool
    ranks: int
    even: bool


def stack_of(
    weights: Sequence[Sequence[Weight]], rows: int, K: int, bits: int, group: int, curved: bool
) -> Stack:
    """The stack of [E][P] weights of one format, on one device and in one dtype. All are readable, and
    must live as long as the stack."""
    places = [[weight.entries() for weight in parts] for parts in weights]
    ranks = max(entry[4] for parts in places for entry in parts)
    even = all(step % 8 == 0 for parts in places for entry in parts for step in entry[5:])
    device = next(t for t in weights[0][0] if t is not None).device
    return Stack(torch.tensor(places, device=device), rows, K, bits, group, curved, ranks, even)


def expert_products(x: Tensor, chosen: Tensor, stack: Stack) -> Tensor:
    """The products [pairs, P · R] of few pairs of a token and an expert, in the dtype of x.

    Args:
        x: [n, K] of stride 1, in the dtype of the scales. chosen: int64 [pairs], the expert of each
            pair; pairs are a multiple of n, those of a token side by side.
    """
    return apply(_PRODUCTS, x, chosen, *stack)


def expert_weights(ends: Tensor, stack: Stack, like: Tensor) -> Tensor:
    """The plain weights [E, P · R, K] with their corrections, in the dtype of `like`; of experts without
    tokens whatever is there. ends: int32 [E], the tokens up to each expert."""
    return apply(_WEIGHTS, like, ends, *stack)


def expert_sums(found: Tensor, places: Tensor | None, weights: Tensor) -> Tensor:
    """The weighted sums [n, R] of the rows of `found` [pairs, R] at `places`, int64 [n, k], or in their
    order; weights: [n, k]."""
    return apply(_SUMS, found, places, weights)


def _run_products(x: Tensor, chosen: Tensor, addresses: Tensor, rows: int, K: int, bits: int, group: int,
                  curved: bool, ranks: int, even: bool) -> Tensor:  # fmt: skip
    from blr.kernels.layers.experts.triton import factor_kernel, products_kernel

    pairs, parts, pdl = len(chosen), addresses.shape[1], supports_pdl(x.device)
    early = {"launch_pdl": True} if pdl else {}
    y = z = torch.empty(pairs, parts * rows, dtype=x.dtype, device=x.device)
    wide = power_of_two(ranks) if ranks and bits else ranks
    inputs = x, x.stride(0), pairs // max(len(x), 1), addresses, chosen

    def factor(kind: int, given: Tensor, step: int, into: Tensor, count: int) -> None:
        sizes = {"PARTS": parts, "KIND": kind, "EVEN": even, "BR": min(power_of_two(count), FACTOR_ROWS)}
        arguments = given, step, *inputs[2:], x, into, count, K
        grid = parts * -(-count // sizes["BR"]), pairs
        launch(factor_kernel, grid, arguments, {**sizes, "BK": STEP, "PDL": pdl}, num_warps=4, **early)

    if ranks:
        z = torch.empty(pairs, parts, wide, dtype=torch.float32, device=x.device)
        factor(V, x, x.stride(0), z, wide)
    if not bits:
        factor(U, z, wide, y, rows)
        return y
    tile, warps = _tile(rows, K, bits, group, curved, pairs * parts, wide)
    w_row = -(-K // group) * group * bits // 32
    launch(
        products_kernel,
        (parts * -(-rows // tile.BR), pairs),
        (*inputs, z, y, rows, K, w_row // tile.UNIT, -(-K // group)),
        {"PARTS": parts, "T": tile, "PDL": pdl},
        num_warps=warps,
        **early,
    )
    return y


def _tile(
    rows: int, K: int, bits: int, group: int, curved: bool, layers: int, ranks: int
) -> tuple[QuantizedTile, int]:
    """What a program of a launch over so many layers has, and its warps."""
    form, shape = form_of(bits, group, curved), tile_shape(rows, K, bits, rows * layers, group)
    shape = complete(shape, shape["num_warps"])
    quads, w_row = form.quads(K), -(-K // group) * group * bits // 32
    full = rows % shape["BR"] == 0 and quads == shape["BQ"] and K % group == 0
    sizes = shape["BR"], shape["BQ"], shape["T"]
    unit = 4 if w_row % 4 == 0 else 1
    tile = QuantizedTile(*form, *sizes, ONE=quads <= shape["BQ"], UNIT=unit, RANKS=ranks, FULL=full)
    return tile, shape["num_warps"]


def _run_weights(like: Tensor, ends: Tensor, addresses: Tensor, rows: int, K: int, bits: int, group: int,
                 curved: bool, ranks: int, even: bool) -> Tensor:  # fmt: skip
    from blr.kernels.layers.experts.triton import plain_kernel
    from blr.kernels.layers.packed.triton import ROWS

    (experts, parts, _), group = addresses.shape, group or GROUP
    groups, grid = -(-K // group), grid_of(bits, curved) if bits else None
    y = torch.empty(experts, parts * rows, K, dtype=like.dtype, device=like.device)
    low, middle, bent = (PLANES[bits][0], grid.offset, grid.curve != 0) if grid else (0, 0, False)
    constants: dict[str, object] = {"PARTS": parts, "BITS": bits, "GROUP": group, "LOW": low}
    constants |= {"MIDDLE": middle, "CURVED": bent, "RANKS": min(whole_ranks(ranks), RANKS_AT_ONCE)}
    height, warps = (ROWS, 4) if bits else (PLAIN_ROWS, 8)
    launch(
        plain_kernel,
        (-(-rows // height), groups, experts * parts),
        (addresses, ends, y, rows, K, groups * group * bits // 32, groups),
        {**constants, "EVEN": even, "BR": height},
        num_warps=warps,
    )
    return y


def _run_sums(found: Tensor, places: Tensor | None, weights: Tensor) -> Tensor:
    from blr.kernels.layers.experts.triton import sums_kernel

    y = torch.empty(len(weights), found.shape[1], dtype=found.dtype, device=found.device)
    grid = -(-y.shape[1] // SUMMED), len(weights)
    arguments = found, found if places is None else places, weights.contiguous(), y, y.shape[1]
    constants = {"K": weights.shape[1], "PLACED": places is not None, "BC": SUMMED}
    launch(sums_kernel, grid, arguments, constants, num_warps=4)
    return y


def _fake_sums(found: Tensor, places: Tensor | None, weights: Tensor) -> Tensor:
    return found.new_empty(len(weights), found.shape[1])


def _fake_products(x: Tensor, chosen: Tensor, addresses: Tensor, rows: int, *_: object) -> Tensor:
    return x.new_empty(len(chosen), addresses.shape[1] * rows)


def _fake_weights(like: Tensor, _: Tensor, addresses: Tensor, rows: int, K: int, *__: object) -> Tensor:
    return like.new_empty(addresses.shape[0], addresses.shape[1] * rows, K)


_FORM = "Tensor addresses, int rows, int K, int bits, int group, bool curved, int ranks, bool even)"
_FORM += " -> Tensor"
_PRODUCTS = register(
    "expert_products", f"(Tensor x, Tensor chosen, {_FORM}",
    _run_products, _fake_products, None, None, _run_products,
)  # fmt: skip
_WEIGHTS = register(
    "expert_weights", f"(Tensor like, Tensor ends, {_FORM}",
    _run_weights, _fake_weights, None, None, _run_weights,
)  # fmt: skip
_SUMS = register(
    "expert_sums", "(Tensor found, Tensor? places, Tensor weights) -> Tensor",
    _run_sums, _fake_sums, None, None, _run_sums,
)  # fmt: skip
