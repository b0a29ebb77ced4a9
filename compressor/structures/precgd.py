"""Fits BLAST by the published preconditioned gradient descent.

W is scaled to unit deviation; U, S and V move in turn along the gradients of ‖E‖² (E the residual),
each multiplied by ``(GᵀG + δ‖E‖I)⁻¹`` with G what the factor is multiplied with; the step falls
linearly from 1 to 0. Source: BLAST (Lee et al., arXiv 2410.21262, algorithm 2).
"""

import torch
from torch import Tensor

from blr.compressor.structures.linalg import add_ridge, in_blocks, mixed_gram, solve_spd
from blr.compressor.structures.specs import BlastSpec

STEPS = 300
DELTA = 0.1  # damping relative to the norm of the residual
GRADIENT = 2.0  # of the unhalved loss ‖E‖²: 2 E times what the factor is multiplied with
START = 1e-3  # size of U and V at the start, times 1/√r

Factors = tuple[Tensor, Tensor, Tensor]  # U [b, q, r], S [b, b, r], V [b, p, r]


def precgd(weight: Tensor, spec: BlastSpec, steps: int, seed: int) -> Factors:
    """Factors of `weight` [o, i] after `steps` steps from a start that `seed` determines. Runs in
    float32 as published: the damping keeps every system well conditioned."""
    scale = weight.std().clamp_min(1e-30)
    blocks = in_blocks((weight / scale).float(), spec.blocks)
    U, S, V = _start(blocks, spec, seed)
    for step in range(steps):
        U, S, V = _step(blocks, U, S, V, rate=GRADIENT * (1 - step / steps))
    root = scale.sqrt()
    return U.to(weight) * root, S.to(weight), V.to(weight) * root


def _start(like: Tensor, spec: BlastSpec, seed: int) -> Factors:
    generator = torch.Generator().manual_seed(seed)
    shapes = spec.shapes()
    drawn = {
        name: torch.randn(shapes[name], generator=generator, dtype=torch.float64).to(like)
        for name in ("U", "V", "S")
    }
    small = START / spec.rank**0.5
    return drawn["U"] * small, drawn["S"], drawn["V"] * small


def _step(blocks: Tensor, U: Tensor, S: Tensor, V: Tensor, rate: float) -> Factors:
    """One step on U, then V, then S, each from the newest of the others."""
    U = U - rate * _side_step(blocks, U, S, V)
    V = V - rate * _side_step(blocks.permute(1, 0, 3, 2), V, S.transpose(0, 1), U)
    return U, S - rate * _coupling_step(blocks, U, S, V), V


def _residual(blocks: Tensor, U: Tensor, S: Tensor, V: Tensor) -> Tensor:
    """[k, l, q, p]."""
    return (U[:, None] * S[:, :, None]) @ V.mT[None] - blocks


def _side_step(blocks: Tensor, U: Tensor, S: Tensor, V: Tensor) -> Tensor:
    error = _residual(blocks, U, S, V)
    gradient = ((error @ V[None]) * S[:, :, None]).sum(1)
    return solve_spd(add_ridge(mixed_gram(S, V.mT @ V), DELTA * error.norm()), gradient)


def _coupling_step(blocks: Tensor, U: Tensor, S: Tensor, V: Tensor) -> Tensor:
    """The preconditioned gradient of S [b, b, r], one block row at a time to bound memory."""
    error = _residual(blocks, U, S, V)
    gradient = ((error @ V[None]) * U[:, None]).sum(2)
    left, right, damping = U.mT @ U, V.mT @ V, DELTA * error.norm()
    systems = zip(left, gradient, strict=True)
    rows = [solve_spd(add_ridge(own * right, damping), slope[:, None]) for own, slope in systems]
    return torch.stack(rows).squeeze(2)
