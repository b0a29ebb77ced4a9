"""Complete BLAST layers: what each reads, writes and launches."""

from collections.abc import Callable

import torch
from torch import Tensor

from blr.kernels.common.available import supports_pdl
from blr.kernels.common.replay import at_once
from blr.kernels.decode.gemm.launch import library_rows
from blr.kernels.decode.gemv.launch import product as stage
from blr.kernels.decode.gemv.segments import How, Segment
from blr.kernels.decode.narrow.launch import blast as narrow
from blr.kernels.layers.blast.reference import blast_linear as reference

# Rows of z start at multiples of so many tokens: the library's fast products need 16 bytes.
ALIGNED = 8


def gemv(x: Tensor, U: Tensor, S: Tensor, V: Tensor, bias: Tensor | None = None) -> Tensor:
    """Two kernels a token: V with the mix in its epilogue, then U."""
    from blr.kernels.decode.gemv.launch import grouped

    pdl = supports_pdl(x.device)
    z = torch.empty(x.shape[0], V.shape[0] * V.shape[2], dtype=torch.float32, device=x.device)
    x = x if x.stride(1) == 1 else x.contiguous()
    if x.shape[0]:
        segment = Segment(x, V.transpose(1, 2), z, mix=S)
        grouped([segment], How(pdl=pdl))
    return stage(z, U, bias, dtype=x.dtype, pdl=pdl)


def bmm_mix(
    x: Tensor,
    U: Tensor,
    S: Tensor,
    V: Tensor,
    bias: Tensor | None = None,
    by: Callable[..., Tensor] = at_once,
) -> Tensor:
    """Library product, our mix in place, library product, on z [b, r, tokens].

    Args:
        x: [..., i]. by: runs our mix.
    """
    blocks, p, rank = V.shape
    part = x.reshape(-1, blocks, p).permute(1, 2, 0)  # [b, p, n]
    n = part.shape[2]
    if n % ALIGNED:
        z = torch.empty(blocks, rank, -(-n // ALIGNED) * ALIGNED, dtype=x.dtype, device=x.device)
        z = torch.bmm(V.mT, part, out=z[:, :, :n])
    else:
        z = torch.bmm(V.mT, part)
    return library_rows(by(_mixed, z, S).mT, U, bias, x.shape[:-1])


def _mixed(z: Tensor, S: Tensor) -> Tensor:
    """z, mixed in place."""
    from blr.kernels.layers.blast.launch import mix

    return mix(z, S, z)


def bmm(x: Tensor, U: Tensor, S: Tensor, V: Tensor, bias: Tensor | None = None) -> Tensor:
    """The plain form with tokens last: three products of the library, none of which copies."""
    z = torch.bmm(V.mT, x.reshape(-1, *V.shape[:2]).permute(1, 2, 0))  # [l, r, n]
    w = torch.bmm(S.permute(2, 0, 1), z.transpose(0, 1))  # [r, k, n]
    return library_rows(w.permute(1, 2, 0), U, bias, x.shape[:-1])


VARIANTS = {
    "reference": reference,
    "gemv": gemv,
    "narrow": narrow,
    "bmm_mix": bmm_mix,
    "bmm": bmm,
    "plain": reference,
}
