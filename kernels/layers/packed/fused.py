"""Products of 1 and more tokens with weights in few bits, which become plain numbers in registers.

Words and inputs come through rings in shared memory; products of a piece run while the next one's
words are unpacked. Hopper only (`wgmma`), by Gluon: plain Triton waits for every product. Derivation:
README.md.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

# Newer releases of Triton call it `barrier`.
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier


@gluon.constexpr_function
def repeated(kind, count):
    """A tuple of `count` times `kind`."""
    return (kind,) * count


@gluon.constexpr_function
def entry(table, piece, n):
    """Instructions (n 0) or constraints (1) of a piece."""
    return table[piece][n]


@gluon.jit
def word_places(index, GROUP: gl.constexpr, WORDS: gl.constexpr, BITS: gl.constexpr):
    """Of words `index` (0 to 15) of the first step: their group, their place in it, and in a row."""
    if WORDS >= 16:
        group = index * 0
        inside = index
    else:
        group = index // WORDS
        inside = index % WORDS
    return group, inside, group * (GROUP * BITS // 32) + inside


@gluon.jit
def step_group(step, WORDS: gl.constexpr):
    """(group, words into it) where a step begins."""
    if WORDS >= 16:
        return step // (WORDS // 16), step % (WORDS // 16) * 16
    else:
        return step * (16 // WORDS), 0


@gluon.jit
def stacked(fields, LAYOUT: gl.constexpr):
    """[BR, 16·count] of `count` [BR, 16]: the columns of a field are neighbours. No data moves."""
    BR: gl.constexpr = fields[0].shape[0]
    if len(fields) == 2:
        made = gl.permute(gl.join(fields[0], fields[1]), (0, 2, 1))
        made = gl.reshape(made, (BR, 32))
    else:
        made = gl.join(gl.join(fields[0], fields[1]), gl.join(fields[2], fields[3]))
        made = gl.reshape(gl.permute(made, (0, 3, 2, 1)), (BR, 64))
    return gl.convert_layout(made, LAYOUT, assert_trivial=True)


@gluon.jit
def numbers(words, odd, factor, TEXT: gl.constexpr, OPERANDS: gl.constexpr, FIELDS: gl.constexpr,
            LAYOUT: gl.constexpr):  # fmt: skip
    """[BR, 16·FIELDS] weights of a piece of words [BR, 16]; TEXT, OPERANDS: of
    `unpacking.instructions`. odd: of 3 bits the nibbles of odd fields, `words` those of even ones."""
    KINDS: gl.constexpr = repeated(factor.dtype, FIELDS)
    if odd is None:
        fields = gl.inline_asm_elementwise(TEXT, OPERANDS, [words, factor], KINDS, True, 2)
    else:
        fields = gl.inline_asm_elementwise(TEXT, OPERANDS, [words, odd, factor], KINDS, True, 2)
    return stacked(fields, LAYOUT)


@gluon.jit
def product_kernel(
    x, x_token, w, w_row, scale, scale_row, bias, u, u_row, z, y, y_token, partial, counter,
    tokens, rows, K, ranks,
    BITS: gl.constexpr, GROUP: gl.constexpr, ASM: gl.constexpr,
    BR: gl.constexpr, NP: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr, BIAS: gl.constexpr, FULL: gl.constexpr, RANKS: gl.constexpr,
    PARTS: gl.constexpr, WAIT: gl.constexpr,
):  # fmt: skip
    """y [n, rows] = x Wᵀ + bias + z Uᵀ.

    u: [rows, ranks], in the dtype of x. z: [PARTS, n, ranks] float32, summed over PARTS. RANKS: the
    power of two from 16 on that holds `ranks`, 0 without a correction. WAIT: when the kernel waits for
    the launch before: 0 never, 1 before it reads inputs, 2 before it reads z and counters.
    """
    LOW: gl.constexpr = 2 if BITS == 3 else BITS
    WORDS: gl.constexpr = GROUP * LOW // 32  # of a group's lowest plane
    FIELDS: gl.constexpr = 2 if BITS == 8 else 4  # of a word, in a piece of a step
    PIECES: gl.constexpr = 32 // LOW // FIELDS
    COLUMNS: gl.constexpr = 16 * FIELDS
    D: gl.constexpr = x.dtype.element_ty
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, NP, 16]
    )
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    SWIZZLE: gl.constexpr = 128 if COLUMNS >= 64 else 64
    AHEAD: gl.constexpr = STAGES - 2  # pieces that are on their way
    KEPT: gl.constexpr = (AHEAD + PIECES - 1) // PIECES + 1  # steps whose words are kept
    XS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=SWIZZLE, element_bitwidth=16, rank=2)
    WS: gl.constexpr = gl.SwizzledSharedLayout(vec=4, per_phase=2, max_phase=4, order=[1, 0])
    ACROSS: gl.constexpr = COLUMNS // 8
    XL: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
    WVEC: gl.constexpr = 4 if WORDS >= 4 and BITS != 3 else WORDS if BITS != 3 else 2
    WL: gl.constexpr = gl.BlockedLayout([1, WVEC], [2 * WVEC, 16 // WVEC], [WARPS, 1], [1, 0])
    HL: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [WARPS, 1], [1, 0])

    columns = (tokens + NP - 1) // NP
    program = gl.program_id(0)
    part = program % SPLIT
    tile = program // SPLIT
    token0 = tile % columns * NP
    row0 = tile // columns * BR
    groups = (K + GROUP - 1) // GROUP
    steps = (groups * WORDS + 15) // 16
    each = (steps + SPLIT - 1) // SPLIT
    first = part * each
    count = gl.minimum(each, steps - first)

    gl.assume(count > 0)
    xs = gl.allocate_shared_memory(D, [STAGES, NP, COLUMNS], XS)
    ws = gl.allocate_shared_memory(gl.int32, [KEPT, BR, 16], WS)
    token = gl.minimum(token0 + gl.arange(0, NP, gl.SliceLayout(1, XL)), tokens - 1)
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, XL))
    at_x = x + token[:, None].to(gl.int64) * x_token + column[None, :]
    row = gl.minimum(row0 + gl.arange(0, BR, gl.SliceLayout(1, WL)), rows - 1)
    w_group, _, w_place = word_places(gl.arange(0, 16, gl.SliceLayout(0, WL)), GROUP, WORDS, BITS)
    w_place = gl.max_contiguous(gl.multiple_of(w_place, WVEC), WVEC)
    at_w = w + row[:, None].to(gl.int64) * w_row + w_place[None, :]
    if BITS == 3:
        HIGH: gl.constexpr = GROUP // 32  # words of a group's highest plane
        hs = gl.allocate_shared_memory(gl.int32, [KEPT, BR, 16], WS)
        h_row = gl.minimum(row0 + gl.arange(0, BR, gl.SliceLayout(1, HL)), rows - 1)
        h_group, h_inside, _ = word_places(gl.arange(0, 16, gl.SliceLayout(0, HL)), GROUP, WORDS, BITS)
        h_place = h_group * (GROUP * 3 // 32) + WORDS + h_inside % HIGH
        at_h = w + h_row[:, None].to(gl.int64) * w_row + h_place[None, :]
    else:
        hs = ws
        at_h = at_w
        h_group = w_group
    a_row = gl.minimum(row0 + gl.arange(0, BR, gl.SliceLayout(1, A)), rows - 1)
    a_index = gl.arange(0, 16, gl.SliceLayout(0, A))
    a_group, a_inside, _ = word_places(a_index, GROUP, WORDS, BITS)
    at_s = scale + a_row.to(gl.int64) * scale_row
    by = (a_inside // (GROUP // 32))[None, :] if BITS == 3 else None

    for s in gl.static_range((AHEAD + PIECES - 1) // PIECES):
        if s < count:
            copy_words(at_w, at_h, ws, hs, first + s, s, w_group, h_group, groups, BITS, GROUP, WORDS,
                       FULL)  # fmt: skip
    if WAIT == 1:
        gdc_wait()
    for s in gl.static_range(AHEAD):
        if s < PIECES * count:
            copy_inputs(at_x, xs, first * PIECES + s, s, COLUMNS)
        async_copy.commit_group()
    factor = load_factor(at_s, a_group, first, groups, WORDS)
    acc = warpgroup_mma_init(gl.full([BR, NP], 0.0, gl.float32, MMA))
    before = gl.full([BR, COLUMNS], 0.0, D, A)
    for n in range(count):
        for piece in gl.static_range(PIECES):
            async_copy.wait_group(AHEAD - 1)
            fence_async_shared()
            if piece == 0:
                words = ws.index(n % KEPT).load(A)
                odd = None
                if BITS == 3:
                    high = hs.index(n % KEPT).load(A) >> by
                    odd = ((words >> 2) & 0x33333333) | (high & 0x44444444)
                    words = (words & 0x33333333) | ((high << 2) & 0x44444444)
                wide, words = gl.broadcast(factor, words)
            made = numbers(words, odd, wide, entry(ASM, piece, 0), entry(ASM, piece, 1), FIELDS, A)
            at = PIECES * n + piece
            acc = warpgroup_mma(made, xs.index(at % STAGES).permute((1, 0)), acc, is_async=True)
            if piece == PIECES - 1:
                factor = load_factor(at_s, a_group, first + gl.minimum(n + 1, count - 1), groups, WORDS)
            # The product of the piece before is done: its registers and its place in the ring are free.
            acc, before = warpgroup_mma_wait(1, deps=(acc, before))
            before = made
            at += AHEAD
            if at < PIECES * count:
                if (piece + AHEAD) % PIECES == 0:
                    step = n + (piece + AHEAD) // PIECES
                    copy_words(at_w, at_h, ws, hs, first + step, step % KEPT, w_group, h_group, groups,
                               BITS, GROUP, WORDS, FULL)  # fmt: skip
                copy_inputs(at_x, xs, first * PIECES + at, at % STAGES, COLUMNS)
            async_copy.commit_group()
            acc = warpgroup_mma_init(acc)
    acc, before = warpgroup_mma_wait(0, deps=(acc, before))
    if WAIT == 2:
        gdc_wait()
    if RANKS > 0:  # noqa: SIM102 (known when compiled)
        if part == 0:
            acc = corrected(acc, u, u_row, z, row0, token0, rows, tokens, ranks, RANKS, PARTS, BR, NP, A,
                            D, WARPS)  # fmt: skip
    finish(acc, bias, y, y_token, partial, counter, tile, part, row0, token0, rows, tokens, BR, NP,
           SPLIT, BIAS, WARPS)  # fmt: skip


@gluon.jit
def finish(acc, bias, y, y_token, partial, counter, tile, part, row0, token0, rows, tokens,
           BR: gl.constexpr, NP: gl.constexpr, SPLIT: gl.constexpr, BIAS: gl.constexpr,
           WARPS: gl.constexpr):  # fmt: skip
    """Store the sums of a tile; the last program of its SPLIT ones adds up what the others left."""
    if SPLIT > 1:
        MMA: gl.constexpr = acc.type.layout
        r = gl.arange(0, BR, gl.SliceLayout(1, MMA))
        t = gl.arange(0, NP, gl.SliceLayout(0, MMA))
        area = r[:, None] * NP + t[None, :]
        base = partial + tile.to(gl.int64) * (SPLIT * BR * NP)
        gl.store(base + part * (BR * NP) + area, acc)
        thread_barrier()
        arrived = gl.atomic_add(counter + tile, 1, sem="acq_rel")
        if arrived == SPLIT - 1:
            gl.store(counter + tile, 0)
            sums = gl.full([BR, NP], 0.0, gl.float32, MMA)
            for other in gl.static_range(SPLIT):
                sums += gl.load(base + other * (BR * NP) + area, cache_modifier=".cg")
            store_sums(sums, bias, y, y_token, row0, token0, rows, tokens, BR, NP, BIAS, WARPS)
    else:
        store_sums(acc, bias, y, y_token, row0, token0, rows, tokens, BR, NP, BIAS, WARPS)


@gluon.jit
def load_factor(at_s, a_group, step, groups, WORDS: gl.constexpr):
    """Scales of a step's words: [BR, 1], or [BR, 16] where a step has several groups."""
    group, _ = step_group(step, WORDS)
    if WORDS >= 16:
        return gl.load(at_s + group)[:, None]
    else:
        return gl.load(at_s[:, None] + gl.minimum(group + a_group, groups - 1)[None, :])


