"""Products with the packed weights of experts that tokens choose: operators `blr::expert_products`,
`blr::expert_mixed`, `blr::expert_weights`, `blr::expert_low_rank` and `blr::expert_sums`.

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
from blr.kernels.decode.quantized.formats import PLANES, form_of, grid_of
from blr.kernels.decode.quantized.launch import CHUNK, QuantizedTile, takes_offsets
from blr.kernels.fused.launch import gated

ALIGNED = 16  # bytes
FACTOR = 4096, 2048, 8  # numbers of a factor that a program has at once, columns and rows at most
DEEP, DEEP_GATED, DEEP_MIXED = 4, 4, 1  # rows of a thread: alone, of gate and up each, of each expert
WARPS = 4  # of these programs
MOST_MIXED = 8  # experts of a token whose products one program sums
SUMMED = 1024  # columns of a program of sums
SUMMED_AT_ONCE = 128, 128, 64  # pairs, rows and columns of a factor that a program of many tokens has
LOW_RANK_WARPS, LOW_RANK_STAGES = 8, 3
U, V = 2, 3  # where a table has them
GATES = {"swiglu": "silu", "geglu": "gelu_tanh"}  # what kernels call the activations of gates


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


def expert_products(
    x: Tensor, chosen: Tensor, stack: Stack, gate: str = "", early: bool = False
) -> Tensor:
    """The products [pairs, P · R] of few pairs of a token and an expert, in the dtype of x.

    Args:
        x: [n, K] of stride 1, in the dtype of the scales. chosen: int64 [pairs], the expert of each
            pair; pairs are a multiple of n, those of a token side by side.
        gate: the name in `GATES` of what makes [pairs, P · R / 2] of them, the first half being the
            gate's; "" for none. early: whether nothing has written `chosen` since the kernel ahead of
            this began.
    """
    if gate and not stack.bits:
        left, right = apply(_PRODUCTS, x, chosen, *stack, "", early).chunk(2, -1)
        return gated(left, right, gate)
    return apply(_PRODUCTS, x, chosen, *stack, GATES[gate] if gate else "", early)


def expert_mixed(x: Tensor, chosen: Tensor, weights: Tensor, stack: Stack) -> Tensor:
    """The sums [n, R] of the products of x [n · k, K] with the experts `chosen` [n · k] times `weights`
    [n, k]. No kernel may write the last two while the one ahead of this runs."""
    if not mixes(stack, weights.shape[-1]):
        return expert_sums(expert_products(x, chosen, stack, early=True), None, weights)
    return apply(_MIXED, x, chosen, weights, *stack)


def add_mixed(x: Tensor, chosen: Tensor, weights: Tensor, stack: Stack, y: Tensor) -> None:
    """Add `expert_mixed` to y [n, R] of stride 1 in any dtype, by one kernel. Only where `mixes` allows
    it."""
    _mix(x, chosen, weights, stack, y, True)


def mixes(stack: Stack, count: int) -> bool:
    """Whether one kernel sums the products of `count` experts of a token."""
    return stack.bits > 0 and stack.addresses.shape[1] == 1 and count <= MOST_MIXED


def expert_weights(ends: Tensor, stack: Stack, like: Tensor) -> Tensor:
    """The plain weights [E, P · R, K] without their corrections, in the dtype of `like`; of experts
    without tokens whatever is there. ends: int32 [E], the tokens up to each expert. Not of low rank."""
    return apply(_WEIGHTS, like, ends, *stack)


def expert_low_rank(
    x: Tensor, index: Tensor | None, ends: Tensor, base: Tensor | None, stack: Stack
) -> Tensor:
    """The products [pairs, P · R] of many pairs, in the order of their experts, with low rank or with
    corrections, in the dtype of x; plus `base` [pairs, P · R].

    Args:
        x: [n, K] of stride 1, in the dtype of the factors: of each pair, or those at index, int64
            [pairs]. ends: of `expert_weights`.
    """
    return apply(_LOW_RANK, x, index, ends, base, *stack)


def expert_sums(found: Tensor, places: Tensor | None, weights: Tensor) -> Tensor:
    """The weighted sums [n, R] of the rows of `found` [pairs, R] at `places`, int64 [n, k], or in their
    order; weights: [n, k]."""
    return apply(_SUMS, found, places, weights)


def _run_products(x: Tensor, chosen: Tensor, addresses: Tensor, rows: int, K: int, bits: int, group: int,
                  curved: bool, ranks: int, even: bool, act: str, early: bool) -> Tensor:  # fmt: skip
    from blr.kernels.layers.experts.triton import products_kernel

    stack = Stack(addresses, rows, K, bits, group, curved, ranks, even)
    pairs, parts = len(chosen), addresses.shape[1]
    each, options = pairs // max(len(x), 1), _launched(x)
    z = _factor(V, x, each, chosen, stack, early) if ranks else x
    if not bits:
        return _factor(U, z, each, chosen, stack, True, x.dtype)
    width, high = (parts * rows // 2, parts * rows // 2) if act else (parts * rows, rows)
    y = torch.empty(pairs, width, dtype=x.dtype, device=x.device)
    tile = _tile(stack, high, DEEP_GATED if act else DEEP, x.dtype)
    constants = {"PARTS": parts, "ACT": act, "T": tile, "EARLY": bool(ranks) or early}
    launch(
        products_kernel,
        (width // high * -(-high // tile.BR), pairs),
        (x, x.stride(0), each, addresses, chosen, z, y, rows, K, *_steps(stack, tile)),
        {**constants, "PDL": "launch_pdl" in options},
        num_warps=WARPS,
        **options,
    )
    return y


def _mix(x: Tensor, chosen: Tensor, weights: Tensor, stack: Stack, y: Tensor, add: bool) -> None:
    from blr.kernels.layers.experts.triton import mixed_kernel

    z = _factor(V, x, 1, chosen, stack, True) if stack.ranks else x
    tile, options = _tile(stack, stack.rows, DEEP_MIXED, x.dtype), _launched(x)
    arguments = (x, stack.addresses, chosen, weights, z, y, y.stride(0), stack.rows, stack.K)
    launch(
        mixed_kernel,
        (-(-stack.rows // tile.BR), len(weights)),
        (*arguments, *_steps(stack, tile)),
        {"COUNT": weights.shape[-1], "ADD": add, "T": tile, "PDL": "launch_pdl" in options},
        num_warps=WARPS,
        **options,
    )


def _run_mixed(x: Tensor, chosen: Tensor, weights: Tensor, *of: object) -> Tensor:
    stack = Stack._make(of)
    y = torch.empty(len(weights), stack.rows, dtype=x.dtype, device=x.device)
    _mix(x, chosen, weights.contiguous(), stack, y, False)
    return y


def _factor(kind: int, x: Tensor, each: int, chosen: Tensor, stack: Stack, early: bool,
            dtype: torch.dtype = torch.float32) -> Tensor:  # fmt: skip
    """V x [pairs, P, ranks], or U of that [pairs, P · R] in `dtype`; ranks beside packed weights are a
    power of two. each: pairs of a row of x."""
    from blr.kernels.layers.experts.triton import factor_kernel

    parts, first = stack.addresses.shape[1], kind == V
    rows = _ranks(stack) if first else stack.rows
    shape = (len(chosen), parts, rows) if first else (len(chosen), parts * rows)
    y = torch.empty(shape, dtype=dtype, device=x.device)
    like, (most, columns, high) = x if first else y, FACTOR
    wide = min(power_of_two(stack.K if first else stack.ranks), columns)
    sizes = {"BR": min(power_of_two(rows), max(most // wide, 1), high), "BK": wide}
    options = _launched(x)
    constants = {"PARTS": parts, "KIND": kind, "EVEN": stack.even, **sizes, "EARLY": early}
    launch(
        factor_kernel,
        (parts * -(-rows // sizes["BR"]), len(chosen)),
        (x, x.stride(0 if first else -2), each, stack.addresses, chosen, like, y, rows, stack.K),
        {**constants, "PDL": "launch_pdl" in options},
        num_warps=4,
        **options,
    )
    return y


def _launched(x: Tensor) -> dict[str, bool]:
    """What a launch needs that begins while the kernel ahead ends."""
    return {"launch_pdl": True} if supports_pdl(x.device) else {}


def _ranks(stack: Stack) -> int:
    return power_of_two(stack.ranks) if stack.ranks and stack.bits else stack.ranks


def _steps(stack: Stack, tile: QuantizedTile) -> tuple[int, int]:
    """From a row to the next one, of words in the tile's units and of scales."""
    groups = -(-stack.K // stack.group)
    return groups * stack.group * stack.bits // 32 // tile.UNIT, groups


def _tile(stack: Stack, rows: int, deep: int, dtype: torch.dtype) -> QuantizedTile:
    """What a program has of `rows` of a layer with scales in `dtype`, `deep` rows a thread."""
    form = form_of(stack.bits, stack.group, stack.curved)
    quads = form.quads(stack.K)
    chunk = min(max(power_of_two(quads), 4), CHUNK[stack.bits])
    beside = max(32 * WARPS // chunk, 1)
    high = max(min(deep * beside, power_of_two(rows)), beside)
    full = rows % high == 0 and quads == chunk and stack.K % stack.group == 0
    unit = 4 if -(-stack.K // stack.group) * stack.group * stack.bits // 32 % 4 == 0 else 1
    exact, sizes = takes_offsets(form, dtype), (*form, high, chunk, beside, quads <= chunk)
    return QuantizedTile(*sizes, UNIT=unit, RANKS=_ranks(stack), FULL=full, EXACT=exact)


def _run_weights(like: Tensor, ends: Tensor, addresses: Tensor, rows: int, K: int, bits: int, group: int,
                 curved: bool, *_: object) -> Tensor:  # fmt: skip
    from blr.kernels.layers.experts.triton import plain_kernel
    from blr.kernels.layers.packed.triton import ROWS

    (experts, parts), grid = addresses.shape[:2], grid_of(bits, curved)
    groups = -(-K // group)
    y = torch.empty(experts, parts * rows, K, dtype=like.dtype, device=like.device)
    constants: dict[str, object] = {"PARTS": parts, "BITS": bits, "GROUP": group, "LOW": PLANES[bits][0]}
    launch(
        plain_kernel,
        (-(-rows // ROWS), groups, experts * parts),
        (addresses, ends, y, rows, K, groups * group * bits // 32, groups),
        {**constants, "MIDDLE": grid.offset, "CURVED": grid.curve != 0, "BR": ROWS},
        num_warps=4,
    )
    return y


def _run_low_rank(x: Tensor, index: Tensor | None, ends: Tensor, base: Tensor | None,
                  *of: object) -> Tensor:  # fmt: skip
    stack = Stack._make(of)
    pairs, parts = len(x if index is None else index), stack.addresses.shape[1]
    ranks = _in_steps(stack.ranks)
    z = torch.empty(pairs, parts * ranks, dtype=x.dtype, device=x.device)
    y = torch.empty(pairs, parts * stack.rows, dtype=x.dtype, device=x.device)
    _grouped_factor(V, x, index, ends, None, stack, z)
    _grouped_factor(U, z, None, ends, base, stack, y)
    return y


def _in_steps(ranks: int) -> int:
    """`ranks` as a multiple of what tensor cores take."""
    return -(-ranks // 16) * 16


def _grouped_factor(kind: int, x: Tensor, index: Tensor | None, ends: Tensor, base: Tensor | None,
                    stack: Stack, y: Tensor) -> None:  # fmt: skip
    """Products of sorted pairs with V, or of these with U, into y [pairs, P · rows]."""
    from blr.kernels.layers.experts.triton import low_rank_kernel

    (experts, parts, _), ranks = stack.addresses.shape, _in_steps(stack.ranks)
    rows, width = (ranks, stack.K) if kind == V else (stack.rows, ranks)
    high, wide, deep = SUMMED_AT_ONCE
    sizes = {
        "BM": high,
        "BN": min(wide, max(power_of_two(rows), 16)),
        "BK": min(deep, max(power_of_two(width), 16)),
    }
    constants: dict[str, object] = {"PARTS": parts, "KIND": kind, "EVEN": stack.even}
    constants |= {"INDEXED": index is not None, "ADD": base is not None, **sizes}
    grid = parts * -(-rows // sizes["BN"]), -(-len(y) // high) + experts
    given = (x, x.stride(0), 0 if kind == V else ranks, x if index is None else index, ends)
    more = (stack.addresses, y, y if base is None else base, y, y.stride(0), rows, stack.K, experts)
    options = {"num_warps": LOW_RANK_WARPS, "num_stages": LOW_RANK_STAGES}
    launch(low_rank_kernel, grid, (*given, *more), {**constants, "BE": power_of_two(experts)}, **options)


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


def _fake_products(x: Tensor, chosen: Tensor, addresses: Tensor, rows: int, *more: object) -> Tensor:
    return x.new_empty(len(chosen), addresses.shape[1] * rows // (2 if more[-2] else 1))


def _fake_mixed(x: Tensor, _: Tensor, weights: Tensor, __: Tensor, rows: int, *___: object) -> Tensor:
    return x.new_empty(len(weights), rows)


def _fake_low_rank(x: Tensor, index: Tensor | None, _: Tensor, __: Tensor | None, addresses: Tensor,
                   rows: int, *___: object) -> Tensor:  # fmt: skip
    return x.new_empty(len(x if index is None else index), addresses.shape[1] * rows)


def _fake_weights(like: Tensor, _: Tensor, addresses: Tensor, rows: int, K: int, *__: object) -> Tensor:
    return like.new_empty(addresses.shape[0], addresses.shape[1] * rows, K)


_FORM = "Tensor addresses, int rows, int K, int bits, int group, bool curved, int ranks, bool even"
_PRODUCTS = register(
    "expert_products", f"(Tensor x, Tensor chosen, {_FORM}, str act, bool early) -> Tensor",
    _run_products, _fake_products, None, None, _run_products,
)  # fmt: skip
_MIXED = register(
    "expert_mixed", f"(Tensor x, Tensor chosen, Tensor weights, {_FORM}) -> Tensor",
    _run_mixed, _fake_mixed, None, None, _run_mixed,
)  # fmt: skip
_WEIGHTS = register(
    "expert_weights", f"(Tensor like, Tensor ends, {_FORM}) -> Tensor",
    _run_weights, _fake_weights, None, None, _run_weights,
)  # fmt: skip
_LOW_RANK = register(
    "expert_low_rank", f"(Tensor x, Tensor? index, Tensor ends, Tensor? base, {_FORM}) -> Tensor",
    _run_low_rank, _fake_low_rank, None, None, _run_low_rank,
)  # fmt: skip
_SUMS = register(
    "expert_sums", "(Tensor found, Tensor? places, Tensor weights) -> Tensor",
    _run_sums, _fake_sums, None, None, _run_sums,
)  # fmt: skip
