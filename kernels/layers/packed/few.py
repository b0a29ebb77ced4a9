"""Products of 2 to 16 tokens with weights in few bits, as many small programs that wait for nothing.

All words of a program go straight into registers, while its inputs go into shared memory. Gluon, since
plain Triton cannot unpack where an operand lies. Derivation: README.md.
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

from blr.kernels.layers.packed.fused import corrected, entry, finish, repeated, thread_barrier


@gluon.jit
def levels(words, odd, ASM: gl.constexpr, FIRST: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr,
           BITS: gl.constexpr):  # fmt: skip
    """[64, 64] levels of neighbouring fields of words [64, 8 or 16], from instructions FIRST on."""
    a, b, c, d = unpacked(words, odd, ASM, FIRST, D, BITS)
    four = gl.join(gl.join(a, b), gl.join(c, d))
    if words.shape[1] == 8:
        a, b, c, d = unpacked(words, odd, ASM, FIRST + 1, D, BITS)
        eight = gl.join(four, gl.join(gl.join(a, b), gl.join(c, d)))
        made = gl.reshape(gl.permute(eight, (0, 4, 3, 2, 1)), (64, 64))
    else:
        made = gl.reshape(gl.permute(four, (0, 3, 2, 1)), (64, 64))
    return gl.convert_layout(made, LAYOUT, assert_trivial=True)


@gluon.jit
def unpacked(words, odd, ASM: gl.constexpr, PIECE: gl.constexpr, D: gl.constexpr, BITS: gl.constexpr):
    """The four fields of a piece of words, each [64, 8 or 16]."""
    TEXT: gl.constexpr = entry(ASM, PIECE, 0)
    OPERANDS: gl.constexpr = entry(ASM, PIECE, 1)
    KINDS: gl.constexpr = repeated(D, 4)
    if BITS == 3:
        return gl.inline_asm_elementwise(TEXT, OPERANDS, [words, odd], KINDS, True, 2)
    else:
        return gl.inline_asm_elementwise(TEXT, OPERANDS, [words], KINDS, True, 2)


@gluon.jit
def nibbles(words, high, by, BITS: gl.constexpr):
    """Of 3 bits: nibbles of even fields, and of odd ones, of words of both planes."""
    if BITS == 3:
        high = high >> by
        odd = ((words >> 2) & 0x33333333) | (high & 0x44444444)
        return (words & 0x33333333) | ((high << 2) & 0x44444444), odd
    else:
        return words, words


@gluon.jit
def step_levels(words, high, by, ASM: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr,
                BITS: gl.constexpr, BLOCKS: gl.constexpr, PIECES: gl.constexpr):  # fmt: skip
    """The levels of a step: BLOCKS blocks [64, 64]."""
    words, odd = nibbles(words, high, by, BITS)
    made = (levels(words, odd, ASM, 0, D, LAYOUT, BITS),)
    if BLOCKS == 2:
        made = made + (levels(words, odd, ASM, PIECES, D, LAYOUT, BITS),)  # noqa: RUF005
    return made


@gluon.jit
def begin_step(zero, left, xs, at, MMA: gl.constexpr):
    """Begin the products of a step's levels with its inputs, which lie from block `at` on."""
    acc = zero
    if MMA.version[0] == 3:
        acc = warpgroup_mma_init(acc)
    for n in gl.static_range(len(left)):
        block = xs.index(at + n).permute((1, 0))
        if MMA.version[0] == 3:
            acc = warpgroup_mma(left[n], block, acc, is_async=True)
        else:
            acc = mma_v2(left[n], block.load(gl.DotOperandLayout(1, MMA, 2)), acc)
    return acc


@gluon.jit
def end_step(acc, left, MMA: gl.constexpr):
    """The sums of a step that was begun."""
    if MMA.version[0] == 3:
        if len(left) == 2:
            acc, _, _ = warpgroup_mma_wait(0, deps=(acc, left[0], left[1]))
        else:
            acc, _ = warpgroup_mma_wait(0, deps=(acc, left[0]))
    return acc


