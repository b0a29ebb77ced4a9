"""Launches the mix of BLAST on tensors [blocks, ranks, tokens]."""

from typing import Any

from torch import Tensor

from blr.kernels.common.launching import launch
from blr.kernels.decode.gemm.launch import dot_precision


def mix(
    z: Tensor, s: Tensor, out: Tensor | None = None, *, cores: str | None = None, **config: object
) -> Tensor:
    """``out[k, r, n] = Σ_l s[k, l, r] z[l, r, n]``, sums in float32.

    Args:
        z: [b, r, n], tokens of stride 1. s: [b, b, r], any strides; on CUDA cores some of its rows.
        out: like z, or z itself: the mix is safe in place. Default: a new tensor.
        cores: "tensor" (a dot over l, padded to 16) or "cuda" (b a power of two up to 16);
            default: by b.
        config: BR, BN, STEPS (tensor) or BN (cuda), num_warps.
    """
    out = z.new_empty(len(s), *z.shape[1:]) if out is None else out
    if z.numel() == 0:
        return out
    few = z.shape[0] in (1, 2, 4, 8)  # blocks, which the CUDA cores hold in registers
    on_cuda = few if cores is None else cores == "cuda"
    (_on_cuda_cores if on_cuda else _on_tensor_cores)(z, s, out, config)
    return out


def _on_cuda_cores(z: Tensor, s: Tensor, out: Tensor, config: dict[str, Any]) -> None:
    from blr.kernels.layers.blast.triton import mix_fma_kernel

    blocks, ranks, tokens = z.shape
    config = {"BN": 512 if blocks > 8 else 1024, "num_warps": 4, **config}
    grid = (-(-tokens // config["BN"]), ranks)
    arguments = (z, s, out, tokens, *z.stride()[:2], *s.stride(), *out.stride()[:2])
    constants = {"B": blocks, "OUT": len(s), "BN": config["BN"]}
    launch(mix_fma_kernel, grid, arguments, constants, num_warps=config["num_warps"])


def _on_tensor_cores(z: Tensor, s: Tensor, out: Tensor, config: dict[str, Any]) -> None:
    from blr.kernels.layers.blast.triton import mix_dot_kernel

    blocks, ranks, tokens = z.shape
    config = {"BR": 4, "BN": 128, "STEPS": 1, "num_warps": 4, **config}
    grid = (-(-tokens // (config["BN"] * config["STEPS"])), -(-ranks // config["BR"]))
    strides = (*z.stride()[:2], *s.stride(), *out.stride()[:2])
    constants = {
        "B": max(16, 1 << (blocks - 1).bit_length()),
        **{name: config[name] for name in ("BR", "BN", "STEPS")},
        "PRECISION": dot_precision(),
    }
    arguments = (z, s, out, tokens, ranks, blocks, *strides)
    launch(mix_dot_kernel, grid, arguments, constants, num_warps=config["num_warps"])
