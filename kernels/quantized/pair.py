"""Two segments with the same rows in one tile: gate and up, each in one half of the lanes."""

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_wait
except ImportError as error:
    raise ImportError("these kernels need triton") from error

from blr.kernels.quantized.triton import inverse_rms, rows_by_fma, whole_sum
from blr.kernels.quantized.words import field_columns, load_chunk


@triton.jit
def pair_places(
    seg, apart, block, start, RT: tl.constexpr, T: tl.constexpr, BQ: tl.constexpr, BITS: tl.constexpr
):
    """What `load_chunk` takes, for the rows from `start` on of a block of two segments side by side."""
    rows = seg[14] - start
    wide, below = block.to(tl.int64), start.to(tl.int64)
    w = seg[2] + (wide * seg[3] + below * seg[4])
    w_apart = apart[2] + wide * apart[3] + below * apart[4]
    index = tl.arange(0, RT * 2 * T * BQ * 4)
    half = index // (4 * T * BQ) % 2
    row = index // (8 * T * BQ) * T + index // (4 * BQ) % T
    quad = index // 4 % BQ
    left = tl.where(row < rows, tl.cdiv(seg[15] + half * apart[15], 128) * BITS - quad, 0)
    words = w + (row * seg[4] + half * (w_apart + row * apart[4]) + (quad * 4 + index % 4)), left
    scale = seg[5] + (wide * seg[6] + below * seg[7])
    scale_apart = apart[5] + wide * apart[6] + below * apart[7]
    index = tl.arange(0, RT * 2 * T * BQ)
    half = index // (T * BQ) % 2
    row = index // (2 * T * BQ) * T + index // BQ % T
    quad = index % BQ
    left = tl.where(row < rows, tl.cdiv(seg[15] + half * apart[15], 128) * BITS - quad, 0)
    return words, (
        scale + (row * seg[7] + half * (scale_apart + row * apart[7]) + quad // BITS), left
    )  # fmt: skip


@triton.jit
def pair_rows(
    tile, seg, apart, bias1, x_token, x_token_apart, gain, eps, tokens,
    N: tl.constexpr, BITS: tl.constexpr, BR: tl.constexpr, BQ: tl.constexpr, T: tl.constexpr,
    NORM: tl.constexpr, BIAS0: tl.constexpr, BIAS1: tl.constexpr, ONE: tl.constexpr,
    WAIT: tl.constexpr,
):  # fmt: skip
    """Products of tile number `tile` of two segments with one or two tokens: (of the first segment, of
    the second, the same of the second token, outputs, valid), each [BR].

    One half of the lanes is for each segment, so that the same instructions serve both. apart: from
    `seg` to the second segment, in the places of `seg`: elements between pointers, differences of
    numbers. (What a compiler knows of the alignment of pointers it may lose in a choice of two.)
    """
    rows_per_block, K, blocks, part = seg[14], seg[15], seg[16], seg[17]
    tiles = tl.cdiv(rows_per_block, BR)
    block = tile // tiles
    start = (tile % tiles) * BR
    words, scales = pair_places(seg, apart, block, start, BR // T, T, BQ, BITS)
    chunk = load_chunk(words, scales, 0, 2 * T * BQ, BITS)
    rows = start + tl.arange(0, BR)
    ok = rows < rows_per_block
    out = (rows // part) * (blocks * part) + block * part + rows % part
    constant = tl.zeros([BR], tl.float32)
    constant1 = constant
    if BIAS0:
        constant = tl.load(seg[12] + out, mask=ok, other=0.0).to(tl.float32)
    if BIAS1:
        constant1 = tl.load(bias1 + out, mask=ok, other=0.0).to(tl.float32)
    at = field_columns(2 * T * BQ, BQ, BITS)
    half = tl.arange(0, 8 * T * BQ) // (4 * T * BQ)
    x = seg[0] + (block * seg[1] + at + half * (apart[0] + block * apart[1]))
    past = at - (K + half * apart[15])
    if NORM == 2:
        gain += block * seg[1]
    inputs = x, x + (x_token + half * x_token_apart), gain + at, past
    if WAIT:
        gdc_wait()
    end = tl.cdiv(tl.maximum(K, K + apart[15]), 128) * BITS
    sums, sums2, square, square2 = rows_by_fma(chunk, words, scales, inputs, end, N, BQ, BITS, NORM, ONE)
    gate, up = pair_sums(sums, BQ, T)
    gate2, up2 = gate, up
    if N == 2:
        gate2, up2 = pair_sums(sums2, BQ, T)
    if NORM > 0:
        one = tl.arange(0, 1)
        if NORM == 1:
            norm = tl.rsqrt(whole_sum(square) / (2 * T * K) + eps)
            norm2 = tl.rsqrt(whole_sum(square2) / (2 * T * K) + eps)
        else:
            norm = inverse_rms(seg[0], x_token, one, one < tokens, blocks * K, eps, 1024)
            norm2 = inverse_rms(seg[0], x_token, one + N - 1, one < tokens, blocks * K, eps, 1024)
        gate, up, gate2, up2 = gate * norm, up * norm, gate2 * norm2, up2 * norm2
    return gate + constant, up + constant1, gate2 + constant, up2 + constant1, out, ok


@triton.jit
def pair_sums(sums, BQ: tl.constexpr, T: tl.constexpr):
    """Two [BR] of [RT, 2·T·BQ, 1]."""
    RT: tl.constexpr = sums.shape[0]
    both = tl.permute(tl.sum(tl.reshape(sums, (RT, 2, T, BQ)), 3), (0, 2, 1))
    return tl.split(tl.reshape(both, (RT * T, 2)))
