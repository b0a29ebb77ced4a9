"""Complete low-rank layers."""

import torch
from torch import Tensor

from blr.kernels.common.available import supports_pdl
from blr.kernels.decode.gemv.launch import product as stage
from blr.kernels.decode.narrow.launch import lowrank as narrow
from blr.kernels.layers.lowrank.reference import lowrank_linear as reference


def gemv(x: Tensor, U: Tensor, V: Tensor, bias: Tensor | None = None) -> Tensor:
    """Two kernels a token."""
    pdl = supports_pdl(x.device)
    z = stage(x, V.t().unsqueeze(0), dtype=torch.float32, pdl=pdl)
    return stage(z, U.unsqueeze(0), bias, dtype=x.dtype, pdl=pdl)


VARIANTS = {"reference": reference, "gemv": gemv, "narrow": narrow, "gemm": reference}