@gluon.jit
def few_kernel(
    x, x_token, w, w_row, scale, scale_row, bias, u, u_row, z, y, y_token, partial, counter,
    tokens, rows, steps, ranks,
    BITS: gl.constexpr, GROUP: gl.constexpr, ASM: gl.constexpr, NP: gl.constexpr,
    SPLIT: gl.constexpr, EACH: gl.constexpr, BIAS: gl.constexpr, RANKS: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """y [n, rows] = x Wᵀ + bias + z Uᵀ, n up to NP, 8 or 16.

    Arguments as of `fused.product_kernel`; x lies in its own order, and counter holds zeros before the
    launch that makes z. steps: groups of a row. EACH: steps of a program.
    """
    LOW: gl.constexpr = 2 if BITS == 3 else BITS
    WORDS: gl.constexpr = GROUP * LOW // 32  # of a group's lowest plane, 8 or 16
    BLOCKS: gl.constexpr = GROUP // 64
    PIECES: gl.constexpr = 8 // LOW // BLOCKS  # of a block
    HIGH: gl.constexpr = GROUP // 32  # words of a group's highest plane
    D: gl.constexpr = x.dtype.element_ty
    VERSION: gl.constexpr = 2 if NP == 8 else 3
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[VERSION, 0], warps_per_cta=[4, 1], instr_shape=[16, 8] if NP == 8 else [16, NP, 16]
    )
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    EIGHT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8]
    )
    W: gl.constexpr = A if WORDS == 16 else EIGHT
    XS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    XL: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])

    tiles = (rows + 63) // 64
    part = SPLIT - 1 - gl.program_id(0) // tiles  # the first one last: it alone waits
    tile = gl.program_id(0) % tiles
    row0 = tile * 64
    first = part * EACH
    row = gl.minimum(row0 + gl.arange(0, 64, gl.SliceLayout(1, W)), rows - 1)
    word = gl.arange(0, WORDS, gl.SliceLayout(0, W))
    row_w = w + row[:, None].to(gl.int64) * w_row
    at_w = row_w + gl.max_contiguous(gl.multiple_of(word, 2), 2)[None, :]
    at_h = row_w + (WORDS + gl.max_contiguous(gl.multiple_of(word % HIGH, 2), 2))[None, :]
    by = (word // HIGH)[None, :]
    row = gl.minimum(row0 + gl.arange(0, 64, gl.SliceLayout(1, MMA)), rows - 1)
    at_s = scale + row.to(gl.int64) * scale_row
    held = ()
    for k in gl.static_range(EACH):
        step = gl.minimum(first + k, steps - 1)
        words = gl.load(at_w + step * (GROUP * BITS // 32))
        high = words
        if BITS == 3:
            high = gl.load(at_h + step * (GROUP * BITS // 32))
        held = held + ((words, high, gl.load(at_s + step)),)  # noqa: RUF005

    xs = gl.allocate_shared_memory(D, [EACH * BLOCKS, NP, 64], XS)
    token = gl.arange(0, NP, gl.SliceLayout(1, XL))
    at_x = x + gl.minimum(token, tokens - 1)[:, None].to(gl.int64) * x_token + first * GROUP
    at_x += gl.arange(0, 64, gl.SliceLayout(0, XL))[None, :]
    for block in gl.static_range(EACH * BLOCKS):  # zeros past the end of a row
        there = ((first + block // BLOCKS < steps) & (token < tokens))[:, None]
        async_copy.async_copy_global_to_shared(xs.index(block), at_x + block * 64, mask=there)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    thread_barrier()

    zero = gl.full([64, NP], 0.0, gl.float32, MMA)
    total = zero
    left = step_levels(held[0][0], held[0][1], by, ASM, D, A, BITS, BLOCKS, PIECES)
    for k in gl.static_range(EACH):
        acc = begin_step(zero, left, xs, k * BLOCKS, MMA)
        after = left
        if k + 1 < EACH:
            after = step_levels(held[k + 1][0], held[k + 1][1], by, ASM, D, A, BITS, BLOCKS, PIECES)
        acc = end_step(acc, left, MMA)
        total += acc * held[k][2].to(gl.float32)[:, None]
        left = after
    if RANKS > 0:  # noqa: SIM102 (known when compiled)
        if part == 0:
            gdc_wait()
            total = corrected(
                total, u, u_row, z, row0, 0, rows, tokens, ranks, RANKS, PARTS, 64, NP, A, D, 4
            )
    finish(total, bias, y, y_token, partial, counter, tile, part, row0, 0, rows, tokens, 64, NP, SPLIT,
           BIAS, 4)  # fmt: skip
