"""What each algorithm for one Kronecker-sparse factor costs: seconds, from rates measured on one H200.

The constants are fitted to 25 patterns × 3 kinds of arithmetic at 25088 rows (triton 3.6, torch 2.11;
tests/data/ks_h200.csv), what few rows wait for to 1 to 1024 rows of nine
layers. They only have to rank alternatives; below 0.05 ms the launches decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

SECTOR = 32  # bytes, what L2 hands to an SM at least
# Seconds that a step of a tile's sum takes by itself, which few rows cannot hide: of one column, of one
# whose neighbours are elsewhere (d > 1), and of a group of columns, 32 inputs of each.
STEP, APART, GROUPED = 0.4e-6, 2.5e-6, 10e-6
FILL = 2  # steps of a group before the first that overlaps another
DENSE_SHARE = 1 / 8  # a weight is densified on the fly up to this share of the activations,
DENSE_BYTES = 64 << 20  # or, for the library, up to this size

# (path, kind) -> (seconds a padded output element costs besides its products, operations a second).
# The first number is start, end and store of a tile, which short sums do not hide.
KERNELS = {
    **{("plain", "half"): (1.0e-12, 670e12), ("grouped", "half"): (2.8e-12, 78e12)},
    **{("plain", "tf32"): (1.6e-12, 290e12), ("grouped", "tf32"): (4.2e-12, 68e12)},
    **{("plain", "fp32"): (3.0e-12, 12e12), ("grouped", "fp32"): (3.4e-12, 6.8e12)},
}


@dataclass(frozen=True, eq=False)
class Machine:
    """Rates of a GPU.

    Attributes:
        copy: bytes per second of device memory that a product reaches, read and written.
        moved, moved_short: the same of a permutation, and of one in half precision whose runs of d
            elements are shorter than a sector.
        library: operations per second of cuBLAS by kind of arithmetic.
        kernels: of our kernels, as KERNELS.
        launch: seconds a kernel costs at least.
        wgmma: sums stay in place on Hopper's tensor core, which leaves registers for larger tiles.
    """

    copy: float = 4.0e12
    moved: float = 3.4e12
    moved_short: float = 2.3e12
    library: Mapping[str, float] = field(
        default_factory=lambda: {"half": 690e12, "tf32": 380e12, "fp32": 50e12}
    )
    kernels: Mapping[tuple[str, str], tuple[float, float]] = field(default_factory=lambda: KERNELS)
    launch: float = 5e-6
    wgmma: bool = True


H200 = Machine()
A100 = Machine(  # data sheet; kernels slowed by the ratio of the peaks
    copy=1.5e12,
    moved=1.3e12,
    moved_short=0.9e12,
    library={"half": 250e12, "tf32": 125e12, "fp32": 17e12},
    kernels={key: (start * 2.7, rate / 3) for key, (start, rate) in KERNELS.items()},
    wgmma=False,
)


@dataclass(frozen=True)
class Problem:
    """One factor (a, b, c, d) applied to n rows. kind: arithmetic, "half", "tf32" or "fp32"."""

    a: int
    b: int
    c: int
    d: int
    n: int
    kind: str
    bias: bool = False

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return 2 if self.kind == "half" else 4

    @property
    def weights(self) -> int:
        return self.a * self.b * self.c * self.d

    @property
    def x(self) -> int:
        """Bytes of the input."""
        return self.n * self.a * self.c * self.d * self.size

    @property
    def y(self) -> int:
        """Bytes of the output."""
        return self.n * self.a * self.b * self.d * self.size

    def dense(self) -> Problem:
        """The same with all d columns as one dense block."""
        return replace(self, b=self.b * self.d, c=self.c * self.d, d=1)


def product_seconds(p: Problem, redundant: int, machine: Machine) -> float:
    """cuBLAS on blocks in place, with `redundant` times the arithmetic. Without tensor cores the
    loads are not hidden; sides that are no multiple of 16 bytes halve the rate of tensor cores."""
    memory = (p.x + p.y + p.weights * redundant * p.size) / machine.copy
    arithmetic = 2 * p.n * p.weights * redundant / machine.library[p.kind]
    if p.kind == "fp32":
        return memory + arithmetic
    aligned = (p.b * redundant * p.size) % 16 == 0 == (p.c * redundant * p.size) % 16
    return max(memory, arithmetic if aligned else 2 * arithmetic)


def moved_seconds(p: Problem, volume: float, machine: Machine) -> float:
    """A permutation that reads and writes `volume` bytes."""
    short = p.kind == "half" and p.d * p.size < SECTOR
    return volume / (machine.moved_short if short else machine.moved) + machine.launch


def bias_seconds(p: Problem, machine: Machine) -> float:
    """A bias added in place after a product."""
    return 2 * p.y / machine.copy + machine.launch if p.bias else 0.0


def permute_seconds(p: Problem, machine: Machine = H200) -> float:
    """Gather – cuBLAS – scatter; without copies for d = 1, where the blocks are strided views."""
    product = product_seconds(p, 1, machine)
    if p.d == 1:
        return product + machine.launch + (bias_seconds(p, machine) if p.a > 1 else 0.0)
    volumes = 2 * p.x, 2 * p.y, 2 * p.weights * p.size  # the library copies blocks that are no rows
    return product + sum(moved_seconds(p, each, machine) for each in volumes) + machine.launch


def densify_seconds(p: Problem, machine: Machine) -> float:
    """Writing the weight of dense blocks."""
    return p.weights * p.d * p.size / machine.copy + machine.launch


def densifiable(p: Problem) -> bool:
    """Whether the weight of dense blocks is small beside the activations."""
    return p.weights * p.d * p.size <= DENSE_SHARE * (p.x + p.y)


def blocks_seconds(p: Problem, machine: Machine = H200) -> float:
    """cuBLAS on dense blocks of all d columns, d times the arithmetic and no permutation."""
    time = product_seconds(p, p.d, machine) + machine.launch + densify_seconds(p, machine)
    return time + (bias_seconds(p, machine) if p.a > 1 else 0.0)


def split_seconds(p: Problem, machine: Machine = H200) -> float:
    """fp32 as one product of three TF32 parts: x read once, three parts written, 3·c long sums."""
    arithmetic = 3 * 2 * p.n * p.weights / machine.library["tf32"]
    product = max((3 * p.x + p.y + 3 * p.weights * p.size) / machine.copy, arithmetic)
    time = moved_seconds(p, 4 * p.x, machine) + product + 2 * machine.launch
    return time + (moved_seconds(p, 2 * p.y, machine) if p.d > 1 else bias_seconds(p, machine))


def fused_seconds(p: Problem, config: Mapping[str, Any], machine: Machine = H200) -> float:
    """One kernel: memory, its padded tiles, or the loads of one tile in turn, whichever is longest."""
    path, G, BN, BB, BC = (config[key] for key in ("path", "G", "BN", "BB", "BC"))
    wide = 1.0 if p.d <= G else max(1.0, SECTOR / (G * p.size))
    memory = ((p.x + p.y) * wide + p.weights * p.size) / machine.copy
    outputs = ceil(p.n / BN) * BN * ceil(p.b / BB) * BB * p.a * ceil(p.d / G) * G
    start, rate = machine.kernels[path, p.kind]
    steps = ceil(p.c / BC)
    tiles = outputs * (start + 2 * steps * BC / rate)
    each, before = STEP if p.d == 1 else APART, 0
    if path == "grouped":
        each, before = GROUPED * BC / 32, min(FILL, steps)
    return machine.launch + max(memory, tiles, each * steps) + each * before


def dense_seconds(p: Problem, config: Mapping[str, Any], machine: Machine = H200) -> float:
    """One kernel on dense blocks of all d columns, tiles `config` of "plain"."""
    plain = {**config, "path": "plain"}
    return fused_seconds(p.dense(), plain, machine) + densify_seconds(p, machine)
