"""Phases of the persistent kernel that are no products: embedding, attention, choice."""

try:
    import triton
    import triton.language as tl

    from blr.kernels.attention.triton import attend_split, cache_tile, reach, rotation
    from blr.kernels.persistent.access import high, low, real, wait
    from blr.kernels.persistent.ends import choose_part, embed_part
except ImportError as error:
    raise ImportError("these kernels need triton") from error

from blr.kernels.persistent.fields import Attention, End

TABLE = tl.constexpr(int(End.TABLE))
SIZES = tl.constexpr(int(End.SIZES))
DATA = tl.constexpr(int(End.DATA))
DATA_ROW = tl.constexpr(int(End.DATA_ROW))
KEYS = tl.constexpr(int(Attention.KEYS))
VALUES = tl.constexpr(int(Attention.VALUES))
QUERY_GAIN = tl.constexpr(int(Attention.QUERY_GAIN))
QKV = tl.constexpr(int(Attention.QKV))
QKV_ROW = tl.constexpr(int(Attention.QKV_ROW))
OUT = tl.constexpr(int(Attention.OUT))
OUT_ROW = tl.constexpr(int(Attention.OUT_ROW))
KEY_GAIN = tl.constexpr(int(Attention.KEY_GAIN))
HEAD_NORM = tl.constexpr(int(Attention.NORM))
SCALE = tl.constexpr(int(Attention.SCALE))
EMBED_BLOCK = tl.constexpr(1024)
CHOICE_BLOCK = tl.constexpr(4096)


@triton.jit
def embed_phase(d, program, programs, tokens, like, single, counter, target, N: tl.constexpr,
                SYNC: tl.constexpr):  # fmt: skip
    """The rows of the embedding."""
    table, x = tl.load(d + TABLE).to(like.dtype), tl.load(d + DATA).to(single.dtype)
    of_table, x_row = tl.load(d + SIZES), low(tl.load(d + DATA_ROW))
    table_row, width = low(of_table), high(of_table)
    wait(counter, target, SYNC)
    parts = tl.cdiv(width, EMBED_BLOCK)
    for item in range(program, N * parts, programs):
        embed_part(item // parts, item % parts, tokens, table, table_row, x, x_row, width, EMBED_BLOCK)


@triton.jit
def choose_phase(d, program, programs, tokens, pos, single, values, indices, counters, counter, target,
                 N: tl.constexpr, PARTS: tl.constexpr, SYNC: tl.constexpr):  # fmt: skip
    """The next tokens and positions."""
    logits, vocabulary = tl.load(d + DATA).to(single.dtype), high(tl.load(d + SIZES))
    logits_row = low(tl.load(d + DATA_ROW))
    wait(counter, target, SYNC)
    parts = tl.cdiv(vocabulary, CHOICE_BLOCK)
    for item in range(program, N * parts, programs):
        choose_part(item // parts, item % parts, parts, logits, logits_row, vocabulary, values, indices,
                    counters, tokens, pos, CHOICE_BLOCK, PARTS)  # fmt: skip


@triton.jit
def attention_item(item, splits, chunk, k, v, cache_row, cache_head, kv_heads, window, pos, start,
                   D, N: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """The first tile of one (row, head, split): (key, value, unit, row, head, split, here, zero,
    begin, stop, first, last); nothing is loaded for an item there is not."""
    unit = item // splits
    there = unit < N * kv_heads
    unit = tl.where(there, unit, 0)
    row, head, split = unit // kv_heads, unit % kv_heads, item % splits
    here = tl.load(pos + row).to(tl.int32)
    zero = tl.load(start + row).to(tl.int32)
    begin, stop, first, last = reach(here, zero, split, window, chunk, True)
    base = row.to(tl.int64) * cache_row + head.to(tl.int64) * cache_head
    d = tl.arange(0, DP)
    slots = begin + tl.arange(0, BN)
    known = tl.where(there, tl.minimum(stop, here), 0)
    key = cache_tile(k + base, slots, known, d, D)
    value = cache_tile(v + base, slots, known, d, D)
    return key, value, unit, row, head, split, here, zero, begin, stop, first, last


@triton.jit
def attention_phase(
    d, program, programs, like, single, counter, target, pos, start, cos, sin, table_row, partial, state,
    counters, splits, chunk, cache_row, cache_head, kv_heads, D, R,
    N: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr,
    SPLITS: tl.constexpr, NORM: tl.constexpr, DOT: tl.constexpr, SYNC: tl.constexpr,
):  # fmt: skip
    """Every split of every head of every row; a program has the items program, program + programs…"""
    k, v = tl.load(d + KEYS).to(like.dtype), tl.load(d + VALUES).to(like.dtype)
    of_qkv, of_out, norm = tl.load(d + QKV_ROW), tl.load(d + OUT_ROW), tl.load(d + HEAD_NORM)
    qkv, out = tl.load(d + QKV).to(single.dtype), tl.load(d + OUT).to(single.dtype)
    q_gain, k_gain = tl.load(d + QUERY_GAIN).to(like.dtype), tl.load(d + KEY_GAIN).to(like.dtype)
    eps, window, scale = real(norm), high(norm), real(tl.load(d + SCALE))
    key, value, unit, row, head, split, here, zero, begin, stop, first, last = attention_item(
        program, splits, chunk, k, v, cache_row, cache_head, kv_heads, window, pos, start, D, N, DP, BN
    )
    lane = tl.arange(0, DP)
    c, s = rotation(cos, sin, (here - zero).to(tl.int64) * table_row, lane, R)
    wait(counter, target, SYNC)
    for item in range(program, N * kv_heads * splits, programs):
        if item != program:
            key, value, unit, row, head, split, here, zero, begin, stop, first, last = attention_item(
                item, splits, chunk, k, v, cache_row, cache_head, kv_heads, window, pos, start, D,
                N, DP, BN,
            )  # fmt: skip
            c, s = rotation(cos, sin, (here - zero).to(tl.int64) * table_row, lane, R)
        if (split >= first) & (split <= last):
            base = row.to(tl.int64) * cache_row + head.to(tl.int64) * cache_head
            attend_split(
                qkv + row * low(of_qkv), k + base, v + base, key, value, c, s, q_gain, k_gain, eps,
                scale, out + row * low(of_out), partial + unit.to(tl.int64) * SPLITS * G * D,
                state + unit * SPLITS * 2 * G, counters + unit, head, kv_heads, split, here,
                begin, stop, first, last, D, R, G, GP, DP, BN, SPLITS, NORM, DOT,
            )  # fmt: skip
