"""Packed words in registers: where they are, how they become numbers, what they are multiplied with.

A tile has RT rows for each of its lanes; a lane is one quad of a row: 16 bytes, four words, one load.
Derivation: README.md.
"""

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("these kernels need triton") from error


@triton.jit
def load_chunk(words, scales, start, LANES: tl.constexpr, BITS: tl.constexpr):
    """Packed words [RT, lanes, 4] from quad `start` on, and the scales of their groups in float32
    [RT, lanes, 1]; zero outside.

    words, scales: where those of the first chunk are, [RT·lanes·4] and [RT·lanes], each with the
    number of quads from there to the end of the row. One axis, because compilers differ in how they
    lay out more: so a thread gets neighbouring words, and the next lane's are the next thread's.
    """
    at, left = words
    tile = tl.load(at + start * 4, mask=start < left, other=0)
    at, left = scales
    factor = tl.load(at + start // BITS, mask=start < left, other=0.0).to(tl.float32)
    RT: tl.constexpr = factor.shape[0] // LANES
    return tl.reshape(tile, (RT, LANES, 4)), tl.reshape(factor, (RT, LANES, 1))


@triton.jit
def tile_places(
    w, w_row, scale, scale_row, rows, K, RT: tl.constexpr, T: tl.constexpr, BQ: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """What `load_chunk` takes, for `rows` rows of K columns from w and scale on: lane l is quad
    l % BQ of row l // BQ, T rows side by side."""
    LANES: tl.constexpr = T * BQ
    end = tl.cdiv(K, 128) * BITS  # a group of 128 columns has BITS quads
    index = tl.arange(0, RT * LANES * 4)
    row = index // (4 * LANES) * T + index // (4 * BQ) % T
    quad = index // 4 % BQ
    words = w + (row * w_row + quad * 4 + index % 4), tl.where(row < rows, end - quad, 0)
    index = tl.arange(0, RT * LANES)
    row = index // LANES * T + index // BQ % T
    quad = index % BQ
    return words, (scale + (row * scale_row + quad // BITS), tl.where(row < rows, end - quad, 0))


@triton.jit
def field_number(tile, FIELD: tl.constexpr, BITS: tl.constexpr):
    """Level of field FIELD (bits BITS·FIELD on) of packed words plus `field_offset`, as float32.

    The byte of the field is moved to bits 15 to 22, where it is the head of a mantissa, and the field
    joined with the exponent of the power of two that gives its last bit the value 1.
    """
    # Zero, which no compiler knows: constants stay in registers, and one instruction masks and joins.
    zero = tl.program_id(2) << 15
    if FIELD * BITS // 8 == 0:
        moved = tile << 15
    elif FIELD * BITS // 8 == 1:
        moved = tile << 7
    elif FIELD * BITS // 8 == 2:
        moved = tile >> 1
    else:
        moved = tile >> 9
    if BITS == 8:
        number = (moved & 0x7F8000) ^ (zero + 0x43C00000)  # the sign bit flipped: 2^8 + level + 128
    elif FIELD % 2 == 0:
        number = (moved & 0x78000) ^ (zero + 0x43800000)  # 2^8 + level + 8
    else:
        number = (moved & 0x780000) ^ (zero + 0x41800000)  # 2^4 + level + 8
    return number.to(tl.float32, bitcast=True)


@triton.jit
def field_offset(FIELD: tl.constexpr, BITS: tl.constexpr):
    """What `field_number` adds to a level."""
    if BITS == 8:
        return 384.0
    elif FIELD % 2 == 0:
        return 264.0
    else:
        return 24.0


@triton.jit
def field_level(tile, FIELD: tl.constexpr, BITS: tl.constexpr):
    """Levels of field FIELD of packed words, as float32, exactly."""
    return field_number(tile, FIELD, BITS) - field_offset(FIELD, BITS)


@triton.jit
def field_columns(lanes: tl.constexpr, BQ: tl.constexpr, BITS: tl.constexpr):
    """[lanes·4] columns of field 0 of the words of quads, lane l being quad l % BQ of a row; the next
    field is 4·BITS further."""
    index = tl.arange(0, lanes * 4)
    quad = index // 4 % BQ
    return (quad // BITS) * 128 + (quad % BITS) * 4 + index % 4


@triton.jit
def field_inputs(x, gain, past, column, FIELD: tl.constexpr, BITS: tl.constexpr, NORM: tl.constexpr):
    """[1, lanes, 4] inputs of one token for field FIELD of the chunk that begins at `column`, in
    float32, zero outside, and their squares before the gain. x, gain, past: see `rows_by_fma`."""
    shape: tl.constexpr = (1, past.shape[0] // 4, 4)
    ahead = column + FIELD * 4 * BITS
    v = tl.load(x + ahead, mask=past + ahead < 0, other=0.0).to(tl.float32)
    square = v * v
    if NORM:
        v *= tl.load(gain + ahead, mask=past + ahead < 0, other=0.0).to(tl.float32)
    return tl.reshape(v, shape), tl.reshape(square, shape)


@triton.jit
def chunk_inputs(x, gain, past, column, BITS: tl.constexpr, NORM: tl.constexpr):
    """`field_inputs` of all fields as a tuple, and the sum of their squares [1, lanes, 4]."""
    v0, s0 = field_inputs(x, gain, past, column, 0, BITS, NORM)
    v1, s1 = field_inputs(x, gain, past, column, 1, BITS, NORM)
    v2, s2 = field_inputs(x, gain, past, column, 2, BITS, NORM)
    v3, s3 = field_inputs(x, gain, past, column, 3, BITS, NORM)
    square = (s0 + s1) + (s2 + s3)
    if BITS == 8:
        return (v0, v1, v2, v3), square
    else:
        v4, s4 = field_inputs(x, gain, past, column, 4, BITS, NORM)
        v5, s5 = field_inputs(x, gain, past, column, 5, BITS, NORM)
        v6, s6 = field_inputs(x, gain, past, column, 6, BITS, NORM)
        v7, s7 = field_inputs(x, gain, past, column, 7, BITS, NORM)
        return (v0, v1, v2, v3, v4, v5, v6, v7), square + ((s4 + s5) + (s6 + s7))


@triton.jit
def quad_sums(tile, inputs, BITS: tl.constexpr, EXACT: tl.constexpr):
    """[RT, lanes, 1] sums over quads of levels times inputs.

    The offsets of numbers are multiplied with the inputs once for all rows and taken from the sum;
    with EXACT from each number, which costs one instruction a weight and no rounding.
    """
    if EXACT:
        sums = field_level(tile, 0, BITS) * inputs[0]
        for field in tl.static_range(1, 32 // BITS):
            sums += field_level(tile, field, BITS) * inputs[field]
    else:
        start = inputs[0] * -field_offset(0, BITS)
        for field in tl.static_range(1, 32 // BITS):
            start -= inputs[field] * field_offset(field, BITS)
        sums = start + field_number(tile, 0, BITS) * inputs[0]
        for field in tl.static_range(1, 32 // BITS):
            sums += field_number(tile, field, BITS) * inputs[field]
    return tl.sum(sums, 2, keep_dims=True)
