"""Gradients of the product of an MLP's gate, one kernel that reads what it needs once: activation and
slope are computed again."""

import triton
import triton.language as tl

from blr.kernels.fp8.triton import tanh


@triton.jit
def gated_back_kernel(
    gate, up, g, gate_out, up_out, size, MAKE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Gradients of gate and up [size] from g [size], that of ``activation(gate) ⊙ up``."""
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < size
    v = tl.load(gate + lane, mask=inside, other=0.0).to(tl.float32)
    beside = tl.load(up + lane, mask=inside, other=0.0).to(tl.float32)
    given = tl.load(g + lane, mask=inside, other=0.0).to(tl.float32)
    if MAKE == "swiglu":
        part = tl.sigmoid(v)
        slope = part * (1.0 + v * (1.0 - part))
    else:
        tl.static_assert(MAKE == "geglu")
        turned = tanh(0.7978845608028654 * (v + 0.044715 * v * v * v))
        part = 0.5 * (1.0 + turned)
        inner = 0.7978845608028654 * (1.0 + 0.134145 * v * v)
        slope = part + 0.5 * v * (1.0 - turned * turned) * inner
    tl.store(gate_out + lane, (given * beside * slope).to(gate_out.dtype.element_ty), mask=inside)
    tl.store(up_out + lane, (given * v * part).to(up_out.dtype.element_ty), mask=inside)
