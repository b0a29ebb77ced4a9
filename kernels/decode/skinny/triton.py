"""Products of up to 64 tokens with weights that are read once, on the tensor cores.

The last of the SPLIT parts of the columns that arrives adds them up in their order. Derivation:
../README.md.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blr.kernels.decode.gemv.triton import activate, bias_of, outputs
from blr.kernels.decode.skinny.products import packed_products, plain_pair, plain_products


@triton.jit
def corrections(s, u, part, tokens, NP: tl.constexpr, T: tl.constexpr):
    """[BR, NP]: rows of U, read before inputs are there, times z [n, ranks]."""
    rank = tl.arange(0, T.RANKS)
    token = tl.arange(0, NP)
    ok = (rank < tl.where(part == 0, s.ranks, 0))[:, None] & (token < tokens)[None, :]
    z = tl.load(s.z + token[None, :] * s.z_token + rank[:, None], mask=ok, other=0.0)
    return tl.dot(u, z.to(u.dtype))


@triton.jit
def ask_ahead(w, K, begin, end, T: tl.constexpr):
    """Ask the first AHEAD lines of 128 bytes of every row into the second-level cache."""
    unit = T.GROUP * T.BITS // 16 if T.BITS < 16 else 1
    line = begin * (T.STEP * unit) + tl.arange(0, T.AHEAD) * 64
    last = tl.minimum(end * T.STEP, K) * unit - 1
    at = w[:, None] + tl.minimum(line, last)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], tl.int32, False, 1
    )


@triton.jit
def slice_place(program, s, T: tl.constexpr):
    """One part of the columns of a tile: (first weights of its rows, their scales, input, first step,
    step after the last, outputs, valid, part). s, T: `launch.SkinnyStage`, `launch.SkinnyTile`."""
    BR: tl.constexpr = T.BR
    tiles = tl.cdiv(s.rows, BR)
    tile = program // T.SPLIT
    part = program % T.SPLIT
    block = tile // tiles
    row = tile % tiles * BR + tl.arange(0, BR)
    held = tl.minimum(row, s.rows - 1).to(tl.int64)  # rows past the end are read again, not masked
    w = s.w + (block.to(tl.int64) * s.w_block + held * s.w_row)
    scale = s.scale + (block.to(tl.int64) * s.scale_block + held * s.scale_row)
    steps = tl.cdiv(s.K, T.STEP)
    each = tl.cdiv(steps, T.SPLIT)
    end = tl.minimum(part * each + each, steps)
    x = s.x + block * s.x_block
    return w, scale, x, part * each, end, outputs(s, block, row), row < s.rows, part


@triton.jit
def before_inputs(s, place, T: tl.constexpr):
    """What a program asks for before its inputs are there; rows of U [BR, RANKS] of a correction."""
    w, begin, end, out, ok, part = place[0], place[3], place[4], place[5], place[6], place[7]
    if T.AHEAD > 0:
        ask_ahead(w, s.K, begin, end, T)
    if T.RANKS > 0:
        rank = tl.arange(0, T.RANKS)
        there = ok[:, None] & (rank < tl.where(part == 0, s.ranks, 0))[None, :]
        return tl.load(s.u + out[:, None] * s.u_row + rank[None, :], mask=there, other=0.0)
    else:
        return 0.0


@triton.jit
def first_sums(s, u, part, tokens, NP: tl.constexpr, T: tl.constexpr):
    """[BR, NP] that a part begins with: the correction, of part 0, or zeros."""
    BR: tl.constexpr = T.BR
    sums = tl.zeros([BR, NP], tl.float32)
    if T.RANKS > 0:
        sums += corrections(s, u, part, tokens, NP, T)
    return sums


@triton.jit
def slice_products(program, s, tokens, NP: tl.constexpr, T: tl.constexpr, WAIT: tl.constexpr):
    """Sums of one part of the columns of a tile: ([BR, NP], outputs [BR], valid)."""
    place = slice_place(program, s, T)
    u = before_inputs(s, place, T)
    if WAIT:
        gdc_wait()
    w, scale, x, begin, end, out, ok, part = place
    sums = first_sums(s, u, part, tokens, NP, T)
    if T.BITS < 16:
        sums, _ = packed_products(
            s, s, w, w, scale, scale, x, x, begin, end, tokens, sums, sums, NP, T, False, True
        )  # fmt: skip
    else:
        sums = plain_products(s, w, x, begin, end, tokens, sums, NP, T)
    return sums, out, ok


@triton.jit
def pair_products(
    program, s0, s1, tokens, NP: tl.constexpr, T0: tl.constexpr, T1: tl.constexpr,
    TOGETHER: tl.constexpr, SHARED: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """`slice_products` of the same rows of two stages: (sums, sums, outputs, valid). TOGETHER: they have
    as many columns. SHARED: and one input."""
    if TOGETHER:
        place0 = slice_place(program, s0, T0)
        place1 = slice_place(program, s1, T1)
        u0 = before_inputs(s0, place0, T0)
        u1 = before_inputs(s1, place1, T1)
        if WAIT:
            gdc_wait()
        w0, scale0, x, begin, end, out, ok, part = place0
        w1, scale1, x1 = place1[0], place1[1], place1[2]
        sums0 = first_sums(s0, u0, part, tokens, NP, T0)
        sums1 = first_sums(s1, u1, part, tokens, NP, T1)
        if T0.BITS < 16:
            sums0, sums1 = packed_products(
                s0, s1, w0, w1, scale0, scale1, x, x1, begin, end, tokens, sums0, sums1, NP, T0, True,
                SHARED,
            )  # fmt: skip
        else:
            sums0, sums1 = plain_pair(
                s0, s1, w0, w1, x, x1, begin, end, tokens, sums0, sums1, NP, T0, SHARED
            )  # fmt: skip
    else:
        sums0, out, ok = slice_products(program, s0, tokens, NP, T0, WAIT)
        sums1, out, ok = slice_products(program, s1, tokens, NP, T1, False)
    return sums0, sums1, out, ok


@triton.jit
def area_of(partial, tile, part, BR: tl.constexpr, NP: tl.constexpr, SPLIT: tl.constexpr):
    """[BR, NP] pointers to what part number `part` of a tile leaves for the last one."""
    at = tl.arange(0, BR)[:, None] * NP + tl.arange(0, NP)[None, :]
    return partial + ((tile * SPLIT + part).to(tl.int64) * (BR * NP) + at)


@triton.jit
def arrives_last(counter, SPLIT: tl.constexpr):
    """Whether this program is the last of SPLIT, whose stores are then there; puts the count back."""
    tl.debug_barrier()  # all stores of the program before its one arrival
    last = tl.atomic_add(counter, 1, sem="acq_rel") == SPLIT - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def whole_sums(partial, tile, BR: tl.constexpr, NP: tl.constexpr, SPLIT: tl.constexpr):
    """[BR, NP]: the parts of a tile, added in their order."""
    total = tl.zeros([BR, NP], tl.float32)
    for part in tl.static_range(SPLIT):
        total += tl.load(area_of(partial, tile, part, BR, NP, SPLIT), cache_modifier=".cg")
    return total


@triton.jit
def place_of(column, LOW: tl.constexpr, GROUP: tl.constexpr):
    """Where a column is in the order of fields, the inverse of `prepare.source_of`."""
    if LOW == 16:
        return column
    else:
        WORDS: tl.constexpr = GROUP * LOW // 32
        inside = column % GROUP
        field = inside // WORDS
        half = field // (16 // LOW)
        return column - inside + field % (16 // LOW) * (2 * WORDS) + inside % WORDS * 2 + half


@triton.jit
def store_tokens(s, sums, place, ok, tokens, NP: tl.constexpr, ADD: tl.constexpr):
    """Store results [BR, NP] at places of every token, or add them to what is there."""
    token = tl.arange(0, NP)[None, :]
    ok = ok[:, None] & (token < tokens)
    at = s.y + token * s.y_token + place[:, None]
    if ADD:
        sums += tl.load(at, mask=ok, other=0.0).to(tl.float32)
    tl.store(at, sums.to(s.y.dtype.element_ty), mask=ok)


@triton.jit
def finish(s, sums, out, ok, tokens, NP: tl.constexpr, T: tl.constexpr, ADD: tl.constexpr):
    """Store whole sums of a tile, or add them to the result."""
    sums += bias_of(s, out, ok, T.BIAS)[:, None]
    place = place_of(out, T.LOW, T.LOW_GROUP)
    store_tokens(s, sums, place, ok, tokens, NP, ADD)


@triton.jit
def run_segment(
    program, first, s, partial, counter, tokens,
    NP: tl.constexpr, T: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program of a segment whose first program is number `first`."""
    sums, out, ok = slice_products(program - first, s, tokens, NP, T, PDL)
    tile = program // T.SPLIT
    if T.SPLIT == 1:
        finish(s, sums, out, ok, tokens, NP, T, ADD)
    else:
        tl.store(area_of(partial, tile, program % T.SPLIT, T.BR, NP, T.SPLIT), sums)
        if arrives_last(counter + tile, T.SPLIT):
            sums = whole_sums(partial, tile, T.BR, NP, T.SPLIT)
            finish(s, sums, out, ok, tokens, NP, T, ADD)


