"""Launches the mix of BLAST on tensors [blocks, ranks, tokens]."""

from torch import Tensor

from blr.kernels.common.launching import launch
from blr.kernels.decode.gemm.launch import dot_precision


def mix(z: Tensor, s: Tensor, out: Tensor | None = None, *, on_cuda: bool = False) -> Tensor:
    """``out[k, r, n] = Σ_l s[k, l, r] z[l, r, n]``, sums in float32: of few blocks on the CUDA cores,
    which hold them in registers, else a dot over l, padded to 16.

    Args:
        z: [b, r, n], tokens of stride 1. s: [b, b, r], any strides; on CUDA cores some of its rows.
        out: like z, or z itself: the mix is safe in place. Default: a new tensor.
        on_cuda: on the CUDA cores if b is 16, too.
    """
    blocks, ranks, tokens = z.shape
    out = z.new_empty(len(s), ranks, tokens) if out is None else out
    if z.numel() == 0:
        return out
    strides = (*z.stride()[:2], *s.stride(), *out.stride()[:2])
    if on_cuda or blocks in (1, 2, 4, 8):
        from blr.kernels.layers.blast.triton import mix_fma_kernel

        width = 512 if blocks > 8 else 1024
        few: dict[str, object] = {"B": blocks, "OUT": len(s), "BN": width}
        grid = (-(-tokens // width), ranks)
        launch(mix_fma_kernel, grid, (z, s, out, tokens, *strides), few, num_warps=4)
        return out
    from blr.kernels.layers.blast.triton import mix_dot_kernel

    constants: dict[str, object] = {"B": max(16, 1 << (blocks - 1).bit_length()), "BR": 4, "BN": 128}
    constants["PRECISION"] = dot_precision()
    grid, arguments = (-(-tokens // 128), -(-ranks // 4)), (z, s, out, tokens, ranks, blocks, *strides)
    launch(mix_dot_kernel, grid, arguments, constants, num_warps=4)
    return out
