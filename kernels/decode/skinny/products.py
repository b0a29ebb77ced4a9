"""Products of some of the columns of BR rows with tokens: plain and packed, alone and of gate and up."""

import triton
import triton.language as tl


@triton.jit
def unpacked(codes, middle, SHIFT: tl.constexpr, MASK: tl.constexpr, MAGIC: tl.constexpr,
             DTYPE: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """The bits of a number of DTYPE: masked bits of units, moved right by SHIFT and joined with the
    exponent of MAGIC, minus `middle`."""
    if ASM:
        NAME: tl.constexpr = "bf16x2" if tl.bfloat16 == DTYPE else "f16x2"
        ONES: tl.constexpr = MASK * 65537
        HEAD: tl.constexpr = MAGIC * 65537
        MOVE: tl.constexpr = "shr.b32" if SHIFT > 0 else "shl.b32"
        BY: tl.constexpr = SHIFT if SHIFT > 0 else -SHIFT
        if SHIFT != 0:
            number = tl.inline_asm_elementwise(
                f"{MOVE} $0, $1, {BY}; lop3.b32 $0, $0, {ONES}, {HEAD}, 0xEA; sub.{NAME} $0, $0, $2;",
                *("=&r,r,r", [codes, middle], tl.int16, True, 2),
            )
        else:
            number = tl.inline_asm_elementwise(
                f"lop3.b32 $0, $1, {ONES}, {HEAD}, 0xEA; sub.{NAME} $0, $0, $2;",
                *("=&r,r,r", [codes, middle], tl.int16, True, 2),
            )
        return number
    else:
        moved = codes >> SHIFT if SHIFT >= 0 else codes << -SHIFT
        number = ((moved & MASK) | MAGIC).to(tl.int16).to(DTYPE, bitcast=True)
        number = number - middle.to(DTYPE, bitcast=True)
        return number.to(tl.int16, bitcast=True)


@triton.jit
def curved(words, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Of the bits of y, half of x: 100 times what x of three bits stands for, y (200 + 16 y²), of which
    only the last product is rounded."""
    if ASM:
        BF: tl.constexpr = tl.bfloat16 == DTYPE
        NAME: tl.constexpr = "bf16x2" if BF else "f16x2"
        steep = tl.full(words.shape, 0x4180 if BF else 0x4C00, tl.int16)  # 16 and 200, as DTYPE
        flat = tl.full(words.shape, 0x4348 if BF else 0x5A40, tl.int16)
        return tl.inline_asm_elementwise(
            f"mul.{NAME} $0, $1, $1; fma.rn.{NAME} $0, $0, $2, $3; mul.{NAME} $0, $0, $1;",
            *("=&r,r,r,r", [words, steep, flat], tl.int16, True, 2),
        )
    else:
        y = words.to(DTYPE, bitcast=True)
        return (y * (y * y * 16.0 + 200.0)).to(DTYPE).to(tl.int16, bitcast=True)


@triton.jit
def byte_levels(codes, FIELD: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Signed bytes of units as DTYPE: their low seven bits less 128 times their sign bit, both with the
    exponent that gives the last bit the value 1."""
    MAGIC: tl.constexpr = 0x4300 if tl.bfloat16 == DTYPE else 0x6400
    SHIFT: tl.constexpr = 8 * FIELD
    if ASM:
        HEAD: tl.constexpr = MAGIC * 65537
        sign = tl.inline_asm_elementwise(
            f"shr.b32 $0, $1, {SHIFT}; lop3.b32 $0, $0, 0x800080, {HEAD}, 0xEA;",
            *("=&r,r", [codes], tl.int16, True, 2),
        )
    else:
        sign = (((codes >> SHIFT) & 0x80) | MAGIC).to(tl.int16)
    return unpacked(codes, sign, SHIFT, 0x7F, MAGIC, DTYPE, ASM).to(DTYPE, bitcast=True)


@triton.jit
def operand_of(codes, FIELD: tl.constexpr, BITS: tl.constexpr, CURVED: tl.constexpr,
               DTYPE: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """What field FIELD of units of 16 bits stands for, as DTYPE: half of it, or 100 times that of a
    curved grid, or all of bytes.

    The field gets an exponent that gives its last bit the value ½, where it is if that is inside the
    mantissa, and the difference to the middle of the grid is taken: both are exact.
    """
    if BITS == 8:
        return byte_levels(codes[0], FIELD, DTYPE, ASM)
    else:
        MANTISSA: tl.constexpr = 7 if tl.bfloat16 == DTYPE else 10
        EXPONENT: tl.constexpr = 127 if tl.bfloat16 == DTYPE else 15
        FIRST: tl.constexpr = 1 if BITS == 2 else 0  # place of a field: the middle of int2 is a quarter
        WIDTH: tl.constexpr = 2 if BITS == 2 else 4  # bits from one field to the next
        EACH: tl.constexpr = (MANTISSA - FIRST) // WIDTH  # fields of a mantissa
        NUMBER: tl.constexpr = FIELD // 2 if BITS == 3 else FIELD
        # Three bits of a nibble have room for the quarter of their middle below them.
        PLACE: tl.constexpr = MANTISSA - 3 if BITS == 3 else NUMBER % EACH * WIDTH + FIRST
        SHIFT: tl.constexpr = NUMBER * WIDTH - PLACE
        MASK: tl.constexpr = ((1 << BITS) - 1) << PLACE
        MAGIC: tl.constexpr = (MANTISSA - 1 - PLACE + EXPONENT) << MANTISSA
        MIDDLE: tl.constexpr = MAGIC + (((1 << BITS) - (CURVED or BITS == 2)) << PLACE) // 2
        words = codes[FIELD % 2] if BITS == 3 else codes[0]
        middle = tl.full(words.shape, MIDDLE, tl.int16)
        number = unpacked(words, middle, SHIFT, MASK, MAGIC, DTYPE, ASM)
        if CURVED:
            number = curved(number, DTYPE, ASM)
        return number.to(DTYPE, bitcast=True)


@triton.jit
def field_inputs(s, x, step, member, field, tokens, NP: tl.constexpr, T: tl.constexpr):
    """[halves, NP] inputs that field number `field` of the groups of a step meets; of one `member` of
    several groups, zero for the others."""
    HALVES: tl.constexpr = T.GROUP * (2 if T.BITS == 3 else T.BITS) // 16  # of the lowest plane
    half = tl.arange(0, T.STEP * HALVES)
    token = tl.arange(0, NP)
    place = (step * T.STEP + half // HALVES) * T.GROUP + field * HALVES + half % HALVES
    there = (token < tokens)[None, :]
    if T.STEP > 1:
        there &= (half // HALVES == member)[:, None] & (place < s.K * T.GROUP)[:, None]
    return tl.load(x + token[None, :] * s.x_token + place[:, None], mask=there, other=0.0)


@triton.jit
def step_codes(s, w, step, T: tl.constexpr):
    """[BR, halves] units of 16 bits of the groups of a step; of three bits two: nibbles of the even
    fields and of the odd ones."""
    HALVES: tl.constexpr = T.GROUP * (2 if T.BITS == 3 else T.BITS) // 16  # of the lowest plane
    half = tl.arange(0, T.STEP * HALVES)
    if T.BITS == 3:
        # Unit i of the high plane has bits of units i and i + HIGH of the low one. Two masked loads in
        # place of one that is shifted by place: what is made of loads alone stays in registers.
        HIGH: tl.constexpr = HALVES // 2
        group = step * T.STEP + half // HALVES
        first = w[:, None] + (group * (HALVES + HIGH))[None, :]
        there, place = group < s.K, half % HALVES
        low = tl.load(first + place[None, :], mask=there[None, :], other=0)
        at = first + (HALVES + half % HIGH)[None, :]
        left = tl.load(at, mask=(there & (place < HIGH))[None, :], other=0)
        right = tl.load(at, mask=(there & (place >= HIGH))[None, :], other=0)
        return nibbles(low, left, right, T.ASM)
    else:
        at = step * (T.STEP * HALVES) + half
        if T.FULL:
            return (tl.load(w[:, None] + at[None, :]),)
        else:
            return (tl.load(w[:, None] + at[None, :], mask=(at < s.K * HALVES)[None, :], other=0),)


@triton.jit
def nibbles(low, left, right, ASM: tl.constexpr):
    """The even and the odd fields of units of two bits, above field f bit 2 f of `left` or 2 f + 1 of
    `right`; the highest bit of a nibble may be anything."""
    if ASM:
        high = tl.inline_asm_elementwise(
            "shr.b32 $0, $2, 1; or.b32 $0, $0, $1;", *("=&r,r,r", [left, right], tl.int16, True, 2)
        )
        even = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 2; lop3.b32 $0, $1, $0, 0x33333333, 0xE4;",
            *("=&r,r,r", [low, high], tl.int16, True, 2),
        )
        odd = tl.inline_asm_elementwise(
            "shr.b32 $0, $1, 2; lop3.b32 $0, $0, $2, 0x33333333, 0xE4;",
            *("=&r,r,r", [low, high], tl.int16, True, 2),
        )
        return even, odd
    else:
        high = left | ((right >> 1) & 0x7FFF)
        even = (low & 0x3333) | ((high << 2) & 0x4444)
        odd = ((low >> 2) & 0x3333) | (high & 0x4444)
        return even.to(tl.int16), odd.to(tl.int16)


@triton.jit
def field_products(codes, v, sums, field, T: tl.constexpr):
    """`sums` plus products of one field."""
    return tl.dot(operand_of(codes, field, T.BITS, T.CURVED, v.dtype, T.ASM), v, sums)


@triton.jit
def scaled_sums(sums, part, factor, T: tl.constexpr):
    """`sums` plus those of a group, times its scale."""
    UNIT: tl.constexpr = 1.0 if T.BITS == 8 else 0.01 if T.CURVED else 2.0  # of `operand_of`
    return sums + part * (factor.to(tl.float32) * UNIT)[:, None]


@triton.jit
def packed_products(
    s, s1, w, w1, scale, scale1, x, x1, begin, end, tokens, sums, sums1,
    NP: tl.constexpr, T: tl.constexpr, PAIR: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """`sums` [BR, NP] plus those of steps begin … end - 1; if PAIR of two stages with as many columns,
    and if SHARED of one input, loaded once.

    A step is a group, or as many as have 16 units; then each is multiplied with inputs of its own, zero
    for the others. Scales are loaded a group ahead, and multiply the sums of a group.
    """
    FIELDS: tl.constexpr = 16 // (2 if T.BITS == 3 else T.BITS)
    MEMBERS: tl.constexpr = T.STEP
    BR: tl.constexpr = T.BR
    last = tl.minimum(end * MEMBERS, s.K) - 1
    factor = tl.load(scale + tl.minimum(begin * MEMBERS, last))
    if PAIR:
        factor1 = tl.load(scale1 + tl.minimum(begin * MEMBERS, last))
    for step in tl.range(begin, end, num_stages=T.STAGES):
        codes = step_codes(s, w, step, T)
        if PAIR:
            codes1 = step_codes(s, w1, step, T)
        for member in tl.static_range(MEMBERS):
            ahead = tl.minimum(step * MEMBERS + member + 1, last)
            following = tl.load(scale + ahead)
            if PAIR:
                following1 = tl.load(scale1 + ahead)
            part = tl.zeros([BR, NP], tl.float32)
            part1 = part
            for field in tl.static_range(FIELDS):
                v = field_inputs(s, x, step, member, field, tokens, NP, T)
                part = field_products(codes, v, part, field, T)
                if PAIR:
                    if not SHARED:
                        v = field_inputs(s1, x1, step, member, field, tokens, NP, T)
                    part1 = field_products(codes1, v, part1, field, T)
            sums = scaled_sums(sums, part, factor, T)
            factor = following
            if PAIR:
                sums1 = scaled_sums(sums1, part1, factor1, T)
                factor1 = following1
    return sums, sums1


@triton.jit
def plain_products(s, w, x, begin, end, tokens, sums, NP: tl.constexpr, T: tl.constexpr):
    """`sums` [BR, NP] plus those of steps begin … end - 1."""
    lane = tl.arange(0, T.STEP)
    token = tl.arange(0, NP)
    at_x = x + token[None, :] * s.x_token
    there = (token < tokens)[None, :]
    for step in tl.range(begin, end, num_stages=T.STAGES):
        cols = step * T.STEP + lane
        if T.FULL:
            tile = tl.load(w[:, None] + cols[None, :])
            v = tl.load(at_x + cols[:, None], mask=there, other=0.0)
        else:
            ok = cols < s.K
            tile = tl.load(w[:, None] + cols[None, :], mask=ok[None, :], other=0.0)
            v = tl.load(at_x + cols[:, None], mask=there & ok[:, None], other=0.0)
        sums = tl.dot(tile, v, sums)
    return sums


@triton.jit
def plain_pair(
    s, s1, w0, w1, x, x1, begin, end, tokens, sums0, sums1,
    NP: tl.constexpr, T: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """`plain_products` of two stages with as many columns. SHARED: of one input, loaded once."""
    lane = tl.arange(0, T.STEP)
    token = tl.arange(0, NP)
    at_x = x + token[None, :] * s.x_token
    there = (token < tokens)[None, :]
    for step in tl.range(begin, end, num_stages=T.STAGES):
        cols = step * T.STEP + lane
        ok = cols < s.K
        v = tl.load(at_x + cols[:, None], mask=there & ok[:, None], other=0.0)
        if T.FULL:
            tile0 = tl.load(w0[:, None] + cols[None, :])
            tile1 = tl.load(w1[:, None] + cols[None, :])
        else:
            tile0 = tl.load(w0[:, None] + cols[None, :], mask=ok[None, :], other=0.0)
            tile1 = tl.load(w1[:, None] + cols[None, :], mask=ok[None, :], other=0.0)
        sums0 = tl.dot(tile0, v, sums0)
        if not SHARED:
            at_1 = x1 + token[None, :] * s1.x_token + cols[:, None]
            v = tl.load(at_1, mask=there & ok[:, None], other=0.0)
        sums1 = tl.dot(tile1, v, sums1)
    return sums0, sums1
