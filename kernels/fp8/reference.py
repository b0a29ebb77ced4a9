"""Numbers in float8 e4m3 in plain torch: rounding, scales, and products as the kernels compute them.

Each number is the nearest of e4m3 to itself over its scale, and a scale takes the largest magnitude of
its row, or of its block of 128 along the axis that is summed over, to 448, the largest of e4m3.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, silu

from blr.kernels.decode.quantized.formats import ROW

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
LINE = 16  # bytes that the bulk copy engine wants rows to start at multiples of
SLACK = 1.0625  # by which rounding may lengthen a row


def quantize_fp8(
    w: Tensor, group: int = ROW, scale_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Numbers in e4m3 and their scales.

    Args:
        w: [..., K], any float dtype. group: numbers along K that share a scale, `ROW` for all of them.
        scale_dtype: default that of `w`. Numbers are rounded for the scale as it is stored.

    Returns:
        float8_e4m3fn [..., K], and scales [..., 1] or [..., ⌈K/group⌉] in `scale_dtype`; of numbers that
        are all zero, or too small for that dtype, the scale and what is stored are zero.
    """
    work = w.to(torch.float64 if w.dtype == torch.float64 else torch.float32)
    scale = scales_fp8(work, group).to(scale_dtype or w.dtype)
    return nearest_fp8(work, of_columns(scale.to(work), group, w.shape[-1])), scale


def scales_fp8(w: Tensor, group: int = ROW) -> Tensor:
    """The scales [..., groups] of numbers [..., K], as of `quantize_fp8`, in their dtype."""
    if not group:
        return w.abs().amax(-1, keepdim=True) / LARGEST
    padded = torch.nn.functional.pad(w, (0, -w.shape[-1] % group))
    return padded.unflatten(-1, (-1, group)).abs().amax(-1) / LARGEST


def of_columns(scale: Tensor, group: int, K: int) -> Tensor:
    """Scales [..., groups] for each of K columns, or [..., 1] where a row shares one."""
    return scale.repeat_interleave(group, -1)[..., :K] if group else scale


def nearest_fp8(w: Tensor, scale: Tensor) -> Tensor:
    """`w`, float32 or float64, over `scale`, which broadcasts, in e4m3; 0 where the scale is."""
    wide = scale.to(w.dtype)
    unit = torch.where(wide == 0, 0.0, w / wide)
    # beyond 448 by what the scale was rounded: e4m3 has no infinity to say so
    return unit.clamp(-LARGEST, LARGEST).to(E4M3)


def dequantize_fp8(q: Tensor, scale: Tensor, dtype: torch.dtype, group: int = ROW) -> Tensor:
    """Numbers [..., K] in `dtype`: those of `quantize_fp8` times their scales, rounded once."""
    work = torch.float64 if dtype == torch.float64 else torch.float32
    return (q.to(work) * of_columns(scale.to(work), group, q.shape[-1])).to(dtype)


