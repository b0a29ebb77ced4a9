"""The one table of tolerances: relative Frobenius error a correct result may have.

A forward pass or a reconstruction is compared with the same computation in float64. Errors grow
with the square root of the length of the sums (some hundreds here) and with the number of
factors (up to five here), so each entry is the unit roundoff of the dtype times a stated margin.
"""

from __future__ import annotations

import torch

TOLERANCES: dict[torch.dtype, float] = {
    # 2^-53 times 1e4: a few hundred terms, five factors, and decompositions by Gram matrices.
    torch.float64: 1e-12,
    # 2^-24 times 100: sums are accumulated in float32, in any order.
    torch.float32: 6e-6,
    # 2^-11 times 6: operands and every intermediate are rounded once, sums are kept in float32.
    torch.float16: 3e-3,
    # 2^-8 times 6: the same with 8 bits of significand.
    torch.bfloat16: 2.4e-2,
}

# Recovery of a matrix that has the structure, in float64. Singular vectors come from Gram
# matrices: a block of condition κ is recovered to about κ·2^-53, and random blocks reach κ = 1e4.
RECOVERY = 1e-10

# Slack of an inequality between two computed errors, relative: rounding in float64 sums.
SLACK = 1e-9

# Relative errors in the norm of H below this are rounding: tr(E H Eᵀ) of an E that H annihilates
# comes out as about 2^-53·‖E‖²‖H‖, and the error is its root.
WEIGHTED_FLOOR = 1e-7

# KL in nats a token of another engine to ours, of the same weights in float32: sums in another order.
ENGINE_EXACT = 1e-4

# The same of tiny-llama in 4 bits, whose inputs llama.cpp rounds to 8 bits: some 1e-3.
ENGINE_ROUNDED = 2e-3

# llama.cpp rounds the inputs of layers to 8 bits. Its KL is at most so many times what that rounding
# costs our own layers. The two round apart where sums differ in the last bit, and a model broken by few
# bits amplifies this: factors of .7 to 1.3 were seen on SmolLM2, at KL of .003 to .10.
ENGINE_AS_ROUNDED = 2.0
