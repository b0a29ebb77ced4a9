"""Monarch linear layer in plain torch: a block-diagonal product, a transpose, another one."""

from torch import Tensor


def monarch_linear(x: Tensor, U: Tensor, V: Tensor, bias: Tensor | None = None) -> Tensor:
    """``y_k = Σ_l U_kl (V_klᵀ x_l)`` over b×b blocks of rank r' = r/b.

    Source: "Memory-Efficient Acceleration of Block Low-Rank Foundation Models", section 2.

    Args:
        x: [..., i] with i = b·p, any float dtype, contiguous or not.
        U: [b, q, r], the middle index runs over (input block l, s in r').
        V: [b, p, r], the middle index runs over (output block k, s in r').
        bias: [b·q] or None. Some of the output or input blocks alone will do, in U and V alike.

    Returns:
        [..., b·q] in the dtype of `x`.
    """
    inputs, outputs = V.shape[0], U.shape[0]
    batch = x.shape[:-1]
    x = x.reshape(-1, inputs, x.shape[-1] // inputs).transpose(0, 1)  # [l, n, p]
    z = (x @ V).unflatten(-1, (outputs, V.shape[2] // outputs))  # [l, n, k, r']
    z = z.permute(2, 1, 0, 3).flatten(2)  # [k, n, l·r']
    y = (z @ U.transpose(1, 2)).transpose(0, 1).reshape(*batch, outputs * U.shape[1])
    return y if bias is None else y + bias
