"""Kernels of experts in few bits, whose weights lie wherever they were loaded.

A table of addresses [E, P, 7] says where: of an expert and each of its P layers side by side the packed
rows, the scales, the factors U and V, how many ranks they have, and how far apart their rows are.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blr.kernels.decode.gemv.triton import activate
from blr.kernels.decode.quantized.triton import row_sums, rows_by_fma
from blr.kernels.decode.quantized.words import lane_columns, load_chunk, row_quads, tile_places
from blr.kernels.layers.packed.triton import group_numbers

ENTRIES = 7
COLUMNS = tl.constexpr(ENTRIES)


@triton.jit
def address(table, n, KIND: tl.constexpr, like):
    """Entry KIND of row n of the table as a pointer like `like`: a multiple of 16 bytes."""
    return tl.multiple_of(tl.load(table + n * COLUMNS + KIND).to(like), 16)


@triton.jit
def factor_kernel(
    x, x_row, each, table, chosen, like, y, rows, K,
    PARTS: tl.constexpr, KIND: tl.constexpr, EVEN: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [pairs, PARTS, rows]: a program has BR rows of a factor of one layer, and a pair of token and
    expert. KIND: V, whose rows are ranks, or U, whose inputs are those of each layer. Ranks that a layer
    has not are zeros. EVEN: whether rows are multiples of 8 numbers apart. EARLY: as of
    `products_kernel`."""
    if PDL and not EARLY:
        gdc_wait()
        gdc_launch_dependents()
    tiles = tl.cdiv(rows, BR)
    part, pair = tl.program_id(0) // tiles, tl.program_id(1)
    n = tl.load(chosen + pair) * PARTS + part
    ranks, step = tl.load(table + n * COLUMNS + 4), tl.load(table + n * COLUMNS + 3 + KIND)
    step = step // 8 * 8 if EVEN else step
    row, lane = tl.program_id(0) % tiles * BR + tl.arange(0, BR), tl.arange(0, BK)
    width = K if KIND == 3 else ranks
    edge = (width + 7) // 8 * 8 if EVEN else width  # inside a row, and known to the compiler
    there = (row < (ranks if KIND == 3 else rows))[:, None]
    inputs = x + (pair // each if KIND == 3 else pair * PARTS + part) * x_row + lane
    factor = address(table, n, KIND, like.dtype) + row[:, None] * step + lane[None, :]
    held = tl.load(factor, mask=there & (lane < edge)[None, :], other=0.0)
    if PDL and EARLY:
        gdc_wait()
        gdc_launch_dependents()
    sums = tl.zeros([BR, BK], tl.float32)
    for start in range(0, width, BK):
        after = start + BK
        following = tl.load(factor + after, mask=there & (after + lane < edge)[None, :], other=0.0)
        given = tl.load(inputs + start, mask=start + lane < width, other=0.0).to(tl.float32)
        sums += held.to(tl.float32) * given[None, :]
        held = following
    found = tl.sum(sums, 1).to(y.dtype.element_ty)
    tl.store(y + (pair.to(tl.int64) * PARTS + part) * rows + row, found, mask=row < rows)


@triton.jit
def layer_start(table, n, start, first, rows, w_row, scale_row, K, like, T: tl.constexpr):
    """What of T.BR rows of layer `n` depends on no input: the first chunk, where the words and scales
    are, and U of the rows in float32. start: the first row, of `rows` that begin with `first`."""
    row_words = w_row * T.UNIT
    begin = (first + start).to(tl.int64)
    w = address(table, n, 0, tl.pointer_type(tl.int32)) + begin * row_words
    scale = address(table, n, 1, like.dtype) + begin * scale_row
    places, scales = tile_places(w, row_words, scale, scale_row, rows - start, K, T)
    chunk = load_chunk(places, scales, 0, T, T.T * T.BQ)
    if T.RANKS > 0:
        u, held = address(table, n, 2, like.dtype), tl.load(table + n * COLUMNS + 4)
        row, rank = start + tl.arange(0, T.BR), tl.arange(0, T.RANKS)
        there = (row < rows)[:, None] & (rank < held)[None, :]
        u += (first + row)[:, None] * held + rank[None, :]
        return chunk, places, scales, tl.load(u, mask=there, other=0.0).to(tl.float32)
    else:
        return chunk, places, scales, 0.0


@triton.jit
def layer_rows(started, x, z, K, T: tl.constexpr):
    """[BR] products in float32 of what `layer_start` gave with the input at x; z: V x [T.RANKS]."""
    chunk, places, scales, u = started
    at = lane_columns(T.T * T.BQ, T)
    inputs = x + at, x + at, at - K
    found, _ = rows_by_fma(chunk, places, scales, inputs, row_quads(K, T), T)
    total = row_sums(found, T.BQ)
    if T.RANKS > 0:
        total += tl.sum(u * tl.load(z + tl.arange(0, T.RANKS))[None, :], 1)
    return total


@triton.jit
def products_kernel(x, x_row, each, table, chosen, z, y, rows, K, w_row, scale_row,
                    PARTS: tl.constexpr, ACT: tl.constexpr, T: tl.constexpr, EARLY: tl.constexpr,
                    PDL: tl.constexpr):  # fmt: skip
    """y [pairs, PARTS · rows]: a program has T.BR rows of one layer and a pair of token and expert.

    ACT: y [pairs, half of these] are act(gate) ⊙ up, the first half being the gate's rows: a program has
    the same T.BR rows of both. EARLY: `chosen` was there before the kernel ahead began.
    T: `decode/quantized/launch.QuantizedTile`.
    """
    if PDL and not EARLY:
        gdc_wait()
        gdc_launch_dependents()
    pair = tl.program_id(1)
    n = tl.load(chosen + pair) * PARTS
    if ACT == "":
        tiles = tl.cdiv(rows, T.BR)
        part, start = tl.program_id(0) // tiles, tl.program_id(0) % tiles * T.BR
        left = layer_start(table, n + part, start, 0, rows, w_row, scale_row, K, x, T)
        right = ()
        half, width = rows, PARTS * rows
    else:
        part, start, half, width = 0, tl.program_id(0) * T.BR, PARTS * rows // 2, PARTS * rows // 2
        left = layer_start(table, n, start, 0, half, w_row, scale_row, K, x, T)
        above = half * (2 - PARTS)
        right = layer_start(table, n + PARTS - 1, start, above, half, w_row, scale_row, K, x, T)
    if PDL and EARLY:
        gdc_wait()
        gdc_launch_dependents()
    inputs, z = x + pair // each * x_row, z + (pair * PARTS + part) * T.RANKS
    total = layer_rows(left, inputs, z, K, T)
    if ACT != "":
        beside = layer_rows(right, inputs, z + (PARTS - 1) * T.RANKS, K, T)
        total = activate(total, ACT) * beside
    row = start + tl.arange(0, T.BR)
    out = y + (pair.to(tl.int64) * width + part * rows + row)
    tl.store(out, total.to(y.dtype.element_ty), mask=row < half)


@triton.jit
def mixed_kernel(
    x, table, chosen, weights, z, y, y_row, rows, K, w_row, scale_row,
    COUNT: tl.constexpr, ADD: tl.constexpr, T: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [n, rows]: the sums of a token's COUNT products, times `weights` [n, COUNT], and what y holds
    if ADD. A program has T.BR rows of a token. x: [n · COUNT, K]. `chosen` and `weights` were there
    before the kernel ahead began."""
    start, pair = tl.program_id(0) * T.BR, tl.program_id(1) * COUNT
    started = ()
    for k in tl.static_range(COUNT):
        n = tl.load(chosen + pair + k)
        started += (layer_start(table, n, start, 0, rows, w_row, scale_row, K, x, T),)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = layer_rows(started[0], x + pair * K, z + pair * T.RANKS, K, T)
    total *= tl.load(weights + pair).to(tl.float32)
    for k in tl.static_range(1, COUNT):
        found = layer_rows(started[k], x + (pair + k) * K, z + (pair + k) * T.RANKS, K, T)
        total += tl.load(weights + pair + k).to(tl.float32) * found
    row = start + tl.arange(0, T.BR)
    out, there = y + tl.program_id(1).to(tl.int64) * y_row + row, row < rows
    if ADD:
        total += tl.load(out, mask=there, other=0.0).to(tl.float32)
    tl.store(out, total.to(y.dtype.element_ty), mask=there)


@triton.jit
def plain_kernel(
    table, ends, y, rows, K, w_row, scale_row,
    PARTS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, LOW: tl.constexpr,
    MIDDLE: tl.constexpr, CURVED: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """y [E, PARTS · rows, K], the plain weights without their corrections, of experts that have tokens:
    `ends` [E] counts the tokens up to each. A program owns BR rows of one group."""
    expert = tl.program_id(2) // PARTS
    before = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    if tl.load(ends + expert) > before:
        n, group = tl.program_id(2), tl.program_id(1)
        row = tl.program_id(0) * BR + tl.arange(0, BR)
        there, column = row < rows, group * GROUP + tl.arange(0, GROUP)
        w, scale = address(table, n, 0, tl.pointer_type(tl.int32)), address(table, n, 1, y.dtype)
        found = group_numbers(w, w_row, scale, scale_row, row.to(tl.int64), there, group, BITS,
                              GROUP, LOW, MIDDLE, CURVED)  # fmt: skip
        inside = there[:, None] & (column < K)[None, :]
        at = (n.to(tl.int64) * rows + row)[:, None] * K + column[None, :]
        tl.store(y + at, found.to(y.dtype.element_ty), mask=inside)


@triton.jit
def tokens_of(ends, experts, tile, BM: tl.constexpr, BE: tl.constexpr):
    """The expert of tile number `tile` of BM pairs, no tile having two experts, and its pairs from the
    first to the last, this not included; none behind the last tile."""
    expert = tl.arange(0, BE)
    end = tl.load(ends + expert, mask=expert < experts, other=0)
    first = tl.load(ends + expert - 1, mask=(expert > 0) & (expert < experts), other=0)
    tiles = (end - first + BM - 1) // BM
    after = tl.cumsum(tiles, 0)
    here = (after > tile) & (after - tiles <= tile)
    begin = tl.sum(tl.where(here, first + (tile - after + tiles) * BM, 0), 0)
    return tl.sum(tl.where(here, expert, 0), 0), begin, tl.sum(tl.where(here, end, 0), 0)


@triton.jit
def low_rank_kernel(
    x, x_row, x_part, index, ends, table, like, base, y, y_row, rows, K, experts,
    PARTS: tl.constexpr, KIND: tl.constexpr, EVEN: tl.constexpr, INDEXED: tl.constexpr,
    ADD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """y [pairs, PARTS · rows], of pairs in the order of experts, as of `factor_kernel`: a program has BM
    pairs of an expert and BN rows of a factor. ends: of `plain_kernel`. INDEXED: the inputs of a pair
    are those at `index`. ADD: to those of `base`, which lies as y."""
    tiles = tl.cdiv(rows, BN)
    expert, begin, end = tokens_of(ends, experts, tl.program_id(1), BM, BE)
    if begin < end:
        part, column = tl.program_id(0) // tiles, tl.program_id(0) % tiles * BN + tl.arange(0, BN)
        row, lane, n = begin + tl.arange(0, BM), tl.arange(0, BK), expert * PARTS + part
        inside = row < end
        ranks, step = tl.load(table + n * COLUMNS + 4), tl.load(table + n * COLUMNS + 3 + KIND)
        step = step // 8 * 8 if EVEN else step
        width = K if KIND == 3 else ranks
        edge = (width + 7) // 8 * 8 if EVEN else width
        there = column < (ranks if KIND == 3 else rows)
        known = K if KIND == 3 else edge  # of inputs: those of ranks that a layer has not are zeros
        source = tl.load(index + row, mask=inside, other=0) if INDEXED else row
        left = x + source.to(tl.int64)[:, None] * x_row + part * x_part + lane[None, :]
        right = address(table, n, KIND, like.dtype) + column[:, None] * step + lane[None, :]
        total = tl.zeros([BM, BN], tl.float32)
        for start in range(0, width, BK):
            ok = (start + lane < known)[None, :]
            given = tl.load(left + start, mask=inside[:, None] & ok, other=0.0)
            ok = (start + lane < edge)[None, :]
            held = tl.load(right + start, mask=there[:, None] & ok, other=0.0)
            total = tl.dot(given, tl.trans(held), total)
        ok = inside[:, None] & (column < rows)[None, :]
        at = row.to(tl.int64)[:, None] * y_row + part * rows + column[None, :]
        if ADD:
            total += tl.load(base + at, mask=ok, other=0.0).to(tl.float32)
        tl.store(y + at, total.to(y.dtype.element_ty), mask=ok)


@triton.jit
def sums_kernel(found, places, weights, y, columns,
                K: tl.constexpr, PLACED: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """y [n, columns]: the sum of K rows of `found`, those at `places` [n, K], or all in their order,
    times `weights` [n, K]. A program has BC columns of a row."""
    row, column = tl.program_id(1).to(tl.int64), tl.program_id(0) * BC + tl.arange(0, BC)
    total = tl.zeros([BC], tl.float32)
    for n in tl.static_range(K):
        at = tl.load(places + row * K + n) if PLACED else row * K + n
        weight = tl.load(weights + row * K + n).to(tl.float32)
        given = tl.load(found + at * columns + column, mask=column < columns, other=0.0)
        total += weight * given.to(tl.float32)
    tl.store(y + row * columns + column, total.to(y.dtype.element_ty), mask=column < columns)
