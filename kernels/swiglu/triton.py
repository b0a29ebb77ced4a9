"""Gate and up products of a low-rank MLP, their biases, activation and gating in one kernel.

Derivation and cost: README.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError as error:  # callers go through kernels.common.available
    raise ImportError("the SwiGLU kernel needs triton: install it or use the reference") from error

from blr.kernels.monarch.staged import accumulate, fitting, grouped_tile, precision, shared_limit, tiles
from blr.kernels.swiglu.reference import known


@triton.jit
def activation(h, ACT: tl.constexpr):
    """silu, gelu (erf), gelu_tanh (``x σ(2u)``, as ``1 + tanh u = 2 σ(2u)``) or relu, in float32."""
    tl.static_assert(ACT == "silu" or ACT == "gelu" or ACT == "gelu_tanh" or ACT == "relu")
    if ACT == "silu":
        h = h * tl.sigmoid(h)
    elif ACT == "gelu":
        h = 0.5 * h * (1.0 + tl.erf(h * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        h = h * tl.sigmoid(1.5957691216057308 * (h + 0.044715 * h * h * h))
    else:
        h = tl.maximum(h, 0.0)
    return h


@triton.jit
def projected(
    z, u, bias, rows, cols, n_tokens, features, rank, z_token, z_r, u_f, u_r, bias_f,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The tile (rows, cols) of ``z uᵀ + bias``: [BLOCK_M, BLOCK_N] in float32."""
    far_rows, far_cols, k = rows.to(tl.int64), cols.to(tl.int64), tl.arange(0, BLOCK_K).to(tl.int64)
    z_tile = z + far_rows[:, None] * z_token + k[None, :] * z_r
    u_tile = u + k[:, None] * u_r + far_cols[None, :] * u_f
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = accumulate(
        acc, z_tile, u_tile, (rows < n_tokens)[:, None], (cols < features)[None, :], z_r, u_r, rank,
        BLOCK_K, EVEN, PRECISION,
    )  # fmt: skip
    if HAS_BIAS:
        shift = tl.load(bias + far_cols * bias_f, mask=cols < features, other=0.0)
        acc += shift.to(tl.float32)[None, :]
    return acc


