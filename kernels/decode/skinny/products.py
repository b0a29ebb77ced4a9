"""Products of some of the columns of BR rows with tokens: plain and packed, alone and of gate and up."""

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("these kernels need triton") from error


@triton.jit
def operand_of(codes, FIELD: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Half of what field FIELD of units of 16 bits stands for, as DTYPE.

    The field gets an exponent that gives its last bit the value ½, where it is if that is inside the
    mantissa, and the difference to the middle of the grid is taken: both are exact.
    """
    MANTISSA: tl.constexpr = 7 if tl.bfloat16 == DTYPE else 10
    EXPONENT: tl.constexpr = 127 if tl.bfloat16 == DTYPE else 15
    FIRST: tl.constexpr = 0 if BITS == 4 else 1  # place of a field: the middle of int2 is a quarter
    EACH: tl.constexpr = (MANTISSA - FIRST) // BITS  # fields of a mantissa
    PLACE: tl.constexpr = FIELD % EACH * BITS + FIRST
    SHIFT: tl.constexpr = FIELD // EACH * EACH * BITS - FIRST
    MASK: tl.constexpr = ((1 << BITS) - 1) << PLACE
    MAGIC: tl.constexpr = (MANTISSA - 1 - PLACE + EXPONENT) << MANTISSA
    MIDDLE: tl.constexpr = MAGIC + ((16 if BITS == 4 else 3) << PLACE) // 2
    middle = tl.full(codes.shape, MIDDLE, tl.int16)
    if ASM:
        NAME: tl.constexpr = "bf16x2" if tl.bfloat16 == DTYPE else "f16x2"
        ONES: tl.constexpr = MASK * 65537
        HEAD: tl.constexpr = MAGIC * 65537
        if SHIFT > 0:
            number = tl.inline_asm_elementwise(
                f"shr.b32 $0, $1, {SHIFT}; lop3.b32 $0, $0, {ONES}, {HEAD}, 0xEA; sub.{NAME} $0, $0, $2;",  # noqa: E501
                *("=&r,r,r", [codes, middle], tl.int16, True, 2),
            )
        elif SHIFT < 0:
            number = tl.inline_asm_elementwise(
                f"shl.b32 $0, $1, 1; lop3.b32 $0, $0, {ONES}, {HEAD}, 0xEA; sub.{NAME} $0, $0, $2;",
                *("=&r,r,r", [codes, middle], tl.int16, True, 2),
            )
        else:
            number = tl.inline_asm_elementwise(
                f"lop3.b32 $0, $1, {ONES}, {HEAD}, 0xEA; sub.{NAME} $0, $0, $2;",
                *("=&r,r,r", [codes, middle], tl.int16, True, 2),
            )
        return number.to(DTYPE, bitcast=True)
    else:
        moved = codes >> SHIFT if SHIFT >= 0 else codes << 1
        number = ((moved & MASK) | MAGIC).to(tl.int16).to(DTYPE, bitcast=True)
        return number - middle.to(DTYPE, bitcast=True)


@triton.jit
def field_inputs(s, x, step, member, field, tokens, NP: tl.constexpr, T: tl.constexpr):
    """[halves, NP] inputs that field number `field` of the groups of a step meets; of one `member` of
    several groups, zero for the others."""
    HALVES: tl.constexpr = T.GROUP * T.BITS // 16
    half = tl.arange(0, T.STEP * HALVES)
    token = tl.arange(0, NP)
    place = (step * T.STEP + half // HALVES) * T.GROUP + field * HALVES + half % HALVES
    there = (token < tokens)[None, :]
    if T.STEP > 1:
        there &= (half // HALVES == member)[:, None] & (place < s.K * T.GROUP)[:, None]
    return tl.load(x + token[None, :] * s.x_token + place[:, None], mask=there, other=0.0)


@triton.jit
def step_codes(s, w, step, T: tl.constexpr):
    """[BR, halves] units of 16 bits of the groups of a step."""
    HALVES: tl.constexpr = T.GROUP * T.BITS // 16
    at = step * (T.STEP * HALVES) + tl.arange(0, T.STEP * HALVES)
    if T.FULL:
        return tl.load(w[:, None] + at[None, :])
    else:
        return tl.load(w[:, None] + at[None, :], mask=(at < s.K * HALVES)[None, :], other=0)


@triton.jit
def field_products(codes, v, sums, field, T: tl.constexpr):
    """`sums` plus products of one field."""
    return tl.dot(operand_of(codes, field, T.BITS, v.dtype, T.ASM), v, sums)


@triton.jit
def scaled_sums(sums, part, factor):
    """`sums` plus those of a group, times its scale; numbers in registers are halves."""
    return sums + part * (factor.to(tl.float32) * 2.0)[:, None]


@triton.jit
def packed_products(s, w, scale, x, begin, end, tokens, sums, NP: tl.constexpr, T: tl.constexpr):
    """`sums` [BR, NP] plus those of steps begin … end - 1.

    A step is a group, or as many as have 16 units; then each is multiplied with inputs of its own, zero
    for the others. Scales are loaded a group ahead, and multiply the sums of a group.
    """
    FIELDS: tl.constexpr = 16 // T.BITS
    MEMBERS: tl.constexpr = T.STEP
    BR: tl.constexpr = T.BR
    last = tl.minimum(end * MEMBERS, s.K) - 1
    factor = tl.load(scale + tl.minimum(begin * MEMBERS, last))
    for step in tl.range(begin, end, num_stages=T.STAGES):
        codes = step_codes(s, w, step, T)
        for member in tl.static_range(MEMBERS):
            following = tl.load(scale + tl.minimum(step * MEMBERS + member + 1, last))
            part = tl.zeros([BR, NP], tl.float32)
            for field in tl.static_range(FIELDS):
                v = field_inputs(s, x, step, member, field, tokens, NP, T)
                part = field_products(codes, v, part, field, T)
            sums = scaled_sums(sums, part, factor)
            factor = following
    return sums


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
def packed_pair(
    s, s1, w0, w1, scale0, scale1, x, x1, begin, end, tokens, sums0, sums1,
    NP: tl.constexpr, T: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """`packed_products` of two stages with as many columns. SHARED: of one input, loaded once."""
    FIELDS: tl.constexpr = 16 // T.BITS
    MEMBERS: tl.constexpr = T.STEP
    BR: tl.constexpr = T.BR
    last = tl.minimum(end * MEMBERS, s.K) - 1
    factor0 = tl.load(scale0 + tl.minimum(begin * MEMBERS, last))
    factor1 = tl.load(scale1 + tl.minimum(begin * MEMBERS, last))
    for step in tl.range(begin, end, num_stages=T.STAGES):
        codes0 = step_codes(s, w0, step, T)
        codes1 = step_codes(s, w1, step, T)
        for member in tl.static_range(MEMBERS):
            following = tl.minimum(step * MEMBERS + member + 1, last)
            following0 = tl.load(scale0 + following)
            following1 = tl.load(scale1 + following)
            part0 = tl.zeros([BR, NP], tl.float32)
            part1 = tl.zeros([BR, NP], tl.float32)
            for field in tl.static_range(FIELDS):
                v = field_inputs(s, x, step, member, field, tokens, NP, T)
                part0 = field_products(codes0, v, part0, field, T)
                if not SHARED:
                    v = field_inputs(s1, x1, step, member, field, tokens, NP, T)
                part1 = field_products(codes1, v, part1, field, T)
            sums0 = scaled_sums(sums0, part0, factor0)
            sums1 = scaled_sums(sums1, part1, factor1)
            factor0 = following0
            factor1 = following1
    return sums0, sums1


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
