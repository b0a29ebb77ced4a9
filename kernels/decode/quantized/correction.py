"""What a structure adds to rows of a quantized weight: ``y = Q x + U z`` with z = V x already there.

U is narrow, [o, r] in rows of levels as bytes, with scales, or of plain numbers: its r numbers a row are
read after the row of Q, whose time hides theirs.
"""

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("these kernels need triton") from error


@triton.jit
def wait(counter, target):
    """Until programs have arrived `target` times in all; one thread polls (`ld.acquire`)."""
    seen = tl.atomic_add(counter, 0, sem="acquire")
    while seen < target:
        seen = tl.atomic_add(counter, 0, sem="acquire")


@triton.jit
def arrive(counter):
    """Everything that this program stored is there for those that wait for its arrival."""
    tl.debug_barrier()  # all stores of the program before its one arrival
    tl.atomic_add(counter, 1, sem="release")


@triton.jit
def narrow_rows(s, out, ok, T: tl.constexpr):
    """U [BR, RANKS] of the rows `out` in float32, and where their z is [BR, RANKS] and there; nothing
    of a stage that nothing corrects. It does not depend on inputs: read before they are there."""
    if T.RANKS > 0:
        rank = tl.arange(0, T.RANKS)
        there = ok[:, None] & (rank < s.ranks)[None, :]
        u = tl.load(s.u + (out[:, None] * s.u_row + rank[None, :]), mask=there, other=0).to(tl.float32)
        if T.U_GROUP > 0:
            at = out[:, None] * s.u_scale_row + (rank // T.U_GROUP)[None, :]
            u *= tl.load(s.u_scale + at, mask=there, other=0.0).to(tl.float32)
        return u, (out // s.u_part * s.ranks)[:, None] + rank[None, :], there
    else:
        return ()


@triton.jit
def correction(s, narrow, token, T: tl.constexpr):
    """[BR] of one token, 0 where nothing corrects. narrow: of `narrow_rows`."""
    if T.RANKS > 0:
        if T.AWAIT:
            wait(s.counter, s.arrivals)
        u, at, there = narrow
        return tl.sum(u * tl.load(s.z + token * s.z_token + at, mask=there, other=0.0), 1)
    else:
        return 0.0


@triton.jit
def corrections(s, narrow, tokens, N: tl.constexpr, T: tl.constexpr):
    """[BR, N] of several tokens."""
    u, at, there = narrow
    if T.AWAIT:
        wait(s.counter, s.arrivals)
    sums = tl.zeros([u.shape[0], N], tl.float32)
    for token in range(tokens):
        z = tl.load(s.z + token * s.z_token + at, mask=there, other=0.0)
        column = tl.sum(u * z, 1)
        sums += tl.where(tl.arange(0, N)[None, :] == token, column[:, None], 0.0)
    return sums


@triton.jit
def leave(counter, programs):
    """A program needs the counter no more: the last of `programs` puts it back to 0."""
    if tl.atomic_add(counter + 1, 1) == programs - 1:
        tl.store(counter, 0)
        tl.store(counter + 1, 0)
