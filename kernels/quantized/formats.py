"""Which packed weights there are, without torch: bits, groups, grids and sizes. Shipped in checkpoints.

What the bytes mean is said in `reference.py`.
"""

from __future__ import annotations

GROUP = 128
GROUPS = (128, 64, 32)
BITS = (8, 4, 3, 2)
# A level stands for ``scale · x (1 + CURVE x²)`` with x = level + SHIFT, or x = q − OFFSET of the stored
# field q, which is not negative below 8 bits. The grid of 3 bits widens outwards as the best one for
# Gaussian weights does.
SHIFT = {8: 0.0, 4: 0.0, 3: 0.5, 2: 0.5}
OFFSET = {8: 0.0, 4: 8.0, 3: 3.5, 2: 1.5}
CURVE = {3: 0.02}
PLANES = {8: (8,), 4: (4,), 3: (2, 1), 2: (2,)}  # bits of a level by plane, the lowest first


def packed_width(K: int, bits: int, group: int = GROUP) -> int:
    """Bytes of a packed row of K elements."""
    return -(-K // group) * group * bits // 8


def check_format(bits: int, group: int = GROUP) -> None:
    """Raise ValueError for bits or a group that there are not."""
    for what, found, known in (("bits", bits, BITS), ("group", group, GROUPS)):
        if type(found) is not int or found not in known:
            names = ", ".join(map(str, known[:-1]))
            raise ValueError(f"{what} {found!r}: expected {names} or {known[-1]}")
