"""Packed words in registers: where they are, how they become numbers, what they are multiplied with.

Places follow from `formats.Form`, whose fields a tile T has. Derivation: ../README.md.
"""

import triton
import triton.language as tl

from blr.kernels.decode.quantized.formats import CURVE, grid_of

BEND = tl.constexpr(CURVE[3])
CURVED_MIDDLE, MIDDLE = (tl.constexpr(grid_of(3, curved).offset) for curved in (True, False))


@triton.jit
def word_at(quad, i, T: tl.constexpr):
    """Where word i of a quad of a row's lowest plane is, in words from the row's first."""
    if T.STEP == T.WORDS:
        return quad * 4 + i
    elif T.WORDS >= 4:
        return quad // (T.WORDS // 4) * T.STEP + quad % (T.WORDS // 4) * 4 + i
    else:
        return (quad * 2 + i // 2) * T.STEP + i % 2


@triton.jit
def high_at(quad, i, T: tl.constexpr):
    """Where the word of the highest plane of three bits is that belongs to that word, and by how much
    it is shifted so that bit 2·f is that of field f."""
    if T.WORDS == 8:
        return quad // 2 * T.STEP + 8 + i, quad % 2
    elif T.WORDS == 4:
        return quad * T.STEP + 4 + i % 2, i // 2
    else:
        return (quad * 2 + i // 2) * T.STEP + 2, i % 2


@triton.jit
def scale_at(quad, half, T: tl.constexpr):
    """Which group a quad is of, or its half if it is of two."""
    if T.WORDS >= 4:
        return quad // (T.WORDS // 4)
    else:
        return quad * 2 + half


@triton.jit
def column_at(quad, i, T: tl.constexpr):
    """Column of field 0 of word i of a quad; the next field is T.WORDS further."""
    if T.WORDS >= 4:
        return quad // (T.WORDS // 4) * T.GROUP + quad % (T.WORDS // 4) * 4 + i
    else:
        return (quad * 2 + i // 2) * T.GROUP + i % 2


@triton.jit
def row_quads(K, T: tl.constexpr):
    """Quads of a row of K columns."""
    return tl.cdiv(tl.cdiv(K, T.GROUP) * T.WORDS, 4)


@triton.jit
def words_left(quad, i, K, T: tl.constexpr):
    """Words of the lowest plane from a quad, or from the half of it that word i is in, to the end."""
    left = tl.cdiv(K, T.GROUP) * T.WORDS - quad * 4
    if T.WORDS < 4:
        left -= i // 2 * 2
    return left


@triton.jit
def load_chunk(words, scales, start, T: tl.constexpr, LANES: tl.constexpr):
    """Packed words [RT, LANES, 4] from quad `start` on, and the scales of their groups in float32
    [RT, LANES, 1 or 2]; zero outside. Words of three bits become two words of nibbles, of the even
    fields and of the odd ones.

    words, scales: where those of the first chunk are, [RT·LANES·4] and [RT·LANES·…], each with the
    number of words or groups from there to the end of the row, and of words of three bits what
    `high_at` says. One axis, because compilers differ in how they lay out more: so a thread gets
    neighbouring words, and the next lane's are the next thread's.
    """
    there = start * 4 < words[1]
    step = start * (4 * T.STEP // T.WORDS)
    at, left = scales
    group = start * 4 // T.WORDS
    if T.FULL:
        low = tl.load(words[0] + step)
        factor = tl.load(at + group).to(tl.float32)
    else:
        low = tl.load(words[0] + step, mask=there, other=0)
        factor = tl.load(at + group, mask=group < left, other=0.0).to(tl.float32)
    PARTS: tl.constexpr = 1 if T.WORDS >= 4 else 2
    RT: tl.constexpr = factor.shape[0] // (LANES * PARTS)
    factor = tl.reshape(factor, (RT, LANES, PARTS))
    if T.BITS == 3:
        if T.FULL:
            high = tl.load(words[2] + start * 6) >> words[3]
        else:
            high = tl.load(words[2] + start * 6, mask=there, other=0) >> words[3]
        even = (low & 0x33333333) | ((high << 2) & 0x44444444)
        odd = ((low >> 2) & 0x33333333) | (high & 0x44444444)
        return (tl.reshape(even, (RT, LANES, 4)), tl.reshape(odd, (RT, LANES, 4))), factor
    else:
        return (tl.reshape(low, (RT, LANES, 4)),), factor


@triton.jit
def row_words(w, quad, i, left, T: tl.constexpr):
    """The words that `load_chunk` takes: of rows that begin at w, from word i of a quad on."""
    if T.BITS == 3:
        over, by = high_at(quad, i, T)
        return w + word_at(quad, i, T), left, w + over, by
    else:
        return w + word_at(quad, i, T), left


@triton.jit
def tile_places(w, w_row, scale, scale_row, rows, K, T: tl.constexpr):
    """What `load_chunk` takes, for `rows` rows of K columns from w and scale on: lane l is quad
    l % BQ of row l // BQ, T.T rows side by side."""
    RT: tl.constexpr = T.BR // T.T
    LANES: tl.constexpr = T.T * T.BQ
    PARTS: tl.constexpr = 1 if T.WORDS >= 4 else 2
    index = tl.arange(0, RT * LANES * 4)
    row = index // (4 * LANES) * T.T + index // (4 * T.BQ) % T.T
    quad = index // 4 % T.BQ
    left = tl.where(row < rows, words_left(quad, index % 4, K, T), 0)
    words = row_words(w + row * w_row, quad, index % 4, left, T)
    index = tl.arange(0, RT * LANES * PARTS)
    row = index // (LANES * PARTS) * T.T + index // (T.BQ * PARTS) % T.T
    group = scale_at(index // PARTS % T.BQ, index % PARTS, T)
    left = tl.where(row < rows, tl.cdiv(K, T.GROUP) - group, 0)
    return words, (scale + (row * scale_row + group), left)


@triton.jit
def field_number(tile, FIELD: tl.constexpr, BITS: tl.constexpr):
    """What field FIELD of packed words holds plus `field_offset`, as float32; of 4 bits and less that
    is the stored field, of 8 the level."""
    if BITS == 8:  # the sign bit is flipped: 2^8 + level + 128
        return head_number(tile[0], FIELD, 0x7F8000, 0x43C00000)
    elif BITS == 2:  # 2^8, 2^6, 2^4 or 2^2 + field
        at: tl.constexpr = FIELD % 4
        return head_number(tile[0], FIELD // 4, 0x18000 << 2 * at, 0x43800000 - at * 0x01000000)
    else:  # 2^8 or 2^4 + nibble
        number: tl.constexpr = FIELD // 2 if BITS == 3 else FIELD
        words = tile[FIELD % 2] if BITS == 3 else tile[0]
        odd: tl.constexpr = number % 2
        return head_number(words, number // 2, 0x78000 << 4 * odd, 0x43800000 - odd * 0x02000000)


@triton.jit
def head_number(words, BYTE: tl.constexpr, MASK: tl.constexpr, POWER: tl.constexpr):
    """Byte BYTE of words as the head of a mantissa (bits 15 to 22), masked and joined with the exponent
    of the power of two that gives its field's last bit the value 1."""
    # Zero, which no compiler knows: constants stay in registers, one instruction masks and joins.
    zero = tl.program_id(2) << 15
    SHIFT: tl.constexpr = 15 - 8 * BYTE
    moved = words << SHIFT if SHIFT > 0 else words >> -SHIFT
    return ((moved & MASK) ^ (zero + POWER)).to(tl.float32, bitcast=True)


@triton.jit
def field_offset(FIELD: tl.constexpr, BITS: tl.constexpr, CURVED: tl.constexpr):
    """What `field_number` adds to a level, or of 3 and 2 bits to what it stands for before its curve."""
    if BITS == 8:
        return 384.0
    elif BITS == 4:
        return 264.0 if FIELD % 2 == 0 else 24.0
    elif BITS == 3:
        middle: tl.constexpr = CURVED_MIDDLE if CURVED else MIDDLE
        return middle + (256.0 if FIELD // 2 % 2 == 0 else 16.0)
    else:
        return 1.5 + 2.0 ** (8 - FIELD % 4 * 2)


@triton.jit
def field_level(tile, FIELD: tl.constexpr, BITS: tl.constexpr, CURVED: tl.constexpr):
    """What field FIELD of packed words stands for where the scale is 1, as float32."""
    level = field_number(tile, FIELD, BITS) - field_offset(FIELD, BITS, CURVED)
    if CURVED:
        level *= level * level * BEND + 1.0
    return level


@triton.jit
def lane_columns(lanes: tl.constexpr, T: tl.constexpr):
    """[lanes·4] columns of field 0 of the words of quads, lane l being quad l % BQ of a row."""
    index = tl.arange(0, lanes * 4)
    return column_at(index // 4 % T.BQ, index % 4, T)


@triton.jit
def field_inputs(x, gain, past, ahead, T: tl.constexpr):
    """[1, lanes, 4] inputs of one token `ahead` columns further, in float32, zero outside, and their
    squares before the gain. x, gain, past: see `rows_by_fma`."""
    shape: tl.constexpr = (1, past.shape[0] // 4, 4)
    if T.FULL:
        v = tl.load(x + ahead).to(tl.float32)
    else:
        v = tl.load(x + ahead, mask=past + ahead < 0, other=0.0).to(tl.float32)
    square = v * v
    if T.NORM:
        if T.FULL:
            v *= tl.load(gain + ahead).to(tl.float32)
        else:
            v *= tl.load(gain + ahead, mask=past + ahead < 0, other=0.0).to(tl.float32)
    return tl.reshape(v, shape), tl.reshape(square, shape)


@triton.jit
def quad_sums(tile, factor, x, gain, past, column, T: tl.constexpr):
    """[RT, lanes, 1] sums over the quads of a chunk that begins at `column`, of levels times inputs and
    scales, and squares of the inputs before the gain [1, lanes, 4].

    The offsets of numbers are multiplied with the inputs once for all rows and taken from the sum;
    with T.EXACT from each number, which costs one instruction a weight and no rounding.
    """
    FIELDS: tl.constexpr = T.FIELDS
    v, square = field_inputs(x, gain, past, column, T)
    start = v * -field_offset(0, T.BITS, T.CURVED)
    sums = (field_level(tile, 0, T.BITS, T.CURVED) if T.EXACT else field_number(tile, 0, T.BITS)) * v
    for field in tl.static_range(1, FIELDS):
        v, more = field_inputs(x, gain, past, column + field * T.WORDS, T)
        square += more
        if T.EXACT:
            sums += field_level(tile, field, T.BITS, T.CURVED) * v
        else:
            start -= v * field_offset(field, T.BITS, T.CURVED)
            sums += field_number(tile, field, T.BITS) * v
    if T.WORDS >= 4:
        sums = tl.sum(sums, 2, keep_dims=True)
        start = tl.sum(start, 2, keep_dims=True)
    else:
        sums = tl.sum(tl.reshape(sums, (sums.shape[0], sums.shape[1], 2, 2)), 3)
        start = tl.sum(tl.reshape(start, (1, start.shape[1], 2, 2)), 3)
    if not T.EXACT:
        sums += start
    return tl.sum(sums * factor, 2, keep_dims=True), square
