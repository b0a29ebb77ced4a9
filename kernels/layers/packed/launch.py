"""Launches the products of packed weights (`few.py`, `fused.py`): shapes in; grid, tiles and workspace
out."""

import functools
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from blr.kernels.common.dispatch import Plans
from blr.kernels.common.launching import launch
from blr.kernels.common.replay import Launches
from blr.kernels.decode.choice import SQUARE, chosen, stages
from blr.kernels.decode.gemv.segments import Correction, How, Narrow, QuantizedSegment, Segment
from blr.kernels.decode.quantized.formats import PLANES
from blr.kernels.layers.packed.unpacking import instructions, pieces_of

NAMES = {torch.bfloat16: "bf16", torch.float16: "f16"}
FILLED = 128  # programs that fill the GPU
REGISTERS = 128  # of a thread in three bits, of few tokens: a multiprocessor has room for four programs
FEW_ROWS = 64  # of a program of `few_product`
RANKS = 64  # of a correction that a product adds
SHARED = 226 << 10  # bytes of shared memory that the rings of a program may take

CAPTURED = 1 << 20  # numbers on a device for all that graphs capture; 4 MiB
COUNTERS = 1 << 12  # of a launch
_streams: dict[tuple[int, int], Tensor] = {}
_captured: dict[int, Tensor] = {}


class ProductTile(NamedTuple):
    """Sizes of a program.

    BR: rows of the weight. NP: tokens. SPLIT: programs that share a row. STAGES: pieces held at once.
    """

    BR: int
    NP: int
    SPLIT: int
    STAGES: int
    num_warps: int


