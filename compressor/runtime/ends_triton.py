"""The two ends of a token as kernels: the row of the embedding, and the choice of the next token."""

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    from blr.kernels.persistent.ends import choose_part, embed_part
except ImportError as error:
    raise ImportError("these kernels need triton") from error


@triton.jit
def embed_kernel(tokens, table, table_row, x, x_row, width, BLOCK: tl.constexpr):
    """x[b] = table[tokens[b]] in float32. Grid (rows, ceil(width / BLOCK)).

    Launched without programmatic dependence: it starts when everything before it has ended.
    """
    embed_part(
        tl.program_id(0), tl.program_id(1), tokens, table, table_row, x, x_row, width, BLOCK
    )  # fmt: skip


@triton.jit
def choose_kernel(
    logits, logits_row, vocabulary, values, indices, counter, tokens, pos,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """tokens[b] = the lowest index of the largest logit; pos[b] += 1. Grid (rows, parts ≤ PARTS).

    The part that arrives last compares what the others left in values, indices [rows, PARTS].
    """
    if PDL:
        gdc_launch_dependents()
    if PDL:
        gdc_wait()
    choose_part(tl.program_id(0), tl.program_id(1), tl.num_programs(1), logits, logits_row, vocabulary,
                values, indices, counter, tokens, pos, BLOCK, PARTS)  # fmt: skip
