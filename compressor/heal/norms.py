"""Root-mean-square norms of transformers as the one fused operator of torch, which has gradients.

Theirs are six kernels forward and more backward, which on a GPU take longer than the products of a
small model. A norm that computes anything else (Gemma's 1 + weight) stays as it is.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.functional import rms_norm

from blr.compressor.modeling.probes import norm_of


def fuse_norms(model: Any) -> int:
    """Replace the forward passes of the norms of `model`; how many were."""
    known = ((module, norm_of(module)) for module in model.modules())
    found = [(module, norm[1]) for module, norm in known if norm is not None and norm[0] == "rms"]
    for module, eps in found:
        module.forward = partial(_forward, module, eps)
    return len(found)


def _forward(norm: Any, eps: float, x: Tensor) -> Tensor:
    return rms_norm(x, norm.weight.shape, norm.weight, eps)
