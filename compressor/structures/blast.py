"""BLAST factorization ``W_kl = U_k diag(S_kl) V_lᵀ`` in the norm of the calibration statistics.

`varpro` (default) starts from the optimal low rank of the same norm with S = 1, so it is never
worse than low rank at equal rank. U is always the exact minimizer for (S, V),
``U_k = W_k H Z_kᵀ (Z_k H Z_kᵀ)⁻¹`` with ``Z_k = [diag(S_kl) V_lᵀ]_l``; S and V descend by
preconditioned L-BFGS, every accepted step lowering tr((W−W')H(W−W')ᵀ).

Left alone that ends in large terms that cancel each other, as canonical decompositions do, and rounding
them loses more than the fit has gained. So what rounding is expected to lose is part of the loss: with
relative variance `noise` of a term u_kr s_klr v_lrᵀ, λ Σ_klr ‖u_kr s_klr v_lr‖², which is quadratic in U
and the same however the size of a term is spread over its factors.

`precgd` is the published solver. Structure: "Memory-Efficient Acceleration of Block Low-Rank Foundation
Models", section 2.
"""

from __future__ import annotations

from math import isnan

import torch
from torch import Tensor

from blr.compressor.errors import NumericsError
from blr.compressor.parallel.processes import Processes
from blr.compressor.parallel.sums import OrderedSum, rounds
from blr.compressor.structures import lowrank
from blr.compressor.structures.base import Fit, FitOptions
from blr.compressor.structures.descent import Apply, descend
from blr.compressor.structures.linalg import definite, inverse_spd, mixed_gram, solve_spd
from blr.compressor.structures.precgd import STEPS, Factors, precgd
from blr.compressor.structures.specs import BlastSpec, LowRankSpec

ROUNDS = 100
CHUNK_BYTES = 1 << 31  # for the products Z_k H of the block rows treated at once
SPREAD_BYTES = 1 << 33  # for the products V_lᵀ H_l of which all block rows are made
SHARES, LARGE = 8, 1 << 38  # parts of the rows, of a layer whose 2 b i² r is so much
SMALLEST = 1e-6  # relative floor of the diagonal preconditioner of S
SHRINKING = 1e-3  # noise from which U is that of the noisy loss to the end: below, a weight that has the
# structure is met exactly
PAD = 1e-3  # value of V in ranks beyond min(o, i), which the low-rank start cannot fill


def fit(
    weight: Tensor,
    spec: BlastSpec,
    gram: Tensor | None = None,
    options: FitOptions = FitOptions(),
) -> Fit:
    """U [b, q, r], S [b, b, r], V [b, p, r] for `weight` [o, i] in the norm of `gram` [i, i].

    `options.solver` is "varpro" (default) or "precgd", which ignores `gram`; `options.rounds`
    counts accepted steps. Tensors keep the dtype of `weight`.
    """
    if options.solver == "precgd":
        steps = STEPS if options.rounds is None else options.rounds
        return _named(precgd(weight, spec, steps, options.seed))
    rounds = ROUNDS if options.rounds is None else options.rounds
    if gram is not None:
        gram = definite(gram)
    problem = BlastProblem(weight, gram, spec, options.processes, options.noise)
    theta, losses = descend(problem, problem.start(), rounds)
    if options.noise < SHRINKING:
        problem.noise = 0.0
    problem.evaluate(theta)
    return _named(_balance(problem.left(), *problem.split(theta)), losses)


def reconstruct(tensors: dict[str, Tensor], spec: BlastSpec) -> Tensor:
    """The dense weight [o, i]."""
    return (tensors["U"] @ right_factor(tensors, spec).mT).flatten(0, 1)


def right_factor(tensors: dict[str, Tensor], spec: BlastSpec) -> Tensor:
    """Z [k, i, r] with ``W_k = U_k Z_kᵀ``."""
    return (tensors["S"][:, :, None] * tensors["V"][None]).flatten(1, 2)


def _named(factors: Factors, losses: list[float] | None = None) -> Fit:
    return Fit(dict(zip("USV", factors, strict=True)), losses=losses or [])


def _balance(U: Tensor, S: Tensor, V: Tensor) -> Factors:
    """Spread the size of each rank evenly over U, S and V; the product is unchanged."""

    def size(factor: Tensor) -> Tensor:
        return factor.square().mean((0, 1)).sqrt().clamp_min(torch.finfo(factor.dtype).tiny ** 0.5)

    u, s, v = size(U), size(S), size(V)
    even = (u * s * v) ** (1 / 3)
    return U / u * even, S / s * even, V / v * even


