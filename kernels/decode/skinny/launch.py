"""Launches skinny products: segments in; grid, tiles and workspace out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from blr.kernels.common.available import HALF, interpreted, shared_limit
from blr.kernels.decode.gemv.launch import NO_CONFIG, launch_options, numbered, power_of_two, three
from blr.kernels.decode.gemv.segments import PLAIN, AnySegment, How, Segment
from blr.kernels.decode.quantized.formats import PLANES

Order = tuple[int, int] | None
MOST = 64  # tokens
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


class SkinnyStage(NamedTuple):
    """What kernels take of a stage: pointers, strides and sizes, in elements of what they point to.

    w: plain numbers, or packed weights in units of 16 bits. K: columns, or groups of packed weights.
    u [rows, ranks], z [n, ranks]: what corrects the result. The rest as of
    `gemv.launch.Stage`.
    """

    x: Tensor
    x_token: int
    x_block: int
    w: Tensor
    w_block: int
    w_row: int
    scale: object
    scale_block: int
    scale_row: int
    bias: Tensor
    y: Tensor
    y_token: int
    rows: int
    K: int
    blocks: int
    part: int
    u: object
    u_row: int
    z: Tensor
    z_token: int
    ranks: int


class SkinnyTile(NamedTuple):
    """What the code of a stage is specialized by: bits of a weight and columns of a GROUP; rows BR of a
    program's tile; columns, or groups of packed weights, of a STEP; programs that SPLIT a row; STAGES of
    steps that are on their way; whether there is a BIAS; whether every step of a row is FULL; whether
    fields are unpacked by instructions of the GPU (ASM); the power of two RANKS of a correction or 0;
    lines of a row that are asked for AHEAD of its inputs; LOW and LOW_GROUP of the packed weights in
    whose order results are stored, or 16; whether the grid of the weights is CURVED."""

    BITS: int
    GROUP: int
    BR: int
    STEP: int
    SPLIT: int
    STAGES: int
    BIAS: bool = False
    FULL: bool = False
    ASM: bool = True
    RANKS: int = 0
    AHEAD: int = 0
    LOW: int = 16
    LOW_GROUP: int = 0
    CURVED: bool = False


class PartialSums:
    """Where programs that share a tile leave their sums, for all launches of one stream.

    It grows; what launches captured before hold stays as it is.
    """

    def __init__(self, held: list[tuple[Tensor, Tensor]] | None = None) -> None:
        self.held = [] if held is None else held

    def take(self, sums: int, counters: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """`sums` numbers of float32, and int32 `counters`: zeros, which launches leave as zeros."""
        last = self.held[-1] if self.held else None
        if last is None or len(last[0]) < sums or len(last[1]) < counters:
            least = (0, 0) if last is None else (len(last[0]), len(last[1]))
            sizes = [power_of_two(max(*pair)) for pair in zip(least, (sums, counters), strict=True)]
            partial = torch.empty(sizes[0], dtype=torch.float32, device=device)
            self.held.append((partial, torch.zeros(sizes[1], dtype=torch.int32, device=device)))
        return self.held[-1]


@dataclass(frozen=True)
class OnCores(How):
    """How stages run on tensor cores. dtype: of the model. order: bits and group of the packed weights
    that read the results, in the order of whose fields they are stored. ordered: whether inputs are
    there in the order of these weights. like: tokens of a launch in which a token has the same sums
    (None: of this one)."""

    workspace: PartialSums = field(default_factory=PartialSums)
    dtype: torch.dtype = torch.float16
    order: Order = None
    ordered: bool = False
    like: int | None = None


def fits(segments: Sequence[AnySegment], dtype: torch.dtype) -> bool:
    """Whether these kernels take stages, of inputs prepared in `dtype`, the dtype of their weights."""
    return dtype in HALF and len({s.format for s in segments}) == 1 and all(map(_fits, segments))


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


def grouped(segments: Sequence[AnySegment], how: OnCores, config: Mapping[str, int] = NO_CONFIG) -> None:
    """`segments.grouped` of one to three stages of one format in one launch, of prepared inputs of 1 to
    64 tokens; corrections are of z that are there, U in plain numbers. config: of `tile_shape`, in its
    place. Raises ValueError for too many tokens."""
    from blr.kernels.decode.skinny.triton import dual_kernel, grouped_kernel

    one, other, tokens, pair = segments[0], segments[-1], len(segments[0].x), bool(how.activation)
    shared = one.x.data_ptr() == other.x.data_ptr() and one.x.shape == other.x.shape
    shape = _launch_shape(segments, tokens, pair, shared, how.like, config)
    stages, tiles = [stage_of(s) for s in segments], [tile_of(s, shape, how.order) for s in segments]
    counts = (s.blocks * -(-s.rows // t.BR) * t.SPLIT for s, t in zip(stages, tiles, strict=True))
    ends, slots = [*accumulate(counts)], token_slots(tokens)
    programs = ends[0] if pair else ends[-1]
    areas = (1 + pair) * programs * shape["BR"] * slots if shape["SPLIT"] > 1 else 1
    room = (*how.workspace.take(areas, programs, one.x.device), tokens)
    options: dict[str, object] = {
        "NP": slots,
        "num_warps": shape["num_warps"],
        **launch_options(how.pdl),
    }
    if pair:
        options |= {"T0": tiles[0], "T1": tiles[1], "SHARED": shared, "ACT": how.activation}
        options |= {"TOGETHER": one.shape[2] == other.shape[2]}
        dual_kernel[(programs,)](*stages, *room, **options)
        return
    given = (*three(stages), ends[0], ends[min(1, len(ends) - 1)], *room)
    options |= {"COUNT": len(segments), "ADD": how.add, **numbered("T", tiles)}
    grouped_kernel[(programs,)](*given, **options)


def _launch_shape(
    segments: Sequence[AnySegment], tokens: int, pair: bool, shared: bool, like: int | None,
    config: Mapping[str, int],
) -> dict[str, int]:  # fmt: skip
    """The sizes of a launch, of a `pair` with one `shared` input or two. Raises ValueError for no
    tokens, or more than 64."""
    if not 1 <= tokens <= MOST:
        raise ValueError(f"skinny products: {tokens} tokens; they take 1 to {MOST}")
    one, inputs = segments[0], 2 if pair and not shared else 1
    form, K = (one.bits, one.group), max(s.shape[2] for s in segments)
    rows = sum(s.shape[0] * s.shape[1] for s in segments[: 1 if pair else 3])
    shape = {**tile_shape(*form, rows, K, like or tokens), **config}
    return fitted(shape, form, token_slots(tokens), shared_limit(one.x.device), 1 + pair, inputs)


def token_slots(tokens: int) -> int:
    """The number of tokens that the kernel for `tokens` is compiled for: 8, 16, 32 or 64."""
    return max(power_of_two(tokens), 8)


def stage_of(s: AnySegment) -> SkinnyStage:
    """What kernels take of a segment, whose x is that of `prepare`."""
    if isinstance(s, Segment):
        w, K, scales = s.w, s.w.shape[2], (s.w, 0, 0)
        padded = K
    else:
        w, K, scale = s.packed.view(torch.int16), -(-s.K // s.group), s.scale
        padded, scales = K * s.group, (scale, scale.stride(0), scale.stride(1))
    blocks, rows, _ = w.shape
    x_block = 0 if s.x.shape[1] == padded else padded
    return SkinnyStage(
        *(s.x, s.x.stride(0), x_block, w, w.stride(0), w.stride(1), *scales),
        *(s.x if s.bias is None else s.bias, s.y, s.y.stride(0), rows, K, blocks, s.part or rows),
        *_correction(s),
    )


def _correction(s: AnySegment) -> tuple[Tensor, int, Tensor, int, int]:
    if s.correction is None:
        return s.x, 0, s.x, 0, 0
    u, z = s.correction.u.levels, s.correction.first.y
    return u, u.stride(1), z, z.stride(0), u.shape[2]


def tile_of(s: AnySegment, shape: dict[str, int], order: Order = None) -> SkinnyTile:
    """The tile of a shape."""
    (bits, group, curved), ranks, K = s.format, _correction(s)[4], s.shape[2]
    steps = K if bits == PLAIN else -(-K // group)
    return SkinnyTile(
        *(bits, group, shape["BR"], shape["STEP"], shape["SPLIT"], shape["STAGES"]),
        BIAS=s.bias is not None,
        FULL=steps % shape["STEP"] == 0,
        ASM=not interpreted() and torch.cuda.get_device_capability(s.x.device) >= (9, 0),
        RANKS=max(power_of_two(ranks), 16) if ranks else 0,
        LOW=PLAIN if order is None else PLANES[order[0]][0],
        LOW_GROUP=0 if order is None else order[1],
        AHEAD=0 if interpreted() else shape.get("AHEAD", 0),
        CURVED=curved,
    )
