"""The table that the persistent kernel walks: what every program does in every phase, as words.

A phase is a list of pieces, each a product over tiles of one segment; programs are given to pieces
by their bytes, tiles to the programs of a piece evenly. The words are those of fields.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from struct import pack as to_bytes
from struct import unpack as from_bytes

import torch
from torch import Tensor

from blr.kernels.gemv.launch import power_of_two
from blr.kernels.gemv.segments import Segment, shared_input
from blr.kernels.persistent.fields import FIELDS, Attention, End, Kind, Product, Variant

MOST_VARIANTS = 64
NO_WINDOW = 1 << 30
MIX_RANKS = 4  # ranks of a tile that mixes blocks


@dataclass(frozen=True)
class Tuning:
    """Sizes of the persistent kernel.

    programs: a multiprocessor. warps: of a program. elements: weights of a tile. whole: columns of
    a row that a tile takes at once; wider rows go in chunks [wide_rows, wide_columns].
    captured: launched by a CUDA graph.
    """

    programs: int = 2
    warps: int = 4
    elements: int = 8192
    whole: int = 4096
    wide_rows: int = 4
    wide_columns: int = 1024
    captured: bool = True


@dataclass(frozen=True)
class Piece:
    """Work of one kind: `tiles_of` rows of `blocks` blocks of K columns, and its descriptor.

    words: by their place. mixes: blocks, a power of two, or 0; shared, plain, x_half, y_half: of a
    `fields.Variant`.
    """

    kind: Kind
    words: dict[int, int]
    rows: int = 0
    blocks: int = 1
    columns: int = 0
    bytes: int = 0
    alignment: int = 1
    mixes: int = 0
    shared: bool = False
    plain: bool = False
    x_half: bool = False
    y_half: bool = False

    def tiles(self, rows: int) -> int:
        """Tiles of `rows` rows each."""
        return (1 if self.kind == Kind.MIXED else self.blocks) * -(-self.rows // rows)


@dataclass
class Table:
    """words: [steps · programs, FIELDS] int64 and one row of zeros. variants: what the kernel is
    compiled for. starts: of each phase, the number of its first step."""

    programs: int
    words: Tensor
    variants: list[Variant] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)


def two(lower: int, upper: int = 0) -> int:
    """A word of two numbers. Raises ValueError for one that does not fit into 31 bits."""
    if not (0 <= lower < 1 << 31 and 0 <= upper < 1 << 31):
        raise ValueError(f"the persistent kernel takes sizes below 2^31; found {lower}, {upper}")
    return lower | upper << 32


def bits(value: float) -> int:
    """The bits of a float32 that is not negative."""
    return from_bytes("<i", to_bytes("<f", value))[0]


def rows_piece(s: Segment, gain: Tensor | None = None, eps: float = 0.0, add: bool = False) -> Piece:
    """A stage of `kernels.gemv.segments`; `add`: to what `s.y` holds."""
    a = alignment((s,), gain)
    blocks, rows, columns = s.w.shape
    words = {**_first(s, a), **_norm(s, gain, eps), Product.BIAS: address(s.bias)}
    words |= {Product.PARTS: two(s.part or rows, blocks)}
    words |= {Product.Y: address(s.y), Product.Y_TOKEN: two(s.y.stride(0), int(add))}
    piece = Piece(Kind.ROWS, words, rows, blocks, columns, s.w.nbytes, a, x_half=_half(s.x))
    if s.mix is None:
        return replace(piece, plain=blocks == 1)
    words |= {Product.MIX: address(s.mix), Product.MIX_BLOCKS: two(*s.mix.stride()[:2])}
    words |= {Product.MIX_RANK: two(s.mix.stride(2))}
    return replace(piece, kind=Kind.MIXED, mixes=power_of_two(blocks))


def pairs_piece(gate: Segment, up: Segment, gain: Tensor | None = None, eps: float = 0.0) -> Piece:
    """``up.y = act(gate) ⊙ up``."""
    a = alignment((gate, up), gain)
    blocks, rows, columns = gate.w.shape
    second = _first(up, a)
    words = {**_first(gate, a), **_norm(gate, gain, eps)}
    words |= {Product.UP_W: second[Product.W], Product.UP_STRIDES: second[Product.STRIDES]}
    words |= {Product.UP_BLOCK: two(up.w.stride(0) // a)}
    words |= {Product.UP_X: second[Product.X], Product.UP_X_STRIDES: second[Product.X_STRIDES]}
    words |= {Product.Y: address(up.y), Product.Y_TOKEN: two(up.y.stride(0))}
    words |= {Product.BIAS: address(gate.bias), Product.UP_BIAS: address(up.bias)}
    words |= {Product.PARTS: two(rows, blocks)}
    shared = gate.x.data_ptr() == up.x.data_ptr() and gate.w.shape == up.w.shape
    columns, size = max(columns, up.w.shape[2]), gate.w.nbytes + up.w.nbytes
    flags = {"shared": shared, "plain": blocks == 1, "y_half": _half(up.y)}
    return Piece(Kind.PAIRS, words, rows, blocks, columns, size, a, **flags)


def attention_piece(
    source: Tensor, target: Tensor, k: Tensor, v: Tensor, scale: float,
    q_gain: Tensor | None, k_gain: Tensor | None, eps: float, window: int | None,
) -> Piece:  # fmt: skip
    """`kernels.attention.reference.decode_attention` of one layer; `scale` includes log2 e."""
    words: dict[int, int] = {Attention.KEYS: address(k), Attention.VALUES: address(v)}
    words |= {Attention.QUERY_GAIN: address(q_gain), Attention.KEY_GAIN: address(k_gain)}
    words |= {Attention.QKV: address(source), Attention.QKV_ROW: two(source.stride(0))}
    words |= {Attention.OUT: address(target), Attention.OUT_ROW: two(target.stride(0))}
    words |= {Attention.NORM: two(bits(eps), window or NO_WINDOW), Attention.SCALE: bits(scale)}
    return Piece(Kind.ATTENTION, words)


def embed_piece(table: Tensor, x: Tensor) -> Piece:
    """x[b] = table[tokens[b]]."""
    words: dict[int, int] = {End.TABLE: address(table), End.SIZES: two(table.stride(0), x.shape[1])}
    return Piece(Kind.EMBED, {**words, End.DATA: address(x), End.DATA_ROW: two(x.stride(0))})


def choose_piece(logits: Tensor) -> Piece:
    """tokens[b] = the lowest index of the largest logit."""
    words: dict[int, int] = {End.SIZES: two(0, logits.shape[1]), End.DATA: address(logits)}
    return Piece(Kind.CHOOSE, {**words, End.DATA_ROW: two(logits.stride(0))})


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def alignment(segments: Sequence[Segment], gain: Tensor | None) -> int:
    """8 if 16-byte loads of everything that the segments read are possible, else 1."""
    numbers, pointers = [], [address(gain)]
    for s in segments:
        numbers += [*s.w.stride()[:2], s.w.shape[2], s.x.stride(0)]
        pointers += [s.w.data_ptr(), s.x.data_ptr()]
    fits = all(n % 8 == 0 for n in numbers) and all(p % 16 == 0 for p in pointers)
    return 8 if fits else 1


def _half(tensor: Tensor) -> bool:
    return tensor.dtype != torch.float32


def _first(s: Segment, a: int) -> dict[int, int]:
    """The words of the weights and the input of a segment."""
    blocks, rows, columns = s.w.shape
    block = 0 if shared_input(s.x, s.w) else columns
    strides = (s.w.stride(1) if rows > 1 else columns, s.w.stride(0) if blocks > 1 else 0)
    words: dict[int, int] = {Product.W: address(s.w), Product.X: address(s.x)}
    words |= {Product.STRIDES: two(strides[0] // a, columns // a)}
    words |= {Product.SIZES: two(rows, strides[1] // a)}
    return {**words, Product.X_STRIDES: two(s.x.stride(0) // a, block // a)}


def _norm(s: Segment, gain: Tensor | None, eps: float) -> dict[int, int]:
    return {Product.GAIN: address(gain), Product.NORM: two(bits(eps), s.x.shape[1])}


def make_table(phases: Sequence[Sequence[Piece]], programs: int, tuning: Tuning) -> Table:
    """The table of `programs` programs. A phase of more pieces than programs takes several steps.

    Raises ValueError for more than `MOST_VARIANTS` variants.
    """
    table, rows = Table(programs, torch.zeros(0)), list[Tensor]()
    numbers: dict[Variant, int] = {}
    for phase in phases:
        table.starts.append(len(rows))
        for at in range(0, len(phase), programs):
            rows.append(_step(phase[at : at + programs], programs, tuning, numbers))
    if len(numbers) > MOST_VARIANTS:
        raise ValueError(f"{len(numbers)} kinds of tiles: expected {MOST_VARIANTS} at most")
    table.starts.append(len(rows))
    table.words = torch.cat([*rows, torch.zeros(1, FIELDS, dtype=torch.int64)])
    table.variants = list(numbers)
    return table


def _step(pieces: Sequence[Piece], programs: int, tuning: Tuning, numbers: dict[Variant, int]) -> Tensor:
    """[programs, FIELDS]; new variants get the next of `numbers`."""
    words = torch.zeros(programs, FIELDS, dtype=torch.int64)
    begin = 0
    for piece, count in zip(pieces, shares(tuple(p.bytes for p in pieces), programs), strict=True):
        own = words[begin : begin + count]
        own[:] = torch.tensor([piece.words.get(i, 0) for i in range(FIELDS)], dtype=torch.int64)
        if piece.kind < Kind.EMBED:
            variant = choose_variant(piece, count, tuning)
            kind, tiles = numbers.setdefault(variant, len(numbers)), piece.tiles(variant.rows)
            border = torch.arange(count + 1) * tiles // count
            own[:, Product.HEAD] = kind | border[:-1] << 8 | border.diff() << 36
        else:
            own[:, Product.HEAD] = piece.kind
        begin += count
    return words


@cache
def shares(sizes: tuple[int, ...], programs: int) -> list[int]:
    """Programs of each of some pieces of work: one at least, all in all, the busiest as idle as can
    be. Raises ValueError for fewer programs than pieces."""
    if programs < len(sizes):
        raise ValueError(f"{programs} programs: expected {len(sizes)} at least")
    counts = [1] * len(sizes)
    for _ in range(programs - len(sizes)):
        busiest = max(range(len(sizes)), key=lambda i: sizes[i] / counts[i])
        counts[busiest] += 1
    return counts


def choose_variant(piece: Piece, programs: int, tuning: Tuning) -> Variant:
    """The largest tiles that divide well over `programs`."""
    whole = piece.columns <= tuning.whole and piece.kind != Kind.MIXED
    columns = max(power_of_two(piece.columns), 128)
    if piece.kind == Kind.MIXED:
        most = MIX_RANKS
        columns = min(columns, max(tuning.elements // (2 * MIX_RANKS * piece.mixes), 64))
    elif whole:
        most = tuning.elements // columns // (2 if piece.kind == Kind.PAIRS else 1)
    else:
        columns = min(columns, tuning.wide_columns)
        most = tuning.wide_rows // (2 if piece.kind == Kind.PAIRS else 1)
    most = max(min(most, 64, power_of_two(piece.rows)), 1)
    heights = [most >> i for i in range(3) if most >> i]
    busy = {rows: -(-piece.tiles(rows) // programs) * rows for rows in heights}
    rows = max(r for r in heights if busy[r] <= 1.1 * min(busy.values()))
    return Variant(
        *(int(piece.kind), rows, columns, piece.alignment, piece.mixes),
        *(whole, piece.shared, piece.plain, piece.x_half, piece.y_half),
    )
