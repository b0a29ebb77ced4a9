"""Which packed weights there are, without torch: bits, groups, grids and sizes.

What the bytes mean is said in `reference.py`.
"""

from typing import NamedTuple

GROUP = 128
GROUPS = (128, 64, 32)
ROW = 0  # the group of numbers in float8 that share a scale a row
FP8_GROUPS = (ROW, GROUP)
BITS = (8, 4, 3, 2)
# A level stands for ``scale · x (1 + CURVE x²)`` with x = level + SHIFT, or x = q − OFFSET of the stored
# field q, which is not negative below 8 bits. The curved grid of 3 bits widens outwards as the best one
# for Gaussian weights does; the uniform one is that of 4 bits, `grid_of`.
SHIFT = {8: 0.0, 4: 0.0, 3: 0.5, 2: 0.5}
OFFSET = {8: 0.0, 4: 8.0, 3: 3.5, 2: 1.5}
CURVE = {3: 0.02}
PLANES = {8: (8,), 4: (4,), 3: (2, 1), 2: (2,)}  # bits of a level by plane, the lowest first

# Scales that K-quants of llama.cpp hold: in groups of 32, the scales of 8 groups are whole multiples of
# one unit. By bits: the largest multiple, and the significant bits of a unit, so that bfloat16 holds the
# products.
SUPERBLOCK, K_GROUP, K_QUANTS = 8, 32, {"q2_k": 2, "q3_k": 3}
MULTIPLES = {2: (15, 4), 3: (31, 3)}


class LevelGrid(NamedTuple):
    """What levels of a format stand for, as said above."""

    shift: float
    curve: float
    offset: float


def grid_of(bits: int, curved: bool = True) -> LevelGrid:
    """The grid of a format; `curved` says which of the two that 3 bits have."""
    if bits == 3 and not curved:
        return LevelGrid(0.0, 0.0, 4.0)
    return LevelGrid(SHIFT[bits], CURVE.get(bits, 0.0), OFFSET[bits])


def packed_width(K: int, bits: int, group: int = GROUP) -> int:
    """Bytes of a packed row of K elements."""
    return -(-K // group) * group * bits // 8


def scale_count(K: int, group: int) -> int:
    """Scales of a row of K elements."""
    return -(-K // group) if group else 1


def check_format(bits: int, group: int = GROUP, fp8: bool = False) -> None:
    """Raise ValueError for bits or a group that there are not, of integers or of float8."""
    groups = FP8_GROUPS if fp8 else GROUPS
    for what, found, known in (("bits", bits, (8,) if fp8 else BITS), ("group", group, groups)):
        if type(found) is not int or found not in known:
            *others, last = map(str, known)
            names = f"{', '.join(others)} or {last}" if others else last
            raise ValueError(f"{what} {found!r}: expected {names}")


class Form(NamedTuple):
    """Where kernels find levels, in quads of 16 bytes of the lowest plane.

    BITS, GROUP: of the format. FIELDS: of a word of the plane. WORDS: of a group in the plane. STEP:
    words from one group to the next, all planes counted. COLUMNS: levels of a quad. CURVED: whether the
    steps of the grid widen outwards.
    """

    BITS: int
    GROUP: int
    FIELDS: int
    WORDS: int
    STEP: int
    COLUMNS: int
    CURVED: bool

    def quads(self, K: int) -> int:
        """Quads of a row of K columns; the last may be half empty."""
        return -(-(-(-K // self.GROUP) * self.WORDS) // 4)


def form_of(bits: int, group: int = GROUP, curved: bool = True) -> Form:
    """The form of a format, `curved` as of `grid_of`. Raises ValueError as `check_format`."""
    check_format(bits, group)
    low = PLANES[bits][0]
    widens = grid_of(bits, curved).curve != 0
    return Form(bits, group, 32 // low, group * low // 32, group * bits // 32, 128 // low, widens)
