"""Complete Monarch layers."""

from collections.abc import Callable

import torch
from torch import Tensor

from blr.kernels.common.available import supports_pdl
from blr.kernels.common.replay import at_once
from blr.kernels.decode.gemm.launch import bmm as our_bmm
from blr.kernels.decode.gemm.launch import library_rows, run_length
from blr.kernels.decode.gemv.launch import product as stage
from blr.kernels.decode.narrow.launch import monarch as narrow
from blr.kernels.layers.monarch.reference import monarch_linear as reference

RUN = 8  # neighbours in z from which on our product stores it, 16 bytes of half precision


def gemv(x: Tensor, U: Tensor, V: Tensor, bias: Tensor | None = None) -> Tensor:
    """Two kernels a token; the first stores in the order that the second reads."""
    pdl, part = supports_pdl(x.device), V.shape[2] // V.shape[0]
    z = stage(x, V.mT, part=part, dtype=torch.float32, pdl=pdl)
    return stage(z, U, bias, dtype=x.dtype, pdl=pdl)


def permuted_store(
    x: Tensor, U: Tensor, V: Tensor, bias: Tensor | None = None, by: Callable[..., Tensor] = at_once
) -> Tensor:
    """Our product, which stores z [k, n, (l, r')] straight in the order of the library's second.

    Where r' is no multiple of 8, stores are of single numbers and rows of z start anywhere: `bmm` then,
    which is 3.6 times as fast (r' = 99, 4096→14336 on an H200).

    Args:
        x: [..., i]. by: runs our product.
    """
    if run_length(V.shape[2] // V.shape[0]) < RUN:
        return bmm(x, U, V, bias)
    return library_rows(by(_stored, x, V), U, bias, x.shape[:-1])


def _stored(x: Tensor, V: Tensor) -> Tensor:
    """z [b, n, r] in the order of the second product."""
    blocks, p, middle = V.shape
    flat = x.reshape(-1, blocks, p)
    n, part = len(flat), middle // blocks
    z = torch.empty(blocks, n, blocks, part, dtype=x.dtype, device=x.device)  # [k, n, l, r']
    our_bmm(flat.transpose(0, 1), V, z.permute(2, 1, 0, 3), part=part)
    return z.view(blocks, n, middle)


def bmm(x: Tensor, U: Tensor, V: Tensor, bias: Tensor | None = None) -> Tensor:
    """The plain form, of x [..., i]: library product, a copy that permutes, library product."""
    blocks, p, middle = V.shape
    z = torch.bmm(x.reshape(-1, blocks, p).transpose(0, 1), V)
    z = z.view(blocks, -1, blocks, middle // blocks).permute(2, 1, 0, 3)
    return library_rows(z.flatten(2), U, bias, x.shape[:-1])


VARIANTS = {
    "reference": reference,
    "gemv": gemv,
    "narrow": narrow,
    "permuted_store": permuted_store,
    "bmm": bmm,
}
