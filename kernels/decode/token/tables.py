"""Phases of a Llama's layer as a table of work for `kernel.token_kernel`; one launch of it."""

import math
from dataclasses import dataclass, field

import torch

WORDS, ROWS, COLUMNS, CHUNKS, SHARE = 24, 64, 128, 32, 256
NORM, GATE, PARTS = 1, 2, 4


@dataclass
class Piece:
    """y (+)= W x of a matrix or of some of its columns. store: which weights; row, column: where in a layer's of them."""

    store: int
    row: int
    rows: int
    column: int
    columns: int
    x: int
    y: int
    up: int = 0


@dataclass
class Phase:
    name: str
    y: int  # where the results lie, and how many
    size: int
    flags: int = 0
    gain: int = 0
    adds: bool = False  # to the residual stream
    attention: bool = False
    pieces: list[Piece] = field(default_factory=list)


def ceil(a: int, b: int) -> int:
    return -(-a // b)


class Plan:
    """ranks: of q, k, v, o, gate, up, down; None for dense ones. stores: {columns: rows a layer}."""

    def __init__(self, hidden: int, ff: int, heads: int, kv_heads: int, ranks: dict[str, int] | None, programs: int, split: int):
        self.hidden, self.ff, self.heads, self.kv_heads, self.ranks = hidden, ff, heads, kv_heads, ranks
        self.programs, self.split, self.stores, self.phases, self.size = programs, split, {}, [], 0
        self.matrices: dict[str, tuple[int, int, int]] = {}  # name: columns, first row, rows
        self.h = self.buffer(hidden)
        q, kv, wide = heads * 128, kv_heads * 128, [("q", heads * 128), ("k", kv_heads * 128), ("v", kv_heads * 128)]
        qkv = self.layer("qkv", wide, hidden, self.h, NORM)
        parts, sums = self.buffer(heads * split * 128), self.buffer(heads * split * 2)
        self.phases.append(Phase("attention", parts, heads * split * 128, attention=True, pieces=[Piece(0, 0, 0, 0, 0, qkv, parts, sums)]))
        self.layer("o", [("o", hidden)], q, parts, PARTS, up=sums, to=self.h)
        gu = self.layer("gate-up", [("gate", ff), ("up", ff)], hidden, self.h, NORM, gain=1)
        self.layer("down", [("down", hidden)], ff, gu, GATE, up=gu + ff, to=self.h)
        self.kv = kv

    def buffer(self, size: int) -> int:
        self.size += ceil(size, 256) * 256
        return self.size - ceil(size, 256) * 256

    def matrix(self, name: str, rows: int, columns: int) -> int:
        first = self.stores.get(columns, 0)
        self.stores[columns] = first + rows
        self.matrices[name] = (columns, first, rows)
        return first

    def layer(self, name, parts, columns, x, flags, gain=0, up=0, to=None) -> int:
        total = sum(r for _, r in parts)
        if not self.ranks:
            y = self.buffer(total) if to is None else to
            first = [self.matrix(n, r, columns) for n, r in parts][0]
            self.add(Phase(name, y, total, flags, gain, to is not None), [(columns, first, total, x, y, up)])
            return y
        ranks = [self.ranks[n] for n, _ in parts]
        z, y = self.buffer(sum(ranks)), self.buffer(total) if to is None else to
        first = [self.matrix("V" + n, r, columns) for (n, _), r in zip(parts, ranks)][0]
        self.add(Phase("V " + name, z, sum(ranks), flags, gain), [(columns, first, sum(ranks), x, z, up)])
        pieces = [(r, self.matrix("U" + n, rows, r), rows, z + sum(ranks[:i]), y + sum(p[1] for p in parts[:i]), 0)
                  for i, ((n, rows), r) in enumerate(zip(parts, ranks))]  # fmt: skip
        self.add(Phase("U " + name, y, total, adds=to is not None), pieces)
        return y

    def add(self, phase: Phase, pieces: list[tuple[int, int, int, int, int, int]]) -> None:
        for columns, first, rows, x, y, up in pieces:
            wide = ceil(columns, COLUMNS)
            each = ceil(ceil(rows, ROWS) * wide * len(pieces), self.programs)  # tiles of a program
            groups = ceil(min(wide, each), CHUNKS)
            if groups > 1:  # fewer inputs a program
                assert not phase.flags & PARTS
                groups = ceil(wide, CHUNKS)
            for g in range(groups):
                b, e = wide * g // groups * COLUMNS, min(wide * (g + 1) // groups * COLUMNS, columns)
                phase.pieces.append(Piece(columns, first, rows, b, e - b, x + b, y, up + b if up else 0))
        self.phases.append(phase)

    def table(self, packed: bool = False) -> torch.Tensor:
        n, at, columns = self.programs, 0, list(self.stores)
        out = torch.zeros(len(self.phases), n, WORDS, dtype=torch.int32)
        out[:, :, 13] = -1
        self.tiles = sum(ceil(p.rows, ROWS) * ceil(p.columns, COLUMNS) for f in self.phases for p in f.pieces if not f.attention)
        for i, f in enumerate(self.phases):
            after = self.phases[(i + 1) % len(self.phases)]
            zeros = 0 if after.adds or after.attention else after.size
            for c in range(n):
                b, e = zeros * c // n, zeros * (c + 1) // n
                assert e - b <= SHARE
                out[i, c, 9:12] = torch.tensor([after.y + b, e - b, f.flags])
            if f.attention:
                for c in range(self.heads * self.split):
                    out[i, c, 4:7] = torch.tensor([f.pieces[0].x // 16, f.pieces[0].up // 16, f.y])
                    out[i, c, 13:15] = torch.tensor([c // self.split, c % self.split])
                continue
            counts = [ceil(p.rows, ROWS) * ceil(p.columns, COLUMNS) for p in f.pieces]
            ends = [round(n * sum(counts[: j + 1]) / sum(counts)) for j in range(len(counts))]
            for j, (p, count) in enumerate(zip(f.pieces, counts)):
                first, of, wide = ends[j - 1] if j else 0, ends[j] - (ends[j - 1] if j else 0), ceil(p.columns, COLUMNS)
                for m in range(of):
                    b, e = count * m // of, count * (m + 1) // of
                    row, k = b // wide * ROWS, b % wide
                    assert min(e - b, wide) <= CHUNKS and p.x % 16 == p.up % 16 == p.columns % 16 == 0
                    where = [0, (at + b) * ROWS, self.tiles * ROWS, 0, ROWS, 0, 0] if packed else \
                        [columns.index(p.store), p.row + row, self.stores[p.store], p.column, 0, ROWS, COLUMNS]  # fmt: skip
                    words = out[i, (first + m + 37 * i) % n]
                    words[:9] = torch.tensor([e - b, k, wide, p.columns // 16, p.x // 16, p.up // 16, p.y, row, p.rows])
                    words[12] = f.gain
                    words[15:22] = torch.tensor(where)
                at += count
        return out


class Token:
    """A plan with its weights, cache and buffers. stores: {columns: [layers * rows, columns]}, or one of tiles (packed)."""

    def __init__(self, plan, stores, layers, gains, rope, context, packed=False, ring=12, device="cuda", descriptor=None):
        self.plan, self.layers, self.context, self.ring = plan, layers, context, ring
        self.steps = layers * len(plan.phases)
        make = lambda n, dtype=torch.float32: torch.zeros(n, dtype=dtype, device=device)
        self.table, self.gains, self.rope = plan.table(packed).to(device), gains, rope
        self.act, self.position, self.counter = make(plan.size), make(1, torch.int32), make(64, torch.int32)
        self.state, self.clocks = make(1 + plan.programs, torch.int32), make(self.steps * plan.programs * 4, torch.int32)
        self.state[0] = 1 << 20
        self.marks = torch.zeros(plan.programs * 4, dtype=torch.int32, pin_memory=device == "cuda")  # read while the kernel hangs
        self.keys, self.values = (make(layers * plan.kv_heads * context * 128, torch.bfloat16) for _ in "kv")
        made = [(descriptor or describe)(w) for w in stores.values()]
        assert len(made) <= 4
        self.weights = (made * 4)[:4] if len(made) == 1 else (made + made[:1] * 4)[:4]

    def h(self):
        return self.act[self.plan.h : self.plan.h + self.plan.hidden]

    def run(self, kernel, first=0, last=None, before=2, after=4, both=True, mark=False, clock=False, **options):
        p = self.plan
        return kernel(*self.weights, self.table, self.act, self.gains, self.keys, self.values, self.rope, self.position, self.counter,
                      self.state, self.marks, self.clocks, first, self.steps if last is None else last, len(p.phases), p.programs,
                      self.context, p.heads, p.kv_heads, before, after, math.log2(math.e) / 128**0.5, 1e-5,
                      NS=self.ring, NX=CHUNKS // 16, HIDDEN=p.hidden, WIDE=1 << (p.hidden - 1).bit_length(), SPLIT=p.split, BK=32,
                      BOTH=both, MARK=mark, CLOCK=clock, **options)  # fmt: skip


def describe(w):
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(w, list(w.shape), [w.shape[1], 1], [ROWS, COLUMNS], gl.NVMMASharedLayout(128, 16, 2))
