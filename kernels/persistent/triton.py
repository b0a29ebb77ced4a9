"""One token in one kernel: programs that all run at the same time walk the phases of a table.

Derivation, table and memory order: README.md. The phases are in the files beside this one.
"""

try:
    import triton
    import triton.language as tl

    from blr.kernels.persistent.access import arrive
    from blr.kernels.persistent.mixed import mixed
    from blr.kernels.persistent.pairs import pairs_chunked, pairs_whole
    from blr.kernels.persistent.phases import attention_phase, choose_phase, embed_phase
    from blr.kernels.persistent.rows import rows_chunked, rows_whole
except ImportError as error:
    raise ImportError("these kernels need triton") from error

# Kinds of variants, as in program.py beside this file.
ROWS = tl.constexpr(0)
PAIRS = tl.constexpr(1)
MIXED = tl.constexpr(2)
# Kinds of phases that are no products, as in program.py.
EMBED = tl.constexpr(253)
ATTENTION = tl.constexpr(254)
CHOOSE = tl.constexpr(255)
FIELDS = tl.constexpr(24)  # words of a descriptor


@triton.jit
def product_phase(
    d, head, w, strides, sizes, like, single, counter, target,
    KIND: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, EXTRA: tl.constexpr, A: tl.constexpr,
    HALVES: tl.constexpr, N: tl.constexpr, ACT: tl.constexpr, SYNC: tl.constexpr,
):  # fmt: skip
    """A program's tiles of one variant.

    EXTRA: the number of blocks if MIXED; else 1 if a tile has whole rows, plus 2 for pairs with one
    input, plus 4 for one block in its own order. HALVES: 1 for inputs, 2 for results of `like`.
    """
    WHOLE: tl.constexpr = EXTRA % 2 == 1
    SHARED: tl.constexpr = EXTRA % 4 >= 2
    PLAIN: tl.constexpr = EXTRA >= 4
    X_HALF: tl.constexpr = HALVES % 2 == 1
    Y_HALF: tl.constexpr = HALVES >= 2
    if KIND == MIXED:
        mixed(d, head, w, strides, sizes, like, single, counter, target,
              N, BR, BK, EXTRA, A, X_HALF, SYNC)  # fmt: skip
    elif KIND == PAIRS:
        if WHOLE:
            pairs_whole(d, head, w, strides, sizes, like, single, counter, target,
                        N, BR, BK, SHARED, A, Y_HALF, ACT, PLAIN, SYNC)  # fmt: skip
        else:
            pairs_chunked(d, head, w, strides, sizes, like, single, counter, target,
                          N, BR, BK, SHARED, A, Y_HALF, ACT, PLAIN, SYNC)  # fmt: skip
    elif WHOLE:
        rows_whole(d, head, w, strides, sizes, like, single, counter, target,
                   N, BR, BK, A, X_HALF, PLAIN, SYNC)  # fmt: skip
    else:
        rows_chunked(d, head, w, strides, sizes, like, single, counter, target,
                     N, BR, BK, A, X_HALF, PLAIN, SYNC)  # fmt: skip


@triton.jit
def token_kernel(
    table, counter, generation, begin, end, like, single, tokens, pos, start, cos, sin, table_row,
    partial, state, counters, splits, chunk, cache_row, cache_head, kv_heads, D, R,
    values, indices, choices,
    N: tl.constexpr, VARIANTS: tl.constexpr, COUNT: tl.constexpr, ACT: tl.constexpr,
    G: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr,
    NORM: tl.constexpr, DOT: tl.constexpr, PARTS: tl.constexpr, SYNC: tl.constexpr,
):  # fmt: skip
    """Phases begin…end − 1 of a token; all programs must run at the same time if SYNC.

    table: [phases, programs, FIELDS] words. counter, generation: one word each, arrivals so far and
    those before this launch. like, single: pointers of the types of weights and of float32.
    VARIANTS: COUNT times (kind, BR, BK, extra, alignment, halves).
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    base = tl.load(generation)
    d = table + (begin * programs + program) * FIELDS
    head, w, strides, sizes = tl.load(d), tl.load(d + 1), tl.load(d + 2), tl.load(d + 3)
    for phase in range(begin, end):
        target = base + (phase - begin) * programs
        following = d + tl.where(phase + 1 < end, programs, 0) * FIELDS
        early = tl.load(following), tl.load(following + 1)
        early_sizes = tl.load(following + 2), tl.load(following + 3)
        kind = (head & 255).to(tl.int32)
        for i in tl.static_range(COUNT):
            if kind == i:
                product_phase(
                    d, head, w, strides, sizes, like, single, counter, target,
                    VARIANTS[6 * i], VARIANTS[6 * i + 1], VARIANTS[6 * i + 2], VARIANTS[6 * i + 3],
                    VARIANTS[6 * i + 4], VARIANTS[6 * i + 5], N, ACT, SYNC,
                )  # fmt: skip
        if kind == ATTENTION:
            attention_phase(
                d, program, programs, like, single, counter, target, pos, start, cos, sin, table_row,
                partial, state, counters, splits, chunk, cache_row, cache_head, kv_heads, D, R,
                N, G, GP, DP, BN, SPLITS, NORM, DOT, SYNC,
            )  # fmt: skip
        if kind == EMBED:
            embed_phase(d, program, programs, tokens, like, single, counter, target, N, SYNC)
        if kind == CHOOSE:
            choose_phase(d, program, programs, tokens, pos, single, values, indices, choices,
                         counter, target, N, PARTS, SYNC)  # fmt: skip
        arrive(counter, SYNC)
        d = following
        head, w = early
        strides, sizes = early_sizes
    if SYNC:  # noqa: SIM102
        if program == 0:  # all have read it: program 0 waited for them
            tl.store(generation, base + (end - begin) * programs)
