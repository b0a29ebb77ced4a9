"""Fits Monarch (Dao et al., arXiv 2204.00595): every block has its own low rank."""

import torch
from torch import Tensor

from blr.compressor.structures import linalg
from blr.compressor.structures.base import FitOptions
from blr.compressor.structures.descent import Apply, descend
from blr.compressor.structures.specs import MonarchSpec

ROUNDS = 30


def fit(
    weight: Tensor, spec: MonarchSpec, gram: Tensor | None = None, options: FitOptions = FitOptions()
) -> dict[str, Tensor]:
    """U [b, q, b·r'] and V [b, p, b·r'] for `weight` [o, i] in the norm of `gram` [i, i], in the dtype
    of `weight`. `options.rounds` counts accepted steps of V (with `gram` only).

    Without `gram` each block gets its truncated SVD, which is optimal. With it the start is that SVD in
    the norm of the block's own H_ll; then U is the exact minimizer for V over the full H, ``U_k = W_k H
    Z_kᵀ (Z_k H Z_kᵀ)⁻¹``, and V descends.
    """
    if gram is None:
        left, right = linalg.truncated_svd(linalg.in_blocks(weight, spec.blocks), spec.block_rank)
    else:
        problem = MonarchProblem(weight, linalg.definite(gram), spec)
        rounds = ROUNDS if options.rounds is None else options.rounds
        theta, _ = descend(problem, problem.start(), rounds)
        problem.evaluate(theta)
        left, right = scatter(problem.U, spec.blocks), problem.split(theta).transpose(0, 1)
        left, right = linalg.balance(left, right)
    return {"U": gather(left), "V": gather(right.transpose(0, 1))}


def right_factor(tensors: dict[str, Tensor], spec: MonarchSpec) -> Tensor:
    """Z [k, i, b·r'] with ``W_k = U_k Z_kᵀ``: V_lk of all l along the diagonal."""
    blocks = scatter(tensors["V"], spec.blocks).transpose(0, 1)  # [k, l, p, r']
    return torch.stack([torch.block_diag(*row) for row in blocks])


def reconstruct(tensors: dict[str, Tensor], spec: MonarchSpec) -> Tensor:
    """The dense weight [o, i]."""
    left = scatter(tensors["U"], spec.blocks)  # [k, l, q, r']
    right = scatter(tensors["V"], spec.blocks).transpose(0, 1)  # [k, l, p, r']
    return (left @ right.mT).permute(0, 2, 1, 3).reshape(spec.out_features, spec.in_features)


def gather(factors: Tensor) -> Tensor:
    """Bring factors [k, l, m, r'] into the stored order [k, m, l·r'] of the middle index."""
    return factors.transpose(1, 2).flatten(2)


def scatter(factors: Tensor, b: int) -> Tensor:
    """The inverse of `gather`."""
    return factors.unflatten(-1, (b, -1)).transpose(1, 2)


class MonarchProblem:
    """tr((W−W')H(W−W')ᵀ) as a function of theta = V [l, k, p, r'], U eliminated. For each k, Z_k is
    block-diagonal over l, so ``Z_k H Z_kᵀ`` has blocks ``V_lkᵀ H_lm V_mk``."""

    def __init__(self, weight: Tensor, gram: Tensor, spec: MonarchSpec) -> None:
        b, self.spec = spec.blocks, spec
        self.weight, self.gram = weight.unflatten(0, (b, -1)), gram  # [k, q, i], [i, i]
        self.gram4 = gram.view(b, spec.in_features // b, b, -1)  # [l, p, m, p]
        at = torch.arange(b, device=weight.device)
        self.gram_blocks = self.gram4[at, :, at]  # [l, p, p]
        self.gram_inverse = linalg.inverse_spd(self.gram_blocks)

    def start(self) -> Tensor:
        """The start: V of the blocks' SVD in the norm of H_ll."""
        weight, spec = self.weight.flatten(0, 1), self.spec
        blocks = linalg.in_blocks(weight, spec.blocks).transpose(0, 1)  # [l, k, q, p]
        grams = blocks @ self.gram_blocks[:, None] @ blocks.mT
        return (blocks.mT @ linalg.top_eigenvectors(grams, spec.block_rank)).reshape(-1)

    def split(self, theta: Tensor) -> Tensor:
        """theta -> V [l, k, p, r']."""
        b = self.spec.blocks
        return theta.view(b, b, -1, self.spec.block_rank)

    def evaluate(self, theta: Tensor) -> tuple[float, Tensor]:
        """The loss and half its negative gradient; leaves the exact U [k, q, b·r'] in `self.U`."""
        V, spec = self.split(theta), self.spec
        weighted = torch.einsum("ipmn,mknr->kipmr", self.gram4, V)  # H Z_k: [k, l, p, m, r']
        normal = torch.einsum("lkpr,klpms->klrms", V, weighted)
        weighted = weighted.reshape(spec.blocks, spec.in_features, spec.rank)
        normal = normal.reshape(spec.blocks, spec.rank, spec.rank)
        self.U = linalg.solve_spd(normal, self.weight @ weighted)
        left = self.U.unflatten(-1, (spec.blocks, -1))  # [k, q, l, r']
        error = self.weight - torch.einsum("kqlr,lkpr->kqlp", left, V).flatten(2)
        pushed = error @ self.gram
        pull = torch.einsum("kqlp,kqlr->lkpr", pushed.unflatten(-1, (spec.blocks, -1)), left)
        return float((error * pushed).sum(dtype=torch.float64)), pull.reshape(-1)

    def preconditioner(self, theta: Tensor) -> Apply:
        """Diagonal Hessian blocks: V_lk sees H_ll ⊗ U_klᵀ U_kl."""
        left = self.U.unflatten(-1, (self.spec.blocks, -1))
        inverse = linalg.inverse_spd(torch.einsum("kqlr,kqls->lkrs", left, left))

        def apply(gradient: Tensor) -> Tensor:
            return ((self.gram_inverse[:, None] @ self.split(gradient)) @ inverse).reshape(-1)

        return apply