@triton.jit
def grouped_kernel(
    s0, s1, s2, end0, end1, partial, counter, tokens,
    COUNT: tl.constexpr, NP: tl.constexpr, T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr,
    ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """COUNT segments: programs up to end0 do the first, up to end1 the second."""
    if PDL:
        gdc_launch_dependents()
    program = tl.program_id(0)
    if program < end0:
        run_segment(program, 0, s0, partial, counter, tokens, NP, T0, ADD, PDL)
    if COUNT > 1:  # noqa: SIM102 (known when compiled, the rest is not)
        if (program >= end0) & (program < end1):
            run_segment(program, end0, s1, partial, counter, tokens, NP, T1, ADD, PDL)
    if COUNT > 2:  # noqa: SIM102
        if program >= end1:
            run_segment(program, end1, s2, partial, counter, tokens, NP, T2, ADD, PDL)


@triton.jit
def dual_kernel(
    s0, s1, partial, counter, tokens,
    NP: tl.constexpr, T0: tl.constexpr, T1: tl.constexpr, TOGETHER: tl.constexpr,
    SHARED: tl.constexpr, ACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same rows of gate and up: ``act(gate) ⊙ up`` into the second segment's result."""
    if PDL:
        gdc_launch_dependents()
    program = tl.program_id(0)
    gate, up, out, ok = pair_products(
        program, s0, s1, tokens, NP, T0, T1, TOGETHER, SHARED, PDL
    )  # fmt: skip
    if T0.SPLIT == 1:
        gate += bias_of(s0, out, ok, T0.BIAS)[:, None]
        finish_pair(s1, gate, up, out, ok, tokens, NP, T1, ACT)
    else:
        tile = program // T0.SPLIT
        part = program % T0.SPLIT
        tl.store(area_of(partial, 2 * tile, part, T0.BR, NP, T0.SPLIT), gate)
        tl.store(area_of(partial, 2 * tile + 1, part, T0.BR, NP, T0.SPLIT), up)
        if arrives_last(counter + tile, T0.SPLIT):
            gate = whole_sums(partial, 2 * tile, T0.BR, NP, T0.SPLIT)
            up = whole_sums(partial, 2 * tile + 1, T0.BR, NP, T0.SPLIT)
            gate += bias_of(s0, out, ok, T0.BIAS)[:, None]
            finish_pair(s1, gate, up, out, ok, tokens, NP, T1, ACT)


@triton.jit
def finish_pair(
    s, gate, up, out, ok, tokens, NP: tl.constexpr, T: tl.constexpr, ACT: tl.constexpr
):  # fmt: skip
    """Store ``act(gate) ⊙ up`` of whole sums."""
    up += bias_of(s, out, ok, T.BIAS)[:, None]
    product = activate(gate, ACT) * up
    out = place_of(out, T.LOW, T.LOW_GROUP)
    store_tokens(s, product, out, ok, tokens, NP, False)
