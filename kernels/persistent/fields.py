"""The table of the persistent kernel by name, for the host, which packs it, and the kernel.

A descriptor is FIELDS words of 64 bits, one of each step and program; "a | b" are the lower and the
upper 32 bits of a word. Strides with * are divided by the alignment A (8 or 1), which the kernel
multiplies in again: so the compiler knows that rows are aligned and loads 16 bytes at a time. The
kernel loads the first four words a step ahead.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

FIELDS = 24


class Kind(IntEnum):
    """Of a piece of work: of products, which the words name by the number of their `Variant`, and of
    what is none, which they name by these numbers."""

    ROWS = 0
    PAIRS = 1
    MIXED = 2
    EMBED = 253
    ATTENTION = 254
    CHOOSE = 255


class Product(IntEnum):
    """Words of a product; of pairs x, w and bias are the gate's, up_… the other's."""

    HEAD = 0  # kind (8 bits), first tile (28), tiles (28)
    W = 1
    STRIDES = 2  # row stride* | K*
    SIZES = 3  # rows a block | block stride*
    UP_W = 4
    UP_STRIDES = 5  # row stride* | K*
    UP_BLOCK = 6  # block stride*
    GAIN = 7  # weights of the norm, 0: none
    X = 8
    X_STRIDES = 9  # token stride* | block stride*
    UP_X = 10
    UP_X_STRIDES = 11
    Y = 12
    Y_TOKEN = 13  # token stride | 1 if added to what y holds
    BIAS = 14
    UP_BIAS = 15
    PARTS = 16  # part | blocks
    NORM = 17  # eps | width of the norm
    MIX = 18
    MIX_BLOCKS = 19  # strides of the output block k | of the input block l
    MIX_RANK = 20  # stride of the rank


class Attention(IntEnum):
    """Words of the attention of a layer."""

    HEAD = 0
    KEYS = 1
    VALUES = 4
    QUERY_GAIN = 7
    QKV = 8
    QKV_ROW = 9
    OUT = 12
    OUT_ROW = 13
    KEY_GAIN = 14
    NORM = 17  # eps | window
    SCALE = 18


class End(IntEnum):
    """Words of the two ends of a token: data are the row of x that the embedding gives, or logits."""

    HEAD = 0
    TABLE = 1
    SIZES = 2  # row stride of the table | width, or vocabulary
    DATA = 8
    DATA_ROW = 9


class Ahead(NamedTuple):
    """The words that are loaded a step ahead, in their order."""

    head: Any
    w: Any
    strides: Any
    sizes: Any


class Variant(NamedTuple):
    """What the kernel is compiled for: a kind of product in tiles of rows by columns.

    blocks: that are mixed, a power of two, else 0. whole: a tile has whole rows. shared: gate and up
    have one input. plain: one block, its results in their own order. x_half, y_half: inputs and
    results have the type of the weights, else of float32.
    """

    kind: int
    rows: int
    columns: int
    alignment: int
    blocks: int = 0
    whole: bool = False
    shared: bool = False
    plain: bool = False
    x_half: bool = False
    y_half: bool = False