@gluon.jit
def copy_words(at_w, at_h, ws, hs, step, slot, w_group, h_group, groups, BITS: gl.constexpr,
               GROUP: gl.constexpr, WORDS: gl.constexpr, FULL: gl.constexpr):  # fmt: skip
    """Begin copying the words of a step into `slot` of their ring, zeros past the end of a row. FULL: no
    row ends within a step."""
    group, inside = step_group(step, WORDS)
    first = group * (GROUP * BITS // 32)
    if FULL:
        async_copy.async_copy_global_to_shared(ws.index(slot), at_w + (first + inside))
        if BITS == 3:
            async_copy.async_copy_global_to_shared(hs.index(slot), at_h + first)
    else:
        ok = (group + w_group < groups)[None, :]
        async_copy.async_copy_global_to_shared(ws.index(slot), at_w + (first + inside), mask=ok)
        if BITS == 3:
            ok = (group + h_group < groups)[None, :]
            async_copy.async_copy_global_to_shared(hs.index(slot), at_h + first, mask=ok)


@gluon.jit
def copy_inputs(at_x, xs, piece, slot, COLUMNS: gl.constexpr):
    """Begin copying the inputs of a piece into `slot` of their ring."""
    async_copy.async_copy_global_to_shared(xs.index(slot), at_x + piece * COLUMNS)


@gluon.jit
def corrected(acc, u, u_row, z, row0, token0, rows, tokens, ranks, RANKS: gl.constexpr,
              PARTS: gl.constexpr, BR: gl.constexpr, NP: gl.constexpr, A: gl.constexpr, D: gl.constexpr,
              WARPS: gl.constexpr):  # fmt: skip
    """Add z Uᵀ of a correction to `acc`, by one more product."""
    ZS: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=32 if RANKS == 16 else 64 if RANKS == 32 else 128, element_bitwidth=16, rank=2
    )
    ZL: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [WARPS, 1], [1, 0])
    token = token0 + gl.arange(0, NP, gl.SliceLayout(1, ZL))
    rank = gl.arange(0, RANKS, gl.SliceLayout(0, ZL))
    there = (token < tokens)[:, None] & (rank < ranks)[None, :]
    at = z + token[:, None] * ranks + rank[None, :]
    found = gl.load(at, mask=there, other=0.0)
    for other in gl.static_range(1, PARTS):
        found += gl.load(at + other * tokens * ranks, mask=there, other=0.0)
    zs = gl.allocate_shared_memory(D, [NP, RANKS], ZS)
    zs.store(found.to(D))
    row = row0 + gl.arange(0, BR, gl.SliceLayout(1, A))
    rank = gl.arange(0, RANKS, gl.SliceLayout(0, A))
    held = (row < rows)[:, None] & (rank < ranks)[None, :]
    left = gl.load(u + row[:, None].to(gl.int64) * u_row + rank[None, :], mask=held, other=0.0)
    if A.parent.version[0] == 2:
        thread_barrier()
        return mma_v2(left, zs.permute((1, 0)).load(gl.DotOperandLayout(1, A.parent, 2)), acc)
    else:
        fence_async_shared()
        thread_barrier()
        return warpgroup_mma(left, zs.permute((1, 0)), acc)


@gluon.jit
def store_sums(sums, bias, y, y_token, row0, token0, rows, tokens, BR: gl.constexpr, NP: gl.constexpr,
               BIAS: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """Store sums [BR, NP], with the bias if there is one, as y [n, rows]: a thread has 16 bytes."""
    DOWN: gl.constexpr = BR // 8 if BR < 256 else 32
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [DOWN, 32 // DOWN], [1, WARPS], [0, 1])
    row = row0 + gl.arange(0, BR, gl.SliceLayout(1, OUT))
    token = token0 + gl.arange(0, NP, gl.SliceLayout(0, OUT))
    if BIAS:
        into: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
        r = row0 + gl.arange(0, BR, into)
        sums += gl.load(bias + r, mask=r < rows, other=0.0).to(gl.float32)[:, None]
    found = gl.convert_layout(sums.to(y.dtype.element_ty), OUT)
    ok = (row < rows)[:, None] & (token < tokens)[None, :]
    gl.store(y + token[None, :].to(gl.int64) * y_token + row[:, None], found, mask=ok)
