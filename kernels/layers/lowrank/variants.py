"""Complete low-rank layers."""

from typing import Any

import torch
from torch import Tensor

from blr.kernels.common.available import supports_pdl
from blr.kernels.decode.gemv.launch import product as stage
from blr.kernels.decode.narrow.launch import lowrank as narrow
from blr.kernels.layers.lowrank.reference import lowrank_linear as reference


def gemv(x: Tensor, U: Tensor, V: Tensor, bias: Tensor | None = None, **config: Any) -> Tensor:
    """Two kernels a token."""
    pdl = supports_pdl(x.device)
    z = stage(x, V.t().unsqueeze(0), dtype=torch.float32, pdl=pdl, **config.get("first", {}))
    return stage(z, U.unsqueeze(0), bias, dtype=x.dtype, pdl=pdl, **config.get("second", {}))


def gemm(x: Tensor, U: Tensor, V: Tensor, bias: Tensor | None = None) -> Tensor:
    """The plain form: two products of the library; the bias is in the second's epilogue."""
    return torch.nn.functional.linear(x @ V, U, bias)


VARIANTS = {"reference": reference, "gemv": gemv, "narrow": narrow, "gemm": gemm}
