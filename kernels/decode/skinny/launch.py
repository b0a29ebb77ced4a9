"""Launches skinny products: segments in; grid, tiles and workspace out."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from blr.kernels.common.available import HALF, interpreted, shared_limit
from blr.kernels.decode.gemv.launch import launch_options, power_of_two
from blr.kernels.decode.gemv.segments import Segment
from blr.kernels.decode.quantized.formats import PLANES, grid_of
from blr.kernels.decode.quantized.segments import QuantizedSegment
from blr.kernels.decode.skinny.segments import SkinnyStage, SkinnyTile

AnySegment = Segment | QuantizedSegment
Order = tuple[int, int] | None
MOST = 64  # tokens
PLAIN = 16  # the bits of plain weights
PACKED = (8, 4, 3, 2)  # bits of the packed weights that these kernels take
# Of a launch, if it can, with packed and with plain weights: the best of those timed on an H200, as are
# the tiles of `tile_shape`, by whole tokens (scripts/log).
PROGRAMS = (900, 528)
FEW_ROWS = 8192  # of a launch of plain weights that has many small programs
WIDE_ROWS = 8192  # of one of packed weights whose programs have long parts
MANY_ROWS = 60000  # of one of packed weights, an output head, that fills the GPU by itself
LEAST = 16  # units of a step: columns that a product of tensor cores sums
DEEPEST = 16  # parts of a row at most
SPARE = 8 << 10  # bytes of shared memory for what else passes through it


class PartialSums:
    """Where programs that share a tile leave their sums, for all launches of one stream.

    It grows; what launches captured before hold stays as it is.
    """

    def __init__(self) -> None:
        self.held: list[tuple[Tensor, Tensor]] = []

    def take(self, sums: int, counters: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """`sums` numbers of float32, and int32 `counters`: zeros, which launches leave as zeros."""
        last = self.held[-1] if self.held else None
        if last is None or len(last[0]) < sums or len(last[1]) < counters:
            least = (0, 0) if last is None else (len(last[0]), len(last[1]))
            sizes = [power_of_two(max(*pair)) for pair in zip(least, (sums, counters), strict=True)]
            partial = torch.empty(sizes[0], dtype=torch.float32, device=device)
            self.held.append((partial, torch.zeros(sizes[1], dtype=torch.int32, device=device)))
        return self.held[-1]


def fits(segments: Sequence[AnySegment], dtype: torch.dtype) -> bool:
    """Whether these kernels take stages, of inputs prepared in `dtype`, the dtype of their weights."""
    return dtype in HALF and len({format_of(s) for s in segments}) == 1 and all(map(_fits, segments))


def bits_of(s: AnySegment) -> tuple[int, int]:
    """Bits and group of the weights, 16 and 0 of plain ones."""
    return (s.bits, s.group) if isinstance(s, QuantizedSegment) else (16, 0)


def format_of(s: AnySegment) -> tuple[int, int, bool]:
    """The same and whether the grid is curved: of all stages of a launch."""
    curved = isinstance(s, QuantizedSegment) and grid_of(s.bits, s.curved).curve != 0
    return *bits_of(s), curved


def _fits(s: AnySegment) -> bool:
    if s.mix is not None or len(s.x) > MOST:
        return False
    if isinstance(s, Segment):
        return s.w.dtype in HALF and s.w.stride(2) == 1
    halves = s.packed.stride(-1) == 1 and not any(n % 2 for n in s.packed.stride()[:-1])
    return s.bits in PACKED and halves and s.packed.data_ptr() % 2 == 0 and s.scale.stride(-1) == 1


def tile_shape(bits: int, group: int, rows: int, K: int, tokens: int) -> dict[str, int]:
    """Sizes of a program and its warps. rows: of all blocks and segments of the launch."""
    if bits != PLAIN:
        return _packed_shape(bits, group, rows, K, tokens)
    most, least = 4, 2
    if tokens <= 8 and rows <= FEW_ROWS:
        shape = {"BR": 16, "STEP": 256, "STAGES": 5, "num_warps": 1, "AHEAD": 4}
        most = DEEPEST
    else:
        shape = {"BR": 64, "STEP": 128 if tokens <= 16 else 64, "STAGES": 4, "num_warps": 4}
    steps = -(-K // shape["STEP"])
    return {**shape, "SPLIT": max(min(_parts(rows, shape["BR"], PROGRAMS[1]), most, steps // least), 1)}


def _packed_shape(bits: int, group: int, rows: int, K: int, tokens: int) -> dict[str, int]:
    """Of a few tokens: rows in as many parts as there are, with little in flight of each; of many rows
    that take long to unpack, in fewer. Of more tokens in few parts, whose sums weigh most."""
    several = max(LEAST // (group * PLANES[bits][0] // 16), 1)
    steps, slow = -(-K // (group * several)), tokens > 8
    parts = min(_parts(rows, 64, PROGRAMS[0]), steps // 2)
    if tokens > 16:
        parts, flight = min(parts, 4), {"STAGES": 4, "num_warps": 4}
    elif rows > MANY_ROWS or several > 1:
        flight = {"STAGES": 8 if several == 1 else 5, "num_warps": 2}
    elif rows > WIDE_ROWS and (bits == 4 or slow):
        flight = {"STAGES": 4, "num_warps": 4}
    else:
        two = bits == 4 or (bits == 3 and slow)
        parts, flight = steps, {"STAGES": 2, "num_warps": 4} if two else {"STAGES": 3, "num_warps": 2}
    return {"BR": 64, "STEP": several, "AHEAD": 4, "SPLIT": max(min(parts, DEEPEST), 1), **flight}


def _parts(rows: int, high: int, programs: int) -> int:
    """Into how many a row is split for so many programs of `high` rows: a power of two."""
    return power_of_two(programs // max(rows // high, 1) + 1) // 2


def fitted(
    shape: dict[str, int],
    form: tuple[int, int],
    slots: int,
    most: int,
    weights: int = 1,
    inputs: int = 1,
) -> dict[str, int]:
    """A `tile_shape` with as many STAGES as `most` bytes of shared memory hold.

    form: bits and group. weights, inputs: how many matrices of each a program streams. A step of packed
    weights has inputs of its own for every field and, where it is several groups, for every group.
    """
    (bits, group), step = form, shape["STEP"]
    low = 16 if bits == PLAIN else PLANES[bits][0]
    units = step if bits == PLAIN else step * group * low // 16 * len(PLANES[bits])
    copies = 1 if bits == PLAIN else step * (16 // low)
    held = 2 * units * (weights * shape["BR"] + inputs * copies * slots)
    return {**shape, "STAGES": max(min(shape["STAGES"], (most - SPARE) // held), 1)}


def grouped(
    segments: Sequence[AnySegment],
    workspace: PartialSums,
    *,
    add: bool = False,
    order: Order = None,
    pdl: bool = False,
    like: int | None = None,
    config: dict[str, int] | None = None,
) -> None:
    """`segments.grouped` of one to three stages of one format in one launch, of prepared inputs.

    Args:
        segments: of 1 to 64 tokens. corrections: of z that are there, U in plain numbers.
        add: to what the results hold. order: bits and group of the packed weights that read the results,
            in the order of whose fields they are stored. like: tokens of a launch in which a token has
            the same sums (None: of this one). config: of `tile_shape`, in its place.

    Raises:
        ValueError: too many tokens.
    """
    from blr.kernels.decode.skinny.triton import grouped_kernel

    tokens, form = checked_tokens(segments), bits_of(segments[0])
    total, slots = sum(rows_of(s) for s in segments), token_slots(tokens)
    K = max(map(width_of, segments))
    shape = tile_shape(*form, total, K, like or tokens) | (config or {})
    shape = fitted(shape, form, slots, shared_limit(segments[0].x.device))
    tiles = [tile_of(s, shape, order) for s in segments]
    stages = [stage_of(s) for s in segments]
    ends = [*accumulate(programs_of(s, t) for s, t in zip(stages, tiles, strict=True))]
    areas = ends[-1] * shape["BR"] * slots if shape["SPLIT"] > 1 else 1
    grouped_kernel[(ends[-1],)](
        *(*stages, *stages[:1] * 2)[:3],
        *(ends[0], ends[min(1, len(ends) - 1)]),
        *(*workspace.take(areas, ends[-1], segments[0].x.device), tokens),
        COUNT=len(segments),
        NP=slots,
        **dict(zip(("T0", "T1", "T2"), (*tiles, *tiles[:1] * 2), strict=False)),
        ADD=add,
        num_warps=shape["num_warps"],
        **launch_options(pdl),
    )


def dual(
    gate: AnySegment,
    up: AnySegment,
    workspace: PartialSums,
    *,
    activation: str,
    order: Order = None,
    pdl: bool = False,
    like: int | None = None,
    config: dict[str, int] | None = None,
) -> None:
    """`segments.dual` in one launch; arguments as of `grouped`."""
    from blr.kernels.decode.skinny.triton import dual_kernel

    tokens, form = checked_tokens((gate, up)), bits_of(gate)
    slots = token_slots(tokens)
    shared = gate.x.data_ptr() == up.x.data_ptr() and gate.x.shape == up.x.shape
    K = max(map(width_of, (gate, up)))
    shape = tile_shape(*form, rows_of(gate), K, like or tokens) | (config or {})
    shape = fitted(shape, form, slots, shared_limit(gate.x.device), 2, 1 if shared else 2)
    tiles = [tile_of(s, shape, order) for s in (gate, up)]
    stages = [stage_of(s) for s in (gate, up)]
    programs = programs_of(stages[0], tiles[0])
    areas = 2 * programs * shape["BR"] * slots if shape["SPLIT"] > 1 else 1
    dual_kernel[(programs,)](
        *stages,
        *(*workspace.take(areas, programs, gate.x.device), tokens),
        NP=slots,
        T0=tiles[0],
        T1=tiles[1],
        TOGETHER=width_of(gate) == width_of(up),
        SHARED=shared,
        ACT=activation,
        num_warps=shape["num_warps"],
        **launch_options(pdl),
    )


def checked_tokens(segments: Sequence[AnySegment]) -> int:
    """Tokens of a launch. Raises ValueError for none, or more than 64."""
    tokens = len(segments[0].x)
    if not 1 <= tokens <= MOST:
        raise ValueError(f"skinny products: {tokens} tokens; they take 1 to {MOST}")
    return tokens


def token_slots(tokens: int) -> int:
    """The number of tokens that the kernel for `tokens` is compiled for: 8, 16, 32 or 64."""
    return max(power_of_two(tokens), 8)


def rows_of(s: AnySegment) -> int:
    """Rows of all blocks."""
    blocks, rows, _ = s.packed.shape if isinstance(s, QuantizedSegment) else s.w.shape
    return int(blocks * rows)


def width_of(s: AnySegment) -> int:
    """Columns of a block."""
    return s.K if isinstance(s, QuantizedSegment) else int(s.w.shape[2])


def programs_of(stage: SkinnyStage, tile: SkinnyTile) -> int:
    """Programs of a stage."""
    return int(stage.blocks * -(-stage.rows // tile.BR) * tile.SPLIT)


def stage_of(s: AnySegment) -> SkinnyStage:
    """What kernels take of a segment, whose x is that of `prepare`."""
    if isinstance(s, QuantizedSegment):
        w, scale = s.packed.view(torch.int16), s.scale
        K = -(-s.K // s.group)
        padded, scales = K * s.group, (scale, scale.stride(0), scale.stride(1))
    else:
        w, padded, scales = s.w, s.w.shape[2], (s.w, 0, 0)
        K = padded
    blocks, rows, _ = w.shape
    x_block = 0 if s.x.shape[1] == padded else padded
    return SkinnyStage(
        *(s.x, s.x.stride(0), x_block, w, w.stride(0), w.stride(1), *scales),
        *(s.x if s.bias is None else s.bias, s.y, s.y.stride(0), rows, K, blocks, s.part or rows),
        *_correction(s),
    )


def _correction(s: AnySegment) -> tuple[Tensor, int, Tensor, int, int]:
    if isinstance(s, Segment) or s.correction is None:
        return s.x, 0, s.x, 0, 0
    u, z = s.correction.u.levels, s.correction.first.y
    return u, u.stride(1), z, z.stride(0), u.shape[2]


def tile_of(s: AnySegment, shape: dict[str, int], order: Order = None) -> SkinnyTile:
    """The tile of a shape."""
    (bits, group, curved), ranks = format_of(s), _correction(s)[4]
    return SkinnyTile(
        *(bits, group, shape["BR"], shape["STEP"], shape["SPLIT"], shape["STAGES"]),
        BIAS=s.bias is not None,
        FULL=(width_of(s) if bits == PLAIN else -(-width_of(s) // group)) % shape["STEP"] == 0,
        ASM=not interpreted() and torch.cuda.get_device_capability(s.x.device) >= (9, 0),
        RANKS=max(power_of_two(ranks), 16) if ranks else 0,
        LOW=16 if order is None else PLANES[order[0]][0],
        LOW_GROUP=0 if order is None else order[1],
        AHEAD=0 if interpreted() else shape.get("AHEAD", 0),
        CURVED=curved,
    )


def low_of(s: AnySegment) -> int:
    """Bits of the lowest plane of packed weights, 16 of plain ones."""
    return PLANES[s.bits][0] if isinstance(s, QuantizedSegment) else 16