def steps_of(K: int, bits: int, group: int) -> int:
    """How many steps a row of K columns takes; a step has sixteen words of the lowest plane."""
    return -(-(-(-K // group) * (group * PLANES[bits][0] // 32)) // 16)


def ring_bytes(bits: int, tile: ProductTile) -> int:
    """Bytes of shared memory of a program: inputs of STAGES pieces and words of their steps."""
    kept = -(-(tile.STAGES - 2) // pieces_of(bits)) + 1
    columns = 32 if bits == 8 else 64
    return tile.STAGES * tile.NP * columns * 2 + kept * tile.BR * 64 * len(PLANES[bits])


def even_split(steps: int, split: int) -> int:
    """The most parts up to `split` of which none is empty."""
    split = max(min(split, steps), 1)
    while (split - 1) * -(-steps // split) >= steps:
        split -= 1
    return split


@functools.cache
def default_tile(rows: int, K: int, bits: int, group: int, tokens: int) -> ProductTile:
    """The sizes that were the fastest on one H200 (scripts/log, 2026-11-27) for a weight [rows, K]."""
    few = rows * K <= SQUARE
    slots = 8
    while slots < min(tokens, 128 if few else 256):
        slots *= 2
    if slots <= 16:
        high, programs = 64, 1024  # bound by memory: many small ones hide its latency
    elif few:  # the last program of a tile adds up its parts: few of them
        high, programs = 64, FILLED
        while slots > 16 and 4 * _tiles(rows, high, tokens, slots) < FILLED:
            slots //= 2
    else:
        high, programs = (64, 264) if slots <= (128 if bits == 3 else 32) else (128, 132)
    split, tiles = 1, _tiles(rows, high, tokens, slots)
    while split < 8 and 2 * split * tiles <= programs:
        split *= 2
    split = even_split(steps_of(K, bits, group), split)
    tile = ProductTile(high, slots, split, 6, high // 16)
    while ring_bytes(bits, tile) > SHARED:
        tile = tile._replace(STAGES=tile.STAGES - 1)
    return tile


def _tiles(rows: int, high: int, tokens: int, slots: int) -> int:
    return -(-rows // high) * -(-tokens // slots)


def takes(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    v: Tensor | None,
    bits: int,
    group: int,
) -> bool:
    """Whether `product` can compute a layer's product and is the fastest way to."""
    if x.dtype not in NAMES or any(t is not None and t.dtype != x.dtype for t in (scale, bias, v)):
        return False
    if not (len(x) and len(packed)) or (v is not None and len(v) > RANKS):
        return False
    even = packed.data_ptr() % 16 == 0 and packed.stride(0) % 16 == 0 and packed.stride(1) == 1
    can = even and x.stride(1) == 1 and has_wgmma(x.device)
    return can and kernels_for(x, packed, bits, group) != "plain"


def kernels_for(x: Tensor, packed: Tensor, bits: int, group: int) -> str:
    """Those of `choice.LAYERS`; `few_product` takes whole groups and rows of 16 bytes."""
    (n, K), weights = x.shape, packed.shape[0] * x.shape[1]
    whole = not (K % group or x.stride(0) % 8 or x.data_ptr() % 16)
    return chosen("layers", bits, group, n, weights, K, *(() if whole else ("few",)))


@functools.cache
def has_wgmma(device: torch.device) -> bool:
    """Whether the kernel runs on a device: it needs a Hopper GPU and a Triton with Gluon."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    try:
        import blr.kernels.layers.packed.fused  # noqa: F401
    except (ImportError, AttributeError):
        return False
    return True


def product(
    x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None, u: Tensor | None, v: Tensor | None,
    bits: int, group: int, curved: bool,
) -> Tensor:  # fmt: skip
    """``x Wᵀ + bias + x Vᵀ Uᵀ`` [n, R] in the dtype of x, for what `takes` allows: of one token on the
    CUDA cores (`kernels/decode`), of more by `few_product` or `fused_product`.

    Args:
        x: [n, K], bfloat16 or float16, columns of stride 1. packed: [R, bytes], as
            `decode/quantized/reference.py` says. scale: [R, groups] and bias: [R], in the dtype of x.
            curved: which of the two grids of 3 bits.
        u: [R, r], v: [r, K], r up to `RANKS`: of a correction, in the dtype of x, contiguous.
    """
    given = (x, packed, scale, bias, u, v)
    lies = [None if t is None else (t.shape, t.stride(), t.dtype) for t in given]
    key = (bits, group, curved, x.device, x.data_ptr() % 16, *lies)
    plan = _PLANS.get(key)
    if plan is None:
        name = kernels_for(x, packed, bits, group)
        way = {"rows": _one_token, "few": few_product}.get(name, fused_product)
        run = Launches(partial(way, bits=bits, group=group, curved=curved))
        plan = _PLANS.keep(key, (run, -(-len(packed) // FEW_ROWS) if name == "few" else 0))
    run, counters = plan
    return run(*given, zero_counters(x.device, counters) if counters else None)


Plan = tuple[Launches[Tensor], int]  # what runs products of one shape, and the `zero_counters` it takes
_PLANS: Plans[Plan] = Plans()


def _one_token(
    x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None, u: Tensor | None, v: Tensor | None,
    counter: None = None, *, bits: int, group: int, curved: bool,
) -> Tensor:  # fmt: skip
    y = torch.empty(1, len(packed), dtype=x.dtype, device=x.device)
    correction = None
    if u is not None and v is not None:
        z = torch.empty(1, len(v), dtype=torch.float32, device=x.device)
        correction = Correction(Segment(x, v[None], z), Narrow(u[None]))
    weight = (packed[None], scale[None], bits, x.shape[1], y, bias, None, None, group)
    stages([QuantizedSegment(x, *weight, correction, curved)], How(pdl=True))()
    return y


def few_product(
    x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None, u: Tensor | None = None,
    v: Tensor | None = None, counter: Tensor | None = None, *, bits: int, group: int,
    curved: bool = True,
) -> Tensor:  # fmt: skip
    """`product` of 2 to 16 tokens by one kernel, and one before it for a correction. counter: of
    `zero_counters`, one for `FEW_ROWS` rows, or None: zeros are made."""
    from blr.kernels.layers.packed.few import few_kernel
    from blr.kernels.layers.packed.prepare import prepare, whole_ranks

    (tokens, K), rows = x.shape, len(packed)
    tiles, steps, slots = -(-rows // FEW_ROWS), K // group, 8 if tokens <= 8 else 16
    each = 4 if group == 128 and (slots == 8 or tiles > 128) else 8  # groups of a program
    split = -(-steps // each)
    y = partial = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    if split > 1:
        size = tiles * split * FEW_ROWS * slots
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
        if counter is None:
            counter = torch.zeros(tiles, dtype=torch.int32, device=x.device)
    z = None if v is None else prepare(x, bits, group, v, pdl=True, ordered=False).z
    launch(
        few_kernel,
        (tiles * split,),
        (
            *(x, x.stride(0), packed.view(torch.int32), packed.stride(0) // 4, scale, scale.stride(0)),
            *(y if bias is None else bias, y if u is None else u, 0 if u is None else u.stride(0)),
            *(y if z is None else z, y, y.stride(0), partial, y if counter is None else counter),
            *(tokens, rows, steps, 0 if v is None else len(v)),
        ),
        {
            **{"BITS": bits, "GROUP": group, "ASM": instructions(bits, curved, NAMES[x.dtype], False)},
            **{"NP": slots, "SPLIT": split, "EACH": each, "BIAS": bias is not None},
            **{"RANKS": whole_ranks(0 if v is None else len(v)), "PARTS": 1 if z is None else len(z)},
        },
        num_warps=4,
        **({} if z is None else {"launch_pdl": True}),
    )
    return y


def fused_product(
    x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None, u: Tensor | None = None,
    v: Tensor | None = None, counter: None = None, *, bits: int, group: int, curved: bool = True,
    tile: ProductTile | None = None,
) -> Tensor:  # fmt: skip
    """`product` by one kernel and one that prepares its inputs; tile: in place of `default_tile`'s."""
    from blr.kernels.layers.packed.fused import product_kernel
    from blr.kernels.layers.packed.prepare import prepare, whole_ranks

    (tokens, K), rows = x.shape, len(packed)
    tile = tile or default_tile(rows, K, bits, group, tokens)
    words = packed.view(torch.int32)
    y = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    tiles = -(-rows // tile.BR) * -(-tokens // tile.NP)
    partial = y
    if tile.SPLIT > 1:
        size = tiles * tile.SPLIT * tile.BR * tile.NP
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
    made = prepare(x, bits, group, v, tiles if tile.SPLIT > 1 else 0, pdl=True)
    z = y if made.z is None else made.z
    launch(
        product_kernel,
        (tiles * tile.SPLIT,),
        (
            *(made.x, made.x.stride(0), words, words.stride(0), scale, scale.stride(0)),
            *(y if bias is None else bias, y if u is None else u, 0 if u is None else u.stride(0), z),
            *(y, y.stride(0), partial, y if made.counter is None else made.counter),
            *(tokens, rows, K, 0 if v is None else len(v)),
        ),
        {
            **{"BITS": bits, "GROUP": group, "ASM": instructions(bits, curved, NAMES[x.dtype])},
            **{"BR": tile.BR, "NP": tile.NP, "SPLIT": tile.SPLIT, "STAGES": tile.STAGES},
            **{"WARPS": tile.num_warps, "BIAS": bias is not None},
            "FULL": steps_of(K, bits, group) * 512 // PLANES[bits][0] == -(-K // group) * group,
            "RANKS": whole_ranks(0 if v is None else len(v)),
            "PARTS": 1 if made.z is None else len(made.z),
            "WAIT": 0 if not made.launched else 2 if made.x is x else 1,
        },
        num_warps=tile.num_warps,
        **({"maxnreg": REGISTERS} if bits == 3 and tile.NP <= 16 else {}),
        **({"launch_pdl": True} if made.launched else {}),
    )
    return y


def zero_counters(device: torch.device, count: int) -> Tensor | None:
    """`count` zeros in int32 for the next launch on the current stream of a GPU, which leaves zeros.

    Launches of a stream share theirs; one that a CUDA graph captures, which may run beside others, has
    its own.

    None for more than `COUNTERS`, and while a graph is captured where none were prepared or are left.
    """
    if count > COUNTERS:
        return None
    number = device.index if device.index is not None else torch.cuda.current_device()
    if torch.cuda.is_current_stream_capturing():
        left = _captured.get(number)
        count = -(-count // 4) * 4  # the next ones begin at a multiple of 16 bytes
        if left is None or len(left) < count:
            return None
        _captured[number] = left[count:]
        return left[:count]
    if number not in _captured:
        _captured[number] = torch.zeros(CAPTURED, dtype=torch.int32, device=device)
    key = number, torch.cuda.current_stream(device).cuda_stream
    found = _streams.get(key)
    if found is None:
        found = _streams[key] = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
    return found
