"""Phases of all layers as a table of work for `triton.token_kernel`."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

# As in `sums.py` and `inputs.py`: words of a row; rows and columns of a tile; chunks of inputs, and sums
# to set to zero, of a program.
WORDS, TILE, CHUNKS, SHARE = 20, 128, 32, 256
NORM, GATE, PARTS = 1, 2, 4
MOST_ROWS = (1 << 31) - 1  # of a tensor that tiles are copied from
KINDS = 6  # lengths of rows that weights may have


@dataclass(frozen=True)
class Product:
    """The sums from y on get W x. w: [R, K]. x, up: where the inputs lie."""

    w: Tensor
    x: int
    y: int
    up: int = 0


@dataclass
class Step:
    """What happens between two waits: products, or the attention of a layer (inputs x, results y,
    exponents up, window gain). y, size: its sums, which the step before sets to zero; size 0: they are
    added to what is there. gain: of which norm."""

    layer: int
    y: int
    size: int = 0
    flags: int = 0
    gain: int = 0
    x: int = 0
    up: int = 0
    attention: bool = False
    products: list[Product] = field(default_factory=list)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


@dataclass(frozen=True)
class Piece:
    """Some columns of a product."""

    product: Product
    column: int
    columns: int

    @property
    def wide(self) -> int:
        return cdiv(self.columns, TILE)

    @property
    def tiles(self) -> int:
        return cdiv(len(self.product.w), TILE) * self.wide


def parts_of(heads: int, programs: int) -> int:
    """How many programs share a head: a power of two, 0 where some would have none."""
    return min(8, 1 << (programs // heads).bit_length() >> 1)


def fits(w: Tensor) -> bool:
    """Whether tiles can be copied from a matrix [R, K]."""
    whole = min(w.shape) >= TILE and w.shape[1] % 8 == 0
    return whole and w.stride(1) == 1 and w.stride(0) % 8 == 0 and w.data_ptr() % 16 == 0


class Stores:
    """Where matrices lie: those whose rows are equally far apart are one tensor of rows twice as long,
    from the first of them on, in which all of them begin somewhere."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.first: dict[int, Tensor] = {}
        self.rows: dict[int, int] = {}
        for w in weights:
            if w.data_ptr() < self.first.setdefault(w.stride(0), w).data_ptr():
                self.first[w.stride(0)] = w
        for w in weights:
            _, row, _ = self.place(w)
            self.rows[w.stride(0)] = max(self.rows.get(w.stride(0), 0), row + len(w))
        if max(self.rows.values()) > MOST_ROWS:
            raise ValueError("weights too far apart in memory: expected 2^31 rows between them at most")

    def place(self, w: Tensor) -> tuple[int, int, int]:
        """Which of the tensors, and the row and column of a matrix in it."""
        apart = w.stride(0)
        away = (w.data_ptr() - self.first[apart].data_ptr()) // w.element_size()
        return list(self.first).index(apart), *divmod(away, apart)


def make_table(steps: Sequence[Step], stores: Stores, programs: int, heads: int, split: int) -> Tensor:
    """[1 + steps, programs, WORDS] int32. The first row is for what comes before the first step."""
    rows = [
        [[0] * 13 + [-1] + [0] * (WORDS - 14) for _ in range(programs)] for _ in range(len(steps) + 1)
    ]
    for i, after in enumerate(steps):
        for c in range(programs):
            b, e = after.size * c // programs, after.size * (c + 1) // programs
            if e - b > SHARE:
                raise ValueError(f"a step of {after.size} results: expected {SHARE * programs} at most")
            rows[i][c][9:11] = [after.y + b, e - b]
    for i, step in enumerate(steps):
        for words in rows[i + 1]:
            words[11:13] = [step.flags, step.gain]
        if step.attention:
            for c in range(heads * split):
                words = rows[i + 1][c]
                words[4:7] = [step.x // 8, step.up // 8, step.y]
                words[12:16] = [step.gain, c // split, c % split, step.layer]
        else:
            _share(rows[i + 1], i, _pieces(step, programs), stores)
    return torch.tensor(rows, dtype=torch.int32)


def _pieces(step: Step, programs: int) -> list[Piece]:
    """The products of a step; of some columns each where programs would have too many inputs."""
    found = []
    for product in step.products:
        whole = Piece(product, 0, product.w.shape[1])
        each = cdiv(whole.tiles * len(step.products), programs)
        groups = 1 if min(whole.wide, each) <= CHUNKS else cdiv(whole.wide, CHUNKS)
        if groups > 1 and step.flags & PARTS:
            raise ValueError(f"heads of {whole.columns} columns: expected {CHUNKS * TILE} at most")
        for g in range(groups):
            b = whole.wide * g // groups * TILE
            e = min(whole.wide * (g + 1) // groups * TILE, whole.columns)
            found.append(Piece(product, b, e - b))
    return found


def _share(rows: list[list[int]], turn: int, pieces: Sequence[Piece], stores: Stores) -> None:
    """Give tiles in the order of rows to programs; each has tiles of one piece."""
    n, done, total = len(rows), 0, sum(piece.tiles for piece in pieces)
    for piece in pieces:
        first, end = (round(n * tiles / total) for tiles in (done, done + piece.tiles))
        done += piece.tiles
        product, of = piece.product, end - first
        if of == 0 or min(cdiv(piece.tiles, of), piece.wide) > CHUNKS:
            raise ValueError(f"weights {list(product.w.shape)} beside much larger ones: expected less")
        which, row, column = stores.place(product.w)
        up = product.up + piece.column if product.up else 0
        for m in range(of):
            b, e = piece.tiles * m // of, piece.tiles * (m + 1) // of
            words = rows[(first + m + 37 * turn) % n]
            words[:4] = [e - b, b % piece.wide, piece.wide, piece.columns // 8]
            words[4:7] = [(product.x + piece.column) // 8, up // 8, product.y]
            words[7:9] = [b // piece.wide * TILE, len(product.w)]
            words[16:19] = [which, row, column + piece.column]