def rows_at_once(spec: BlastSpec, item_bytes: int, calibrated: bool) -> int:
    """Block rows that are treated together: as many as memory allows, but an eighth of them where that
    is work enough, so that eight processes may share them. The same for any number of processes."""
    width = 3 * spec.in_features * spec.rank * item_bytes
    most = max(1, min(spec.blocks, CHUNK_BYTES // width))
    if not calibrated or 2 * spec.blocks * spec.in_features**2 * spec.rank < LARGE:
        return most
    return min(most, max(1, spec.blocks // SHARES))


def is_shared(spec: BlastSpec, item_bytes: int) -> bool:
    """Whether several processes fit a calibrated layer faster than one."""
    return spec.blocks >= SHARES * rows_at_once(spec, item_bytes, True)


class BlastProblem:
    """tr((W−W')H(W−W')ᵀ) + noise Σ ‖u_kr s_klr v_lr‖² as a function of theta = (S, V), U eliminated.

    With H = None (identity) the normal matrices need only V_lᵀV_l and no product with H. Block rows are
    taken some at a time, by `processes` in turn; what these add up is added in the rows' order.
    """

    def __init__(
        self,
        weight: Tensor,
        gram: Tensor | None,
        spec: BlastSpec,
        processes: Processes | None = None,
        noise: float = 0.0,
    ) -> None:
        self.spec, self.weight, self.gram = spec, weight, gram
        self.processes = processes or Processes(str(weight.device), alone=True)
        b, self.p = spec.blocks, spec.in_features // spec.blocks
        self.rows = weight.unflatten(0, (b, -1))  # [k, q, i]
        self.chunk = rows_at_once(spec, weight.element_size(), gram is not None)
        self.starts = range(0, b, self.chunk)
        self.noise = noise
        if gram is not None:
            at = torch.arange(b, device=weight.device)
            self.gram_blocks = gram.view(b, self.p, b, self.p)[at, :, at].contiguous()
            self.gram_inverse = inverse_spd(self.gram_blocks)
            self.targets = self.rows @ gram  # [k, q, i], what the products U_k Z_kᵀ H are to be

    def start(self) -> Tensor:
        """The optimal low rank with S = 1."""
        spec, most = self.spec, min(self.weight.shape)
        low = LowRankSpec(spec.in_features, spec.out_features, min(spec.rank, most))
        V = lowrank.fit(self.weight, low, self.gram).tensors["V"]
        V = V / V.square().mean(0).sqrt().clamp_min(torch.finfo(V.dtype).tiny ** 0.5)
        V = torch.nn.functional.pad(V, (0, max(spec.rank - most, 0)), value=PAD)
        S = V.new_ones(spec.blocks, spec.blocks, spec.rank)
        return self.join(S, V.unflatten(0, (spec.blocks, -1)))

    def split(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """theta -> S [b, b, r], V [b, p, r]."""
        b, r = self.spec.blocks, self.spec.rank
        return theta[: b * b * r].view(b, b, r), theta[b * b * r :].view(b, self.p, r)

    def join(self, S: Tensor, V: Tensor) -> Tensor:
        """The inverse of `split`."""
        return torch.cat([S.reshape(-1), V.reshape(-1)])

    def evaluate(self, theta: Tensor) -> tuple[float, Tensor]:
        """The loss and half its negative gradient. Raises NumericsError where there is no exact U."""
        processes, number = self.processes, len(self.starts)
        S, V = self.split(processes.spread(theta, 0, theta.shape, theta.dtype))
        shared = self._shared(V)
        self.found: dict[int, Tensor] = {}
        failure = NumericsError("the error of the fit is not finite")
        losses = torch.zeros(number, dtype=torch.float64)
        pulled, gradients = OrderedSum(processes, number, like=V), dict[int, Tensor]()
        for turn in rounds(processes, number):
            n = turn * processes.count + processes.rank
            part = torch.zeros_like(V) if n < number else None
            try:
                if n < number:
                    losses[n], gradients[n], part = self._part(n, S, V, shared)
            except NumericsError as error:  # the others wait for what these rows would add
                losses[n], failure = torch.nan, error
            pulled.add(part)
        loss = float(sum(processes.sum(losses).tolist()))
        if isnan(loss):
            raise failure
        return loss, self.join(torch.cat(self._all(gradients, S.shape[1:])), pulled.total())

    def left(self) -> Tensor:
        """The exact U [b, q, r] at the point evaluated last."""
        return torch.cat(self._all(self.found, (self.rows.shape[1], self.spec.rank)))

    def _shared(self, V: Tensor) -> Tensor | None:
        """What the products of all block rows are made of: V_lᵀV_l [l, r, r], or V_lᵀH_l [l, r, i] with
        the rows H_l of the Gram matrix, b times fewer operations than H Z_k for every k. None where
        that takes too much memory."""
        if self.gram is None:
            return V.mT @ V
        size = self.spec.blocks * self.spec.in_features * self.spec.rank * V.element_size()
        return V.mT @ self.gram.unflatten(0, (-1, self.p)) if size <= SPREAD_BYTES else None

    def _weighted(self, Z: Tensor, S: Tensor, shared: Tensor | None) -> Tensor:
        """H Z_k [k, i, r]."""
        if self.gram is None:
            return Z
        if shared is None:
            return self.gram @ Z
        return (S.permute(2, 0, 1) @ shared.transpose(0, 1)).permute(1, 2, 0)

    def _normal(self, Z: Tensor, weighted: Tensor, S: Tensor, shared: Tensor | None) -> Tensor:
        """Z_kᵀ H Z_k [k, r, r]."""
        if self.gram is None and shared is not None:
            return mixed_gram(S, shared)
        return Z.mT @ weighted

    def _part(self, n: int, S: Tensor, V: Tensor, shared: Tensor | None) -> tuple[float, Tensor, Tensor]:
        """What some rows add to the loss, their gradient of S, and what they add to that of V."""
        at = slice(self.starts[n], self.starts[n] + self.chunk)
        self.found[n], loss, pull = self._rows(at, S[at], V, shared)
        return loss, (V[None] * pull).sum(2), (S[at, :, None] * pull).sum(0)

    def _all(self, mine: dict[int, Tensor], shape: tuple[int, ...] | torch.Size) -> list[Tensor]:
        """What all processes have of the rows, in their order, each row of `shape`."""
        heights = [len(self.rows[k : k + self.chunk]) for k in self.starts]
        return [
            self.processes.spread(
                mine.get(n), self.processes.owner(n), (height, *shape), self.weight.dtype
            )
            for n, height in enumerate(heights)
        ]

    def _rows(
        self, at: slice, S: Tensor, V: Tensor, shared: Tensor | None
    ) -> tuple[Tensor, float, Tensor]:
        """Exact U, loss and pull ``H E_kᵀ U_k`` [k, l, p, r] of the block rows of one chunk. E H is what
        is left of W H, which is made once: with H Z at hand no error is multiplied with H."""
        rows = self.rows[at]
        Z = (S[:, :, None] * V[None]).flatten(1, 2)  # [k, i, r]
        weighted = self._weighted(Z, S, shared)
        normal = self._normal(Z, weighted, S, shared)
        sizes = self.noise * Z.square().sum(1)  # [k, r]
        U = solve_spd(normal + torch.diag_embed(sizes), rows @ weighted)
        error = rows - U @ Z.mT
        pushed = error if self.gram is None else self.targets[at] - U @ weighted.mT
        squares = U.square().sum(1)
        loss = float((error * pushed).sum(dtype=torch.float64) + (squares * sizes).sum())
        pull = pushed.mT @ U - self.noise * Z * squares[:, None]
        return U, loss, pull.unflatten(1, (self.spec.blocks, self.p))

    def preconditioner(self, theta: Tensor) -> Apply:
        """Diagonal Hessian blocks: V_l sees H_ll ⊗ Σ_k S_kl U_kᵀU_k S_kl, and S_kl the diagonal of
        (U_kᵀU_k) ∘ (V_lᵀ H_ll V_l): its full blocks gain 2% a round and take b²r² of memory."""
        S, V = self.split(theta)
        U = self.left()
        left = U.mT @ U
        weighted = V if self.gram is None else self.gram_blocks @ V
        inverse_v = inverse_spd(mixed_gram(S.transpose(0, 1), left))
        scale_s = left.diagonal(dim1=1, dim2=2)[:, None] * (V * weighted).sum(1)[None]
        scale_s = scale_s.clamp_min(SMALLEST * float(scale_s.mean()) + torch.finfo(V.dtype).tiny)

        def apply(gradient: Tensor) -> Tensor:
            gs, gv = self.split(gradient)
            gv = gv if self.gram is None else self.gram_inverse @ gv
            return self.join(gs / scale_s, gv @ inverse_v)

        return apply


def from_low_rank(left: Tensor, right: Tensor, spec: BlastSpec) -> dict[str, Tensor]:
    """The factors of ``left rightᵀ`` [o, r] and [i, r] in blocks, all couplings 1."""
    U, V = (factor.unflatten(0, (spec.blocks, -1)) for factor in (left, right))
    return {"U": U, "S": left.new_ones(spec.blocks, spec.blocks, spec.rank), "V": V}
