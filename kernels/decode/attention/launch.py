"""Launches the decoding attention: shapes in; splits, tiles and workspace out."""

from math import e, log2

import torch
from torch import Tensor

from blr.kernels.common.available import HALF, interpreted
from blr.kernels.decode.gemv.launch import power_of_two

# Splits of one head's slots at most, and slots of a split at least.
MAX_SPLITS = 64
MIN_CHUNK = 32
# Programs that keep a large GPU busy: two for each of 132 multiprocessors.
MULTIPROCESSORS = 132
PROGRAMS = 2 * MULTIPROCESSORS
STREAMING = 3 * MULTIPROCESSORS  # those of the streamed kernel, as many as registers hold
# Products of queries and keys that a program without tensor cores has in registers.
HELD = 8192


def even_count(programs: int, bucket: int, most: int) -> int:
    """Splits that share out evenly what a token sees, for `programs` heads and rows together, `most`
    programs in all; a power of two where that is nearly as many."""
    wanted = max(most // programs, 1)
    power = 1 << (wanted.bit_length() - 1)  # at or below
    wanted = power if wanted < 1.2 * power else wanted
    return max(min(wanted, bucket // MIN_CHUNK, MAX_SPLITS), 1)


def attention_workspace(
    rows: int, heads: int, kv_heads: int, width: int, device: torch.device
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
    sinks: Tensor | None = None,
    window: int | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    bucket: int,
    workspace: dict[str, Tensor],
    out: Tensor,
    splits: int | None = None,
    exact: bool = False,
    pdl: bool = False,
    **config: int,
) -> Tensor:
    """`reference.decode_attention` as one kernel into `out` [B, Hq·D]. With a cache of fewer rows S,
    row r is of sequence r modulo S and does not see what the same launch appends for others of it. Its
    sums are those that it has in a launch of S rows.

    Args:
        k, v: [B, Hkv, L, D] with the last two axes contiguous; scales: [B, Hkv, L] in float32, if they
            are int8. cos, sin: [L, R] in float32.
        bucket: a power of two above every ``pos``; it fixes the grid.
        workspace: of `attention_workspace`. splits: stretches of the bucket, at the same slots whatever
            the batch; None: `even_count` of what each row sees.
        exact: int8 is multiplied in float32, for models in float32, else in bfloat16.
        pdl: launched while the kernel before it still runs. ``pos``, ``start`` and the slots before
            ``pos`` must have been written before the last kernel that was launched without.
        config: BN (slots of a tile), DOT (tensor cores), STAGES (tiles under way of int8) and num_warps.

    Raises:
        ValueError: more than `MAX_SPLITS` splits.
    """
    rows, (sequences, kv_heads, _, width) = len(qkv), k.shape
    group = (qkv.shape[1] // width - 2 * kv_heads) // kv_heads
    chunk = -(-bucket // splits) if splits else 0  # none: each row's own
    splits = _checked_splits(splits, sequences * kv_heads, bucket, STREAMING if scales else PROGRAMS)
    none = qkv  # stands for an absent tensor: never read
    gains = (none if gain is None else gain for gain in (q_gain, k_gain))
    options = {"G": group, "DP": max(power_of_two(width), 16), "SPLITS": power_of_two(splits)}
    options |= {"NORM": q_gain is not None, "WINDOW": window is not None}
    options |= {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}
    after = (
        *(cos, sin, cos.stride(0), *gains, sinks, eps, pos, start, scale * log2(e), out, out.stride(0)),
        *(workspace["partial"], workspace["state"], workspace["counter"]),
        *(kv_heads, sequences, width, cos.shape[1], window or 0, chunk),
    )
    grid, before = (rows * kv_heads, splits), (qkv, qkv.stride(0), k, v, k.stride(0), k.stride(1))
    if scales is None:
        from blr.kernels.decode.attention.triton import attention_kernel

        attention_kernel[grid](*before, *after, **options | tile_shape(group, width, k.dtype) | config)
        return out
    from blr.kernels.decode.attention.streamed import streamed_kernel

    options |= {**stream_shape(group, width, group > 1 and not exact), **config}
    options |= {"HALF": interpreted()}  # whose products of bfloat16 are wrong
    scaled = (*scales, scales[0].stride(0), scales[0].stride(1))
    streamed_kernel[grid](*before, *scaled, *after, **options)
    return out


def _checked_splits(asked: int | None, programs: int, bucket: int, most: int) -> int:
    """As many as are asked for, else `even_count`. Raises ValueError for more than `MAX_SPLITS`."""
    splits = asked or even_count(programs, bucket, most)
    if splits > MAX_SPLITS:
        raise ValueError(f"decode_attention: {splits} splits; it takes up to {MAX_SPLITS}")
    return splits


def stream_shape(group: int, width: int, dot: bool) -> dict[str, int]:
    """`tile_shape` of the streamed kernel, and its STAGES: how many tiles are under way."""
    small = max(power_of_two(group), 16) if dot else power_of_two(group)
    slots = 64 if dot else min(max(HELD // (small * power_of_two(width)), 16), 64)
    return {"GP": small, "BN": slots, "DOT": dot, "STAGES": 3 if dot else 2, "num_warps": 4}


def tile_shape(group: int, width: int, dtype: torch.dtype) -> dict[str, int]:
    """Padded queries GP, slots of a tile BN and the kind of product for `group` queries a key head.

    Tensor cores pad the group to 16 and round queries to `dtype`; with one query, or in float32,
    the CUDA cores are as fast and exact.
    """
    dot = group > 1 and dtype in HALF
    small = max(power_of_two(group), 16) if dot else power_of_two(group)
    slots = 32 if dot or group * width <= 256 else 16
    return {"GP": small, "BN": slots, "DOT": dot, "num_warps": 4}