def aligned(q: Tensor) -> Tensor:
    """Float8 [..., K] whose rows start at multiples of `LINE` bytes: itself if they do."""
    width = q.shape[-1]
    if width % LINE == 0:
        return q
    room = q.new_zeros(*q.shape[:-1], -(-width // LINE) * LINE)
    room[..., :width] = q
    return room[..., :width]


def is_number(tensor: Tensor) -> bool:
    """Whether `tensor` holds floating-point numbers that mean something by themselves: those of float8
    are nothing without their scales, and few of torch's functions take them."""
    return tensor.is_floating_point() and tensor.element_size() > 1


class Rows(NamedTuple):
    """Activations in float8 and what products need of them.

    q: float8 [n, K]. numbers: float32 [3, `room_for(n)`], one allocation for what follows.
    """

    q: Tensor
    numbers: Tensor

    @property
    def scale(self) -> Tensor:
        """Float32 [n]."""
        return self.numbers[0, : self.q.shape[0]]

    @property
    def unit_norm(self) -> Tensor:
        """Float32 [n], ``scale / norm``, zero of a row of zeros."""
        return self.numbers[1, : self.q.shape[0]]

    @property
    def norm(self) -> Tensor:
        """Float32 [n], a bound of the Euclidean norm of a row of ``scale · q``."""
        return self.numbers[2, : self.q.shape[0]]


def room_for(n: int) -> int:
    """Numbers in a row of `Rows.numbers`, so that each starts at a multiple of 128 bytes."""
    return -(-n // 32) * 32


def quantize_rows(
    x: Tensor,
    make: str = "",
    other: Tensor | None = None,
    gain: Tensor | None = None,
    eps: float = 0.0,
    keep: Tensor | None = None,
) -> Rows:
    """Rows of activations in float8, a scale each.

    Args:
        x: [n, K]. make: what is made of it before, of `MAKES`: "" nothing; "rms" its RMS norm times
            `gain` [K]; "layer" its norm times `gain` plus `other` [K]; "swiglu" silu(x) ⊙ `other`;
            "geglu" the same with tanh's GELU; "gelu" or "gelu_tanh".
        keep: [n, K] that gets what is made, or None.
    """
    made = MAKES[make](x, other, gain, eps)
    if keep is not None:
        keep.copy_(made)
    v = made.float()
    scale = v.abs().amax(-1) / LARGEST
    unit = torch.where(scale[:, None] > 0, v / scale[:, None], 0.0)
    length = SLACK * unit.square().sum(-1).sqrt()
    numbers = torch.stack([scale, torch.where(length > 0, 1 / length, 0.0), scale * length])
    room = numbers.new_empty(3, room_for(len(x)))
    room[:, : len(x)] = numbers
    return Rows(unit.to(E4M3), room)


def _rms(x: Tensor, other: Tensor | None, gain: Tensor | None, eps: float) -> Tensor:
    assert gain is not None
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return gain * normed.to(x.dtype)


def _layer(x: Tensor, other: Tensor | None, gain: Tensor | None, eps: float) -> Tensor:
    assert gain is not None and other is not None
    return layer_norm(x, x.shape[-1:], gain, other, eps)


MAKES: dict[str, Callable[..., Tensor]] = {
    "": lambda x, other, gain, eps: x,
    "rms": _rms,
    "layer": _layer,
    "swiglu": lambda x, other, gain, eps: silu(x) * other,
    "geglu": lambda x, other, gain, eps: gelu(x, approximate="tanh") * other,
    "gelu": lambda x, other, gain, eps: gelu(x),
    "gelu_tanh": lambda x, other, gain, eps: gelu(x, approximate="tanh"),
}


def product(
    a: Tensor, b: Tensor, by_row: Tensor, by_col: Tensor, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """``by_row · by_col · a bᵀ + bias``, [B, M, N] in `dtype`, float8 being rounded to within ±448.

    Args:
        a: float8 [B, M, K], b: float8 [B, N, K]. by_row: [M]. by_col, bias: [B, N].
    """
    y = a.float() @ b.float().mT * by_row[:, None].float() * by_col[:, None].float()
    y = y if bias is None else y + bias[:, None].float()
    return y.clamp(-LARGEST, LARGEST).to(dtype) if dtype == E4M3 else y.to(dtype)


class Scales(NamedTuple):
    """Float32, by which columns of both products are scaled: `first` [B, r], None of a dense weight, and
    `second` [B, q], of that [o]. mix: of BLAST [b, b, r], the couplings over the bound of what they
    make."""

    first: Tensor | None
    second: Tensor
    mix: Tensor | None = None


def padded(t: Tensor, axis: int, size: int) -> Tensor:
    """`t` with zeros up to `size` along `axis`; itself if it is as long."""
    if t.shape[axis] == size:
        return t
    shape = list(t.shape)
    shape[axis] = size
    room = t.new_zeros(shape)
    room.narrow(axis, 0, t.shape[axis]).copy_(t)
    return room


def even(rank: int) -> int:
    """A rank that kernels like: of multiples of 16, 8, 4 and 2 the first within a quarter of it."""
    found = (-(-rank // step) * step for step in (16, 8, 4, 2))
    return next((size for size in found if 4 * size <= 5 * rank), rank)


class Factors(NamedTuple):
    """U: float8 [B, q, r], V: float8 [B, r, p], and their scales [B, q, 1] and [B, r, 1]; S: [B, B, r]
    of BLAST."""

    U: Tensor
    V: Tensor
    U_scale: Tensor
    V_scale: Tensor
    S: Tensor | None = None


def even_ranks(structure: str, f: Factors) -> Factors:
    """The same with ranks of zeros, so that rows of z are stored in wide pieces."""
    blocks, rank = f.V.shape[0], f.V.shape[1]
    if structure != "monarch":
        to = even(rank)
        U, V, by = padded(f.U, 2, to), padded(f.V, 1, to), padded(f.V_scale, 1, to)
        return f._replace(U=U, V=V, V_scale=by, S=None if f.S is None else padded(f.S, 2, to))
    to = even(rank // blocks)  # of each of the blocks that a row of z goes to
    U = padded(f.U.unflatten(2, (blocks, -1)), 3, to).flatten(2)
    V, by = (padded(t.unflatten(1, (blocks, -1)), 2, to).flatten(1, 2) for t in (f.V, f.V_scale))
    return f._replace(U=U, V=V, V_scale=by)


def scales_of(U_scale: Tensor, V: Tensor, V_scale: Tensor, S: Tensor | None = None) -> Scales:
    """What a layer's products are scaled by, from what is stored: made once.

    Args:
        U_scale: [B, q, 1]. V: float8 [B, r, p], V_scale [B, r, 1]. S: of BLAST [k, l, r].
    """
    by_v, by_u = V_scale.float().squeeze(-1), U_scale.float().squeeze(-1)
    long = V.float().square().sum(-1).sqrt() * by_v  # of the rows of V
    if S is not None:  # |Σ_l s_kl z_l| <= ‖x‖ √(Σ_l (s_kl ‖v_l‖)²), as Σ_l ‖x_l‖² = ‖x‖²
        long = (S.float() * long).square().sum(1).sqrt()
    bound = (long.max() / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    if S is None:
        return Scales((by_v / bound).contiguous(), (by_u * bound).contiguous())
    return Scales(by_v.contiguous(), (by_u * bound).contiguous(), (S.float() / bound).contiguous())


def layer(
    structure: str,
    x: Rows,
    weights: Sequence[Tensor],
    scales: Sequence[Tensor],
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """The output [n, o] of a layer, z between its products in float8 as the kernels have it.

    Args:
        structure: dense, lowrank, monarch or blast. weights: float8 U [B, q, r] and V [B, r, p], or the
            dense weight [o, i]. scales: of `Scales` those that there are, of a dense weight [o].
    """
    n = len(x.q)
    if structure == "dense":
        bias = None if bias is None else bias[None]
        return product(x.q[None], weights[0][None], x.scale, scales[0][None], dtype, bias)[0]
    (U, V), (first, second) = weights, scales[:2]
    blocks, _, p = V.shape
    parts = x.q.view(n, blocks, p).transpose(0, 1)
    z = product(parts, V, x.unit_norm, first, dtype if structure == "blast" else E4M3)
    if structure == "monarch":
        z = z.unflatten(2, (blocks, -1)).permute(2, 1, 0, 3).flatten(2)
    if structure == "blast":
        mixed = torch.einsum("klr,lnr->knr", scales[2].float(), z.float())
        z = mixed.clamp(-LARGEST, LARGEST).to(E4M3)
    bias = None if bias is None else bias.view(len(U), -1)
    return product(z, U, x.norm, second, dtype, bias).transpose(0, 1).flatten(1)
