"""Complete BLAST layers: what each reads, writes and launches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blr.kernels.blast.reference import blast_linear as reference
from blr.kernels.common.available import supports_pdl
from blr.kernels.gemm.launch import library_bmm
from blr.kernels.gemv.launch import gemv as stage
from blr.kernels.gemv.launch import stage_tile
from blr.kernels.gemv.segments import Segment

# Rows of z start at multiples of so many tokens: the library's fast products need 16 bytes.
ALIGNED = 8


def gemv(
    x: Tensor, U: Tensor, S: Tensor, V: Tensor, bias: Tensor | None = None, **config: Any
) -> Tensor:
    """Two kernels for up to 16 tokens: V with the mix in its epilogue, then U."""
    from blr.kernels.gemv.grouped import grouped

    pdl = supports_pdl(x.device)
    z = torch.empty(x.shape[0], V.shape[0] * V.shape[2], dtype=torch.float32, device=x.device)
    x = x if x.stride(1) == 1 else x.contiguous()
    first = config.get("first")
    if x.shape[0]:
        segment = Segment(x, V.transpose(1, 2), z, mix=S)
        grouped([segment], pdl=pdl, config=[first] if first else None)
    return stage(
        z,
        U,
        bias=bias,
        dtype=x.dtype,
        pdl=pdl,
        **{**stage_tile(x.shape[0], U.shape[-1]), **config.get("second", {})},
    )


def bmm_mix(
    x: Tensor,
    U: Tensor,
    S: Tensor,
    V: Tensor,
    bias: Tensor | None = None,
    *,
    chunk: int = 0,
    **config: Any,
) -> Tensor:
    """Library product, our mix in place, library product, on z [b, r, tokens].

    Args:
        chunk: tokens at a time, so that z stays in the L2 cache; 0: all.
        config: of `launch.mix`.
    """
    blocks, p, rank = V.shape
    n = x.shape[0]
    chunk = min(chunk or n, n)
    y = torch.empty(n, U.shape[0] * U.shape[1], dtype=x.dtype, device=x.device)
    room = -(-chunk // ALIGNED) * ALIGNED
    z = torch.empty(blocks, rank, room, dtype=x.dtype, device=x.device)
    bias = None if bias is None else bias.view(blocks, -1)
    for start in range(0, n, max(chunk, 1)):
        rows = min(chunk, n - start)
        part = x[start : start + rows].view(rows, blocks, p).permute(1, 2, 0)  # [b, p, n]
        to = y[start : start + rows].view(rows, blocks, -1).transpose(0, 1)  # [b, n, q]
        _products(part, U, S, V, bias, z[:, :, :rows], to, config)
    return y


def _products(
    x: Tensor,
    U: Tensor,
    S: Tensor,
    V: Tensor,
    bias: Tensor | None,
    z: Tensor,
    y: Tensor,
    config: dict[str, Any],
) -> None:
    from blr.kernels.blast.launch import mix

    torch.bmm(V.transpose(1, 2), x, out=z)
    mix(z, S, z, **config)
    library_bmm(z.transpose(1, 2), U.transpose(1, 2), y, bias)


def materialize(
    x: Tensor, U: Tensor, S: Tensor, V: Tensor, bias: Tensor | None = None, **config: Any
) -> Tensor:
    """The dense weight, made in the call from the columns of the identity, and one dense product.

    Costs what `bmm_mix` takes for as many tokens as there are inputs: for very many tokens, where a
    dense layer is the faster one. config: of `bmm_mix`.
    """
    weight = bmm_mix(
        torch.eye(V.shape[0] * V.shape[1], dtype=x.dtype, device=x.device), U, S, V, **config
    )
    return torch.nn.functional.linear(x, weight.t(), bias)


VARIANTS = {
    "reference": reference,
    "gemv": gemv,
    "bmm_mix": bmm_mix,
    "materialize": materialize,
}
