"""Attention of one new token a row over a static cache, in plain torch and the dtype of its input."""

import torch
from torch import Tensor

from blr.kernels.decode.attention.rounded import pack


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
) -> Tensor:
    """Normalizes and rotates the new queries and keys, appends to the cache, attends.

    Args:
        qkv: [B, (Hq + 2·Hkv)·D], what the projections give: queries, keys, values; head major.
        k, v: [B, Hkv, L, D], of any dtype; slot ``pos[b]`` is written.
        scales: of k and v in int8, [B, Hkv, L] each, as of `rounded.pack`.
        cos, sin: [L, R] by position (the slot less ``start``), R ≤ D: the first R columns of a head
            turn, column d together with d ± R/2; the others stay.
        pos: [B] int64, the slot of the new token. start: [B] int64, the first slot in use.
        scale: of the scores. window: slots that a query sees, itself included.
        q_gain, k_gain: [D] of an RMS norm over each head, before the rotation; eps: its epsilon.
        sinks: [Hq], for each head the score of a slot more, whose value is zero.

    Returns:
        [B, Hq·D].
    """
    rows, kv_heads, _, width = k.shape
    heads = qkv.unflatten(-1, (-1, width))  # [B, Hq + 2·Hkv, D]
    query, key, value = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), 1)
    c, s = cos[pos - start][:, None].to(qkv.dtype), sin[pos - start][:, None].to(qkv.dtype)
    query, key = rotate(rms(query, q_gain, eps), c, s), rotate(rms(key, k_gain, eps), c, s)
    row = torch.arange(rows, device=k.device)
    if scales is None:
        k[row, :, pos], v[row, :, pos] = key.to(k.dtype), value.to(v.dtype)
    else:
        for new, cache, scale_of in ((key, k, scales[0]), (value, v, scales[1])):
            cache[row, :, pos], scale_of[row, :, pos] = pack(new)
    length = int(pos.max()) + 1
    slot = torch.arange(length, device=k.device)
    seen = (slot >= start[:, None]) & (slot <= pos[:, None])  # [B, T]
    if window is not None:
        seen &= slot > pos[:, None] - window
    query = query.unflatten(1, (kv_heads, -1))  # [B, Hkv, G, D]
    keys, values = k[:, :, :length].to(qkv.dtype), v[:, :, :length].to(qkv.dtype)
    if scales is not None:
        keys, values = (
            tensor * s[:, :, :length, None].to(qkv.dtype)
            for tensor, s in zip((keys, values), scales, strict=True)
        )
    scores = query @ keys.transpose(2, 3) * scale
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    values = values.masked_fill(~seen[:, None, :, None], 0)
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(1, kv_heads, -1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink), -1)
    return (scores.softmax(-1)[..., :length] @ values).flatten(1)


def rms(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    """[B, H, D] over its root mean square, times `gain` [D]; as it is without a gain."""
    if gain is None:
        return x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of [B, H, D] by tables [B, 1, R]: the first R columns turn, column d with d ± R/2."""
    turning, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    low, high = turning.chunk(2, -1)
    turned = turning * cos + torch.cat((-high, low), -1) * sin
    return torch.cat((turned, rest), -1)