@triton.jit
def projection_kernel(
    zg, ug, bg, zu, uu, bu, out, n_tokens, features, rank_g, rank_u,
    zg_token, zg_r, ug_f, ug_r, bg_f, zu_token, zu_r, uu_f, uu_r, bu_f, out_token,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    GATED: tl.constexpr, ACT: tl.constexpr, BIAS_G: tl.constexpr, BIAS_U: tl.constexpr,
    EVEN_G: tl.constexpr, EVEN_U: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``out = act(zg ugᵀ + bg) [⊙ (zu uuᵀ + bu)]``, one tile [BLOCK_M tokens, BLOCK_N features].

    zg [n, rank_g], ug [features, rank_g], zu [n, rank_u], uu [features, rank_u], any strides;
    out [n, features] with stride 1 along the features. Not GATED: the second product is not read.
    """
    tile_m, tile_n = grouped_tile(
        tl.program_id(0), tl.cdiv(n_tokens, BLOCK_M), tl.cdiv(features, BLOCK_N), GROUP
    )
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    h = projected(
        zg, ug, bg, rows, cols, n_tokens, features, rank_g, zg_token, zg_r, ug_f, ug_r, bg_f,
        BLOCK_M, BLOCK_N, BLOCK_K, BIAS_G, EVEN_G, PRECISION,
    )  # fmt: skip
    h = activation(h, ACT)
    if GATED:
        h *= projected(
            zu, uu, bu, rows, cols, n_tokens, features, rank_u, zu_token, zu_r, uu_f, uu_r, bu_f,
            BLOCK_M, BLOCK_N, BLOCK_K, BIAS_U, EVEN_U, PRECISION,
        )  # fmt: skip
    places = rows.to(tl.int64)[:, None] * out_token + cols[None, :]
    mask = (rows < n_tokens)[:, None] & (cols < features)[None, :]
    tl.store(out + places, h.to(out.dtype.element_ty), mask=mask)


def gated_tiles(z: Tensor, features: int) -> dict[str, int]:
    """Default block sizes of the gated form: two accumulators, so tiles of at most 128×128.

    Eight warps from 128×64 on: 128 registers a thread for the two accumulators of 128×128.
    """
    config = tiles(z.shape[0], features, z.shape[1], 1, z)
    block_n = fitting(features, 16, 64 if z.element_size() > 2 else 128)
    stage = (config["BLOCK_M"] + block_n) * config["BLOCK_K"] * z.element_size()
    warps = 8 if config["BLOCK_M"] * block_n > 64 * 64 else 4
    stages = max(2, min(4, shared_limit(z.device) // stage))
    return {**config, "BLOCK_N": block_n, "num_warps": warps, "num_stages": stages}


def launch(
    gate: tuple[Tensor, Tensor, Tensor | None],
    up: tuple[Tensor, Tensor, Tensor | None] | None,
    act: str,
    config: dict[str, int],
) -> Tensor:
    """Runs `projection_kernel` on (z, U, bias) of the gate and, in the gated form, of the up product."""
    (zg, ug, bg), (zu, uu, bu) = gate, up or gate
    n, features = zg.shape[0], ug.shape[0]
    out = torch.empty((n, features), device=zg.device, dtype=zg.dtype)
    grid = (triton.cdiv(n, config["BLOCK_M"]) * triton.cdiv(features, config["BLOCK_N"]),)
    if not grid[0]:
        return out
    biases = [(out, 0) if b is None else (b, b.stride(0)) for b in (bg, bu)]
    projection_kernel[grid](
        zg, ug, biases[0][0], zu, uu, biases[1][0], out, n, features, zg.shape[1], zu.shape[1],
        *zg.stride(), *ug.stride(), biases[0][1], *zu.stride(), *uu.stride(), biases[1][1],
        out.stride(0),
        GATED=up is not None, ACT=known(act), BIAS_G=bg is not None, BIAS_U=bu is not None,
        EVEN_G=zg.shape[1] % config["BLOCK_K"] == 0, EVEN_U=zu.shape[1] % config["BLOCK_K"] == 0,
        PRECISION=precision(zg.dtype), **config,
    )  # fmt: skip
    return out


def gated_projection(
    zg: Tensor,
    Ug: Tensor,
    bg: Tensor | None,
    zu: Tensor,
    Uu: Tensor,
    bu: Tensor | None,
    act: str = "silu",
    **config: int,
) -> Tensor:
    """`reference.gated_projection` in one kernel; any strides, sums and activation in float32.

    Fastest with the rank axis of all four matrices contiguous; zg and zu may be columns of one
    tensor, as the concatenated V of gate and up makes them.

    Args:
        zg: [n, rg], Ug: [f, rg], zu: [n, ru], Uu: [f, ru]; bg, bu: [f] or None.
        act: "silu", "gelu", "gelu_tanh" or "relu".
        config: overrides of `gated_tiles` (BLOCK_M over n, BLOCK_N over f, BLOCK_K, GROUP, num_warps,
            num_stages).

    Returns:
        [n, f] in the dtype of `zg`.

    Raises:
        ValueError: unknown `act`.
    """
    return launch((zg, Ug, bg), (zu, Uu, bu), act, {**gated_tiles(zg, Ug.shape[0]), **config})


def activated_projection(
    z: Tensor, U: Tensor, b: Tensor | None, act: str = "gelu", **config: int
) -> Tensor:
    """``act(z Uᵀ + b)`` in one kernel: z [n, r], U [f, r], b [f] or None.

    config overrides `blr.kernels.monarch.staged.tiles`, with eight warps from 128×128 on and no wider
    tiles for "gelu": the activation needs registers beside the accumulators. As `gated_projection`
    otherwise.
    """
    defaults = tiles(z.shape[0], U.shape[0], z.shape[1], 1, z)
    if act == "gelu":
        defaults["BLOCK_N"] = min(defaults["BLOCK_N"], 128)
    if defaults["BLOCK_M"] * defaults["BLOCK_N"] >= 128 * 128:
        defaults["num_warps"] = 8
    return launch((z, U, b), None, act, {**defaults, **config})
