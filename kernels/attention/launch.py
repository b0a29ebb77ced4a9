"""Launches the decoding attention: shapes in; splits, tiles and workspace out."""

from __future__ import annotations

from math import e, log2
from typing import Any

import torch
from torch import Tensor

# Splits of one head's slots at most, and slots of a split at least.
MAX_SPLITS = 64
MIN_CHUNK = 32
# Programs that keep a large GPU busy: two for each of 132 multiprocessors.
PROGRAMS = 264


def split_count(programs: int, bucket: int) -> int:
    """Splits, a power of two, of a context of up to `bucket` slots (a power of two), for
    `programs` heads and rows together."""
    wanted = _power_below(max(PROGRAMS // programs, 1))
    return max(min(wanted, bucket // MIN_CHUNK, MAX_SPLITS), 1)


def attention_workspace(
    rows: int, heads: int, kv_heads: int, width: int, device: Any
) -> dict[str, Tensor]:
    """What splits leave for the last one of them, for up to `rows` rows of heads of size `width`.

    Returns "partial" and "state" (float32) and "counter" (int32 zeros; the kernel leaves zeros).
    """
    partial = torch.empty(rows * heads * MAX_SPLITS * width, dtype=torch.float32, device=device)
    state = torch.empty(rows * heads * MAX_SPLITS * 2, dtype=torch.float32, device=device)
    counter = torch.zeros(rows * kv_heads, dtype=torch.int32, device=device)
    return {"partial": partial, "state": state, "counter": counter}


def decode_attention(
    qkv: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    pos: Tensor,
    start: Tensor,
    *,
    scale: float,
    q_gain: Tensor | None = None,
    k_gain: Tensor | None = None,
    eps: float = 0.0,
    window: int | None = None,
    bucket: int,
    workspace: dict[str, Tensor],
    out: Tensor,
    splits: int | None = None,
    pdl: bool = False,
    **config: Any,
) -> Tensor:
    """`reference.decode_attention` as one kernel into `out` [B, Hq·D].

    Args:
        k, v: [B, Hkv, L, D] with the last two axes contiguous. cos, sin: [L, R] in float32.
        bucket: a power of two above every ``pos``; it fixes the grid.
        workspace: of `attention_workspace`. splits: in place of `split_count`'s.
        pdl: launched while the kernel before it still runs. ``pos``, ``start`` and the slots before
            ``pos`` must have been written before the last kernel that was launched without.
        config: BN (slots of a tile), DOT (tensor cores), num_warps.

    Raises:
        ValueError: more than `MAX_SPLITS` splits.
    """
    from blr.kernels.attention.triton import attention_kernel

    rows, kv_heads, _, width = k.shape
    group = (qkv.shape[1] // width - 2 * kv_heads) // kv_heads
    splits = splits or split_count(rows * kv_heads, bucket)
    if splits > MAX_SPLITS:
        raise ValueError(f"decode_attention: {splits} splits; it takes up to {MAX_SPLITS}")
    chosen = {**tile_shape(group, width, k.dtype), **config}
    none = qkv  # stands for an absent tensor: never read
    attention_kernel[(rows * kv_heads, splits)](
        *(qkv, qkv.stride(0), k, v, k.stride(0), k.stride(1), cos, sin, cos.stride(0)),
        *(none if q_gain is None else q_gain, none if k_gain is None else k_gain, eps),
        *(pos, start, scale * log2(e), out, out.stride(0)),
        *(workspace["partial"], workspace["state"], workspace["counter"]),
        *(kv_heads, width, cos.shape[1], window or 0, -(-bucket // splits)),
        G=group,
        DP=max(_power(width), 16),
        SPLITS=splits,
        NORM=q_gain is not None,
        WINDOW=window is not None,
        PDL=pdl,
        **chosen,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


def tile_shape(group: int, width: int, dtype: torch.dtype) -> dict[str, Any]:
    """Padded queries GP, slots of a tile BN and the kind of product for `group` queries a key head.

    Tensor cores pad the group to 16 and round queries to `dtype`; with one query, or in float32,
    the CUDA cores are as fast and exact.
    """
    dot = group > 1 and dtype in (torch.float16, torch.bfloat16)
    small = max(_power(group), 16) if dot else _power(group)
    slots = 32 if dot or group * width <= 256 else 16
    return {"GP": small, "BN": slots, "DOT": dot, "num_warps": 4}


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << max(number - 1, 0).bit_length()


def _power_below(number: int) -> int:
    """The power of two at or below."""
    return 1 << (number.bit_length() - 1)
