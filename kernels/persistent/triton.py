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

from blr.kernels.persistent.fields import FIELDS as WORDS
from blr.kernels.persistent.fields import Ahead, Kind, Variant

PAIRS = tl.constexpr(int(Kind.PAIRS))
MIXED = tl.constexpr(int(Kind.MIXED))
EMBED = tl.constexpr(int(Kind.EMBED))
ATTENTION = tl.constexpr(int(Kind.ATTENTION))
CHOOSE = tl.constexpr(int(Kind.CHOOSE))
FIELDS = tl.constexpr(WORDS)
# Places in VARIANTS.
SIZE = tl.constexpr(len(Variant._fields))
KIND = tl.constexpr(Variant._fields.index("kind"))
ROWS = tl.constexpr(Variant._fields.index("rows"))
COLUMNS = tl.constexpr(Variant._fields.index("columns"))
ALIGNMENT = tl.constexpr(Variant._fields.index("alignment"))
BLOCKS = tl.constexpr(Variant._fields.index("blocks"))
WHOLE = tl.constexpr(Variant._fields.index("whole"))
SHARED = tl.constexpr(Variant._fields.index("shared"))
PLAIN = tl.constexpr(Variant._fields.index("plain"))
X_HALF = tl.constexpr(Variant._fields.index("x_half"))
Y_HALF = tl.constexpr(Variant._fields.index("y_half"))


@triton.jit
def product_phase(
    d, ahead, like, single, counter, target,
    VARIANTS: tl.constexpr, FIRST: tl.constexpr, N: tl.constexpr, ACT: tl.constexpr, SYNC: tl.constexpr,
):  # fmt: skip
    """A program's tiles of the variant whose fields begin at FIRST of VARIANTS."""
    kind: tl.constexpr = VARIANTS[FIRST + KIND]
    BR: tl.constexpr = VARIANTS[FIRST + ROWS]
    BK: tl.constexpr = VARIANTS[FIRST + COLUMNS]
    A: tl.constexpr = VARIANTS[FIRST + ALIGNMENT]
    whole: tl.constexpr = VARIANTS[FIRST + WHOLE]
    plain: tl.constexpr = VARIANTS[FIRST + PLAIN]
    x_half: tl.constexpr = VARIANTS[FIRST + X_HALF]
    y_half: tl.constexpr = VARIANTS[FIRST + Y_HALF]
    if kind == MIXED:
        mixed(d, ahead, like, single, counter, target,
              N, BR, BK, VARIANTS[FIRST + BLOCKS], A, x_half, SYNC)  # fmt: skip
    elif kind == PAIRS:
        if whole:
            pairs_whole(d, ahead, like, single, counter, target,
                        N, BR, BK, VARIANTS[FIRST + SHARED], A, y_half, ACT, plain, SYNC)  # fmt: skip
        else:
            pairs_chunked(d, ahead, like, single, counter, target,
                          N, BR, BK, VARIANTS[FIRST + SHARED], A, y_half, ACT, plain, SYNC)  # fmt: skip
    elif whole:
        rows_whole(d, ahead, like, single, counter, target, N, BR, BK, A, x_half, plain, SYNC)
    else:
        rows_chunked(d, ahead, like, single, counter, target, N, BR, BK, A, x_half, plain, SYNC)


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
    VARIANTS: the fields of COUNT times `fields.Variant`.
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
                    d, Ahead(head, w, strides, sizes), like, single, counter, target,
                    VARIANTS, i * SIZE, N, ACT, SYNC,
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
