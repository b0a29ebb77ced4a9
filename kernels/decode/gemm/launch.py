"""Launches the batched product, and the matching call of cuBLAS."""

from collections.abc import Sequence

import torch
from torch import Tensor

from blr.kernels.common.launching import TritonKernel, launch

TILE = ("BM", "BN", "BK", "GROUP")  # of a program, in the kernels' order


def bmm(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    *,
    part: int | None = None,
    activation: str = "",
    **config: int,
) -> Tensor:
    """``out = φ(a @ b + bias)`` by our kernel.

    Args:
        a: [B, m, k], b: [B, k, n], any strides. bias: [B, n] or None.
        out: [B, m, n], its columns of stride 1; or, with `part`, [B, m, n / part, part], any strides
            but the last.
        activation: of `gemv.segments.ACTIVATIONS`.
        config: BM, BN, BK, GROUP, num_warps, num_stages.

    Returns:
        `out`. float32 operands follow ``torch.backends.cuda.matmul.allow_tf32``.
    """
    (batch, m, k), n = a.shape, b.shape[2]
    if batch * m * n == 0:
        return out
    config = {**tile_shape(m, n, k, a.dtype), **config}
    column = (0, n) if part is None else (out.stride(2), part)
    ends = (out if bias is None else bias, out, m, n, k)
    tail = (0 if bias is None else bias.stride(0), out.stride(0), out.stride(1), *column)
    run = run_length(n if part is None else part)
    constants: dict[str, object] = {"BIAS": bias is not None, "RUN": run, "ACT": activation}
    kernel: TritonKernel
    given: tuple[object, ...]
    if tma_ready(a, b):
        from blr.kernels.decode.gemm.triton import TensorDescriptor
        from blr.kernels.decode.gemm.triton import bmm_tma_kernel as kernel

        (left, a_rows, a_cols), (right, b_rows, b_cols) = flat(a), flat(b.transpose(1, 2))
        boxes = (
            TensorDescriptor.from_tensor(left, [config["BM"], config["BK"]]),
            TensorDescriptor.from_tensor(right, [config["BN"], config["BK"]]),
        )
        given = (*boxes, *ends, a_rows, a_cols, b_rows, b_cols, *tail)
    else:
        from blr.kernels.decode.gemm.triton import bmm_kernel as kernel

        given = (a, b, *ends, *a.stride(), *b.stride(), *tail)
        constants["PRECISION"] = dot_precision()
    tile = {name: config[name] for name in TILE}
    rest = {name: value for name, value in config.items() if name not in TILE}
    grid = (-(-m // config["BM"]) * -(-n // config["BN"]), batch)
    launch(kernel, grid, given, {**tile, **constants}, **rest)
    return out


def tma_ready(a: Tensor, b: Tensor) -> bool:
    """Whether the bulk copy engine can read a and b as in `bmm`: half precision, Hopper or later, K
    contiguous in 16-byte rows, the batches of each below or beside one another, at least one of
    them ending with its K columns."""
    if not a.is_cuda or a.element_size() != 2 or torch.cuda.get_device_capability(a.device) < (9, 0):
        return False
    pair = (a, b.transpose(1, 2))
    aligned = all(t.data_ptr() % 16 == 0 and t.stride(1) % 8 == 0 for t in pair)
    ends = any(below(t) for t in pair) or a.shape[2] % 128 == 0
    return aligned and all(t.stride(2) == 1 and (below(t) or _beside(t)) for t in pair) and ends


def below(t: Tensor) -> bool:
    """Whether the batches of [B, m, k] lie below one another, as rows of one matrix."""
    return t.shape[0] == 1 or t.stride(0) == t.shape[1] * t.stride(1)


def _beside(t: Tensor) -> bool:
    return 0 < t.stride(0) < t.stride(1) and t.stride(0) % 8 == 0


def flat(t: Tensor) -> tuple[Tensor, int, int]:
    """[B, m, k] as one matrix, and the rows and columns from one batch to the next."""
    batch, m, k = t.shape
    if below(t):
        return torch.as_strided(t, (batch * m, k), (t.stride(1), 1), t.storage_offset()), m, 0
    width = t.stride(0) * (batch - 1) + k
    return torch.as_strided(t, (m, width), (t.stride(1), 1), t.storage_offset()), 0, t.stride(0)


def dot_precision() -> str:
    """The `input_precision` of products of float32: "tf32" where torch allows it."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def run_length(part: int) -> int:
    """Columns that stay neighbours whatever `part`: its power-of-two divisor, up to 16."""
    return min(part & -part, 16)


def tile_shape(m: int, n: int, k: int, dtype: torch.dtype) -> dict[str, int]:
    """Tiles, warps and pipeline stages by shape and element size: two programs a multiprocessor on an
    H200, so that one stores while the other multiplies."""
    if dtype.itemsize == 4:
        return {"BM": 64, "BN": 64, "BK": 32, "GROUP": 8, "num_warps": 4, "num_stages": 3}
    if m <= 64:
        return {"BM": 64, "BN": 128, "BK": 64, "GROUP": 8, "num_warps": 4, "num_stages": 3}
    return {"BM": 128, "BN": 128, "BK": 64, "GROUP": 8, "num_warps": 4, "num_stages": 3}


def library_rows(z: Tensor, U: Tensor, bias: Tensor | None, batch: Sequence[int]) -> Tensor:
    """[*batch, B·q] of z [B, n, r], U [B, q, r] and bias [B·q], by the vendor's library."""
    y = torch.empty(z.shape[1], *U.shape[:2], dtype=z.dtype, device=z.device)
    out = y.transpose(0, 1)
    if bias is None:
        torch.bmm(z, U.mT, out=out)
    else:
        out.copy_(bias.view(len(U), 1, -1).expand_as(out))
        torch.baddbmm(out, z, U.mT, out=out)
    return y.view(*batch, U.shape[0] * U.shape[1])
