"""Rows of 2, 3 and 4 bits times inputs in words of bytes: four products an instruction (`dp4a`).

A thread has a quad of `RT` rows (`kernels/quantized`) and the words of its inputs in registers: what is
left a weight is half an instruction of products and a quarter or two of logic. Levels are bytes where
they lie, masked and not moved: those of the place p are 4^p (of four bits 16^p) times as large, so sums
go from the last place to the first and are shifted between. Three bits look their levels up in a table
of eight bytes (`prmt`).
"""

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    from blr.kernels.gemv.triton import bias_of, store_rows
    from blr.kernels.quantized.bytes import four_products
    from blr.kernels.quantized.correction import correction
    from blr.kernels.quantized.triton import row_sums, stage_start
except ImportError as error:
    raise ImportError("these kernels need triton") from error


@triton.jit
def apart(words):
    """[RT, lanes] of each of the four words of quads [RT, lanes, 4]."""
    pairs = tl.reshape(words, (words.shape[0], words.shape[1], 2, 2))
    even, odd = tl.split(pairs)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def input_words(words, plane, quads, T: tl.constexpr):
    """The four words of inputs [1, lanes] of a plane of `form.Inputs`, lane l being quad l % BQ."""
    LANES: tl.constexpr = T.T * T.BQ
    index = tl.arange(0, LANES * 4)
    at = words + plane * quads * 4 + (index // 4 % T.BQ * 4 + index % 4)
    return apart(tl.reshape(tl.load(at), (1, LANES, 4)))


@triton.jit
def looked_up(words, HALF: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, ASM: tl.constexpr):
    """The bytes of a table of eight, in two words, for the four nibbles of a half of words."""
    if HALF == 1:
        words = words >> 16
    if ASM:
        # Constants of the asm itself would be spelled at each use; registers hold them once.
        low = tl.full(words.shape, LOW, tl.int32)
        high = tl.full(words.shape, HIGH, tl.int32)
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, words], tl.int32, True, 1
        )
    else:
        found = tl.zeros(words.shape, tl.int32)
        for byte in tl.static_range(4):
            level = (words >> (4 * byte)) & 7
            table = tl.where(level < 4, LOW, HIGH) >> (level % 4 * 8)
            found = found | ((table & 255) << (8 * byte))
        return found


@triton.jit
def levels(
    tile, WORD: tl.constexpr, PLACE: tl.constexpr, LOW, HIGH, BITS: tl.constexpr, ASM: tl.constexpr
):
    """The levels of place PLACE of word WORD of a tile taken `apart`, as bytes [RT, lanes]."""
    if BITS == 3:
        return looked_up(tile[PLACE // 2][WORD], PLACE % 2, LOW, HIGH, ASM)
    elif BITS == 4:
        return tile[0][WORD] & (0x0F0F0F0F if PLACE == 0 else -0x0F0F0F10)
    elif PLACE == 0:
        return tile[0][WORD] & 0x03030303
    elif PLACE == 1:
        return tile[0][WORD] & 0x0C0C0C0C
    elif PLACE == 2:
        return tile[0][WORD] & 0x30303030
    else:
        return tile[0][WORD] & -0x3F3F3F40


@triton.jit
def byte_products(tile, words, quads, LOW: tl.constexpr, HIGH: tl.constexpr, ASM: tl.constexpr,
                  T: tl.constexpr):  # fmt: skip
    """[RT, lanes] sums of levels as bytes times inputs as integers, in float32."""
    PLACES: tl.constexpr = 2 if T.BITS == 4 else 4
    SIGNED: tl.constexpr = T.BITS == 3
    parts = (apart(tile[0]), apart(tile[len(tile) - 1]))
    high = tl.zeros(parts[0][0].shape, tl.int32)
    low = high
    for back in tl.static_range(PLACES):
        x_high = input_words(words, 2 * (PLACES - 1 - back), quads, T)
        x_low = input_words(words, 2 * (PLACES - 1 - back) + 1, quads, T)
        if T.BITS != 3:
            high = high >> T.BITS
            low = low >> T.BITS
        for i in tl.static_range(4):
            some = levels(parts, i, PLACES - 1 - back, LOW, HIGH, T.BITS, ASM)
            high = four_products(some, tl.broadcast_to(x_high[i], some.shape), high, SIGNED, True, ASM)
            low = four_products(some, tl.broadcast_to(x_low[i], some.shape), low, SIGNED, False, ASM)
    return (high * 256 + low).to(tl.float32)


@triton.jit
def tile_rows(tile, s, words, sums, quads, LOW: tl.constexpr, HIGH: tl.constexpr, T: tl.constexpr,
              ADD: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One tile of a stage, stored, or added to what its result holds."""
    started = stage_start(tile, s, T)
    if PDL:
        gdc_wait()
    chunk, factor = started[0]
    LANES: tl.constexpr = T.T * T.BQ
    lane = tl.arange(0, LANES) % T.BQ
    products = byte_products(chunk, words, quads, LOW, HIGH, ASM, T)
    scale = tl.load(sums + lane)[None, :]
    total = tl.load(sums + quads + lane)[None, :]
    products = (products - total) * (tl.reshape(factor, products.shape) * scale)
    out, ok, narrow = started[4], started[5], started[6]
    found = row_sums(tl.reshape(products, factor.shape), T.BQ)
    found += correction(s, narrow, 0, T) + bias_of(s, out, ok, T.BIAS)
    store_rows(s, s.y, 0, found, found, out, ok, 1, 1, ADD)


@triton.jit
def rows_kernel(
    s0, s1, s2, ends, words, sums, quads, COUNT: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr, ADD: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """COUNT segments of the same inputs; ends: programs up to the end of each."""
    if PDL:
        gdc_launch_dependents()
    program = tl.program_id(0)
    if program < ends[0]:
        tile_rows(program, s0, words, sums, quads, LOW, HIGH, T0, ADD, ASM, PDL)
    if COUNT > 1:  # noqa: SIM102 (known when compiled, the rest is not)
        if (program >= ends[0]) & (program < ends[1]):
            tile_rows(program - ends[0], s1, words, sums, quads, LOW, HIGH, T1, ADD, ASM, PDL)
    if COUNT > 2:  # noqa: SIM102
        if program >= ends[1]:
            tile_rows(program - ends[1], s2, words, sums, quads, LOW, HIGH, T2, ADD, ASM, PDL)
