"""What a structure adds to rows of a quantized weight: ``y = Q x + U z`` with z = V x already there.

U is narrow, [o, r] in rows of levels as bytes, with scales, or of plain numbers: its r numbers a row are
read after the row of Q, whose time hides theirs.
"""

import triton
import triton.language as tl


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
def correction(s, narrow, T: tl.constexpr):
    """[BR], 0 where nothing corrects. narrow: of `narrow_rows`."""
    if T.RANKS > 0:
        u, at, there = narrow
        return tl.sum(u * tl.load(s.z + at, mask=there, other=0.0), 1)
    else:
        return 0.0
