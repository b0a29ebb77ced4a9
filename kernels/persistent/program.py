"""The table that the persistent kernel walks: what every program does in every phase, as words.

A phase is a list of pieces, each a product over tiles of one segment; programs are given to pieces
by their bytes, tiles to the programs of a piece evenly. The words are listed in README.md.
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

FIELDS = 24
ROWS, PAIRS, MIXED = 0, 1, 2
EMBED, ATTENTION, CHOOSE = 253, 254, 255
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

    kind: one of the numbers above. words: by their place. extra, halves: of a variant.
    """

    kind: int
    words: dict[int, int]
    rows: int = 0
    blocks: int = 1
    columns: int = 0
    bytes: int = 0
    alignment: int = 1
    extra: int = 0
    halves: int = 0

    def tiles(self, rows: int) -> int:
        """Tiles of `rows` rows each."""
        return (1 if self.kind == MIXED else self.blocks) * -(-self.rows // rows)


@dataclass
class Table:
    """words: [steps · programs, FIELDS] int64 and one row of zeros. variants: what the kernel is
    compiled for, six numbers each: kind, BR, BK, extra, alignment, halves. starts: of each phase, the
    number of its first step."""

    programs: int
    words: Tensor
    variants: list[tuple[int, ...]] = field(default_factory=list)
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
    words = {**_first(s, a), **_norm(s, gain, eps), 14: address(s.bias), 16: two(s.part or rows, blocks)}
    words |= {12: address(s.y), 13: two(s.y.stride(0), int(add))}
    plain = 4 * (blocks == 1)
    piece = Piece(ROWS, words, rows, blocks, columns, s.w.nbytes, a, plain, int(_half(s.x)))
    if s.mix is None:
        return piece
    words |= {18: address(s.mix), 19: two(*s.mix.stride()[:2]), 20: two(s.mix.stride(2))}
    return replace(piece, kind=MIXED, extra=power_of_two(blocks))


def pairs_piece(gate: Segment, up: Segment, gain: Tensor | None = None, eps: float = 0.0) -> Piece:
    """``up.y = act(gate) ⊙ up``."""
    a = alignment((gate, up), gain)
    blocks, rows, columns = gate.w.shape
    second = _first(up, a)
    words = {**_first(gate, a), **_norm(gate, gain, eps)}
    words |= {4: second[1], 5: second[2], 6: two(up.w.stride(0) // a), 10: second[8], 11: second[9]}
    words |= {12: address(up.y), 13: two(up.y.stride(0))}
    words |= {14: address(gate.bias), 15: address(up.bias), 16: two(rows, blocks)}
    shared = gate.x.data_ptr() == up.x.data_ptr() and gate.w.shape == up.w.shape
    columns, size = max(columns, up.w.shape[2]), gate.w.nbytes + up.w.nbytes
    extra = 2 * shared + 4 * (blocks == 1)
    return Piece(PAIRS, words, rows, blocks, columns, size, a, extra, 2 * _half(up.y))


def attention_piece(
    source: Tensor, target: Tensor, k: Tensor, v: Tensor, scale: float,
    q_gain: Tensor | None, k_gain: Tensor | None, eps: float, window: int | None,
) -> Piece:  # fmt: skip
    """`kernels.attention.reference.decode_attention` of one layer; `scale` includes log2 e."""
    words = {1: address(k), 4: address(v), 7: address(q_gain), 14: address(k_gain)}
    words |= {8: address(source), 9: two(source.stride(0)), 12: address(target)}
    words |= {13: two(target.stride(0)), 17: two(bits(eps), window or NO_WINDOW), 18: bits(scale)}
    return Piece(ATTENTION, words)


def embed_piece(table: Tensor, x: Tensor) -> Piece:
    """x[b] = table[tokens[b]]."""
    words = {1: address(table), 2: two(table.stride(0), x.shape[1])}
    return Piece(EMBED, {**words, 8: address(x), 9: two(x.stride(0))})


def choose_piece(logits: Tensor) -> Piece:
    """tokens[b] = the lowest index of the largest logit."""
    return Piece(CHOOSE, {2: two(0, logits.shape[1]), 8: address(logits), 9: two(logits.stride(0))})


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
    words = {1: address(s.w), 2: two(strides[0] // a, columns // a), 3: two(rows, strides[1] // a)}
    return {**words, 8: address(s.x), 9: two(s.x.stride(0) // a, block // a)}


def _norm(s: Segment, gain: Tensor | None, eps: float) -> dict[int, int]:
    return {7: address(gain), 17: two(bits(eps), s.x.shape[1])}


def make_table(phases: Sequence[Sequence[Piece]], programs: int, tuning: Tuning) -> Table:
    """The table of `programs` programs. A phase of more pieces than programs takes several steps.

    Raises ValueError for more than `MOST_VARIANTS` variants.
    """
    table, rows = Table(programs, torch.zeros(0)), []
    numbers: dict[tuple[int, ...], int] = {}
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


def _step(
    pieces: Sequence[Piece], programs: int, tuning: Tuning, numbers: dict[tuple[int, ...], int]
) -> Tensor:
    """[programs, FIELDS]; new variants get the next of `numbers`."""
    words = torch.zeros(programs, FIELDS, dtype=torch.int64)
    begin = 0
    for piece, count in zip(pieces, shares(tuple(p.bytes for p in pieces), programs), strict=True):
        own = words[begin : begin + count]
        own[:] = torch.tensor([piece.words.get(i, 0) for i in range(FIELDS)], dtype=torch.int64)
        if piece.kind < EMBED:
            variant = choose_variant(piece, count, tuning)
            kind, tiles = numbers.setdefault(variant, len(numbers)), piece.tiles(variant[1])
            border = torch.arange(count + 1) * tiles // count
            own[:, 0] = kind | border[:-1] << 8 | border.diff() << 36
        else:
            own[:, 0] = piece.kind
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


def choose_variant(piece: Piece, programs: int, tuning: Tuning) -> tuple[int, ...]:
    """(kind, BR, BK, extra, alignment, halves): the largest tiles that divide well over `programs`."""
    whole = piece.columns <= tuning.whole
    extra = piece.extra + (whole if piece.kind != MIXED else 0)
    columns = max(power_of_two(piece.columns), 128)
    if piece.kind == MIXED:
        most = MIX_RANKS
        columns = min(columns, max(tuning.elements // (2 * MIX_RANKS * piece.extra), 64))
    elif whole:
        most = tuning.elements // columns // (2 if piece.kind == PAIRS else 1)
    else:
        columns = min(columns, tuning.wide_columns)
        most = tuning.wide_rows // (2 if piece.kind == PAIRS else 1)
    most = max(min(most, 64, power_of_two(piece.rows)), 1)
    heights = [most >> i for i in range(3) if most >> i]
    busy = {rows: -(-piece.tiles(rows) // programs) * rows for rows in heights}
    rows = max(r for r in heights if busy[r] <= 1.1 * min(busy.values()))
    return (piece.kind, rows, columns, int(extra), piece.alignment, piece.halves)
