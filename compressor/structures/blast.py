"""Fits BLAST, ``W_kl = U_k diag(S_kl) V_lᵀ``, in the norm of the calibration statistics.

Structure: "Memory-Efficient Acceleration of Block Low-Rank Foundation Models", section 2.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import repeat
from math import isnan, nan
from typing import NamedTuple

import torch
from torch import Tensor

from blr.compressor.base.device import tensor_cores
from blr.compressor.base.errors import NumericsError
from blr.compressor.base.processes import OrderedSum, Processes, rounds
from blr.compressor.structures import lowrank
from blr.compressor.structures.base import SPREAD_BYTES, FitOptions
from blr.compressor.structures.descent import Apply, descend
from blr.compressor.structures.linalg import definite, inverse_spd, mixed_gram, solve_spd, solve_tiled
from blr.compressor.structures.precgd import STEPS, Factors, precgd
from blr.compressor.structures.specs import BlastSpec, LowRankSpec
from blr.kernels.common.available import kernels_on
from blr.kernels.common.capturing import Captured
from blr.kernels.layers.blast.launch import mix
from blr.kernels.training.cholesky import is_tiled

ROUNDS = 100
CHUNK_BYTES = 1 << 31  # for the products Z_k H of the block rows treated at once
SHARES, LARGE = 8, 1 << 38  # parts of the rows, of a layer whose 2 b i² r is so much
MIXED = (1, 2, 4, 8, 16)  # blocks that our kernel mixes
SMALLEST = 1e-6  # relative floor of the diagonal preconditioner of S
SHRINKING = 1e-3  # noise from which U is that of the noisy loss to the end: below, a weight that has the
# structure is met exactly
PAD = 1e-3  # value of V in ranks beyond min(o, i), which the low-rank start cannot fill


def fit(
    weight: Tensor, spec: BlastSpec, gram: Tensor | None = None, options: FitOptions = FitOptions()
) -> dict[str, Tensor]:
    """U [b, q, r], S [b, b, r], V [b, p, r] for `weight` [o, i] in the norm of `gram` [i, i], in the
    dtype of `weight`. `options.solver` is "varpro" (default) or "precgd", the published one, which
    ignores `gram`; `options.rounds` counts accepted steps.

    `varpro` starts from the optimal low rank of the same norm with S = 1, so it is never worse at equal
    rank. U is always the exact minimizer for (S, V), ``U_k = W_k H Z_kᵀ (Z_k H Z_kᵀ)⁻¹`` with ``Z_k =
    [diag(S_kl) V_lᵀ]_l``; S and V descend by preconditioned L-BFGS.
    """
    if options.solver == "precgd":
        steps = STEPS if options.rounds is None else options.rounds
        return dict(zip("USV", precgd(weight, spec, steps, options.seed), strict=True))
    rounds = ROUNDS if options.rounds is None else options.rounds
    if gram is not None:
        gram = definite(gram)
    problem = BlastProblem(weight, gram, spec, options.processes, options.noise)
    theta, _ = descend(problem, problem.start(), rounds)
    U = problem.settle(theta, options.noise if options.noise >= SHRINKING else 0.0)
    return dict(zip("USV", _balance(U, *problem.split(theta)), strict=True))


def reconstruct(tensors: dict[str, Tensor], spec: BlastSpec) -> Tensor:
    """The dense weight [o, i]."""
    return (tensors["U"] @ right_factor(tensors, spec).mT).flatten(0, 1)


def right_factor(tensors: dict[str, Tensor], spec: BlastSpec) -> Tensor:
    """Z [k, i, r] with ``W_k = U_k Z_kᵀ``."""
    return (tensors["S"][:, :, None] * tensors["V"][None]).flatten(1, 2)


def _balance(U: Tensor, S: Tensor, V: Tensor) -> Factors:
    """Spread the size of each rank evenly over U, S and V. The product stays."""

    def size(factor: Tensor) -> Tensor:
        return factor.square().mean((0, 1)).sqrt().clamp_min(torch.finfo(factor.dtype).tiny ** 0.5)

    u, s, v = size(U), size(S), size(V)
    even = (u * s * v) ** (1 / 3)
    return U / u * even, S / s * even, V / v * even


def rows_at_once(spec: BlastSpec, item_bytes: int, calibrated: bool) -> int:
    """How many block rows are treated together: as many as memory allows, but an eighth of all where
    that is work enough, so that eight processes may share them. It does not depend on their number."""
    width = 3 * spec.in_features * spec.rank * item_bytes
    most = max(1, min(spec.blocks, CHUNK_BYTES // width))
    if not calibrated or 2 * spec.blocks * spec.in_features**2 * spec.rank < LARGE:
        return most
    return min(most, max(1, spec.blocks // SHARES))


Solve = Callable[[Tensor, Tensor], Tensor]
Part = tuple[Tensor, Tensor, Tensor]  # of block rows: their loss, its gradient of S, and of V


class Products(NamedTuple):
    """What U of some block rows follows from. Z, weighted: Z_k and Z_k H [k, r, i]. normal: Z_k H Z_kᵀ
    [k, r, r]. right: W_k H Z_kᵀ [k, q, r]. sizes: what noise adds to the diagonals [k, r] of
    `normal`."""

    Z: Tensor
    weighted: Tensor
    normal: Tensor
    right: Tensor
    sizes: Tensor


class BlastProblem:
    """tr((W−W')H(W−W')ᵀ) + noise Σ ‖u_kr s_klr v_lr‖² as a function of theta = (S, V), U eliminated.

    The first term alone ends in large terms that cancel each other, and rounding them loses more than
    the fit has gained: the second is what rounding is expected to lose. With H = None (identity) the
    normal matrices need only V_lᵀV_l. Block rows are taken some at a time, by `processes` in turn; what
    these add up is added in the rows' order.
    """

    def __init__(
        self, weight: Tensor, gram: Tensor | None, spec: BlastSpec, processes: Processes | None = None,
        noise: float = 0.0,
    ) -> None:  # fmt: skip
        self.spec, self.weight, self.gram = spec, weight, gram
        self.processes = processes or Processes(str(weight.device), alone=True)
        b, self.p = spec.blocks, spec.in_features // spec.blocks
        self.rows = weight.unflatten(0, (b, -1))  # [k, q, i]
        self.chunk = rows_at_once(spec, weight.element_size(), gram is not None)
        self.starts = range(0, b, self.chunk)
        self.noise = noise
        self.found: dict[int, Tensor] = {}
        self.kept = self.found  # what a replay writes it to
        self.replayed: Captured | None = None
        self.captures = self.processes.count == 1 and weight.is_cuda and is_tiled(self.rows)
        if gram is not None:
            at = torch.arange(b, device=weight.device)
            self.gram_blocks = gram.view(b, self.p, b, self.p)[at, :, at].contiguous()
            self.gram_inverse = inverse_spd(self.gram_blocks)
        # [k, q, i], what the products U_k Z_kᵀ H are to be
        self.targets = self.rows if gram is None else self.rows @ gram

    def start(self) -> Tensor:
        """The optimal low rank with S = 1."""
        spec, most = self.spec, min(self.weight.shape)
        low = LowRankSpec(spec.in_features, spec.out_features, min(spec.rank, most))
        V = lowrank.fit(self.weight, low, self.gram)["V"]
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
        if self.replayed is not None:
            loss, gradient = self.replayed(theta)
            if not isnan(value := float(loss)):
                self.found = self.kept
                return value, gradient.clone()
        found = self._evaluated(theta)
        if self.captures:
            self._capture(theta)
        return found

    def settle(self, theta: Tensor, noise: float) -> Tensor:
        """The exact U [b, q, r] at `theta` for another `noise`."""
        self.noise, self.replayed, self.captures = noise, None, False
        self._evaluated(theta)
        return self.left()

    def _capture(self, theta: Tensor) -> None:
        """Capture the evaluation as a CUDA graph for the next ones. A graph cannot raise: its loss is
        NaN where there is no exact U."""
        found, self.captures = self.found, False
        with suppress(RuntimeError):
            self.replayed = Captured(self._at_once, theta)
        self.kept, self.found = self.found, found

    def _at_once(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Evaluate without checking whether systems could be solved."""
        S, V = self.split(theta)
        self.found = {}
        parts = list(self._parts(list(range(len(self.starts))), S, V, solve_tiled))
        loss, _, pulled = parts[0]
        for more, _, pull in parts[1:]:  # in the order in which several processes' are added
            loss, pulled = loss + more, pulled + pull
        return loss, self.join(torch.cat([for_s for _, for_s, _ in parts]), pulled)

    def _evaluated(self, theta: Tensor) -> tuple[float, Tensor]:
        processes, number = self.processes, len(self.starts)
        S, V = self.split(processes.spread(theta, 0, theta.shape, theta.dtype))
        self.found = {}
        self.failure = NumericsError("the error of the fit is not finite; --exclude the layer")
        losses, gradients = dict[int, Tensor](), dict[int, Tensor]()
        pulled = OrderedSum(processes, number, like=V)
        parts = self._tried([n for n in range(number) if processes.owns(n)], S, V)
        for turn in rounds(processes, number):
            n, part = turn * processes.count + processes.rank, None
            if n < number:
                losses[n], gradients[n], part = next(parts)
            pulled.add(part)
        found = torch.zeros(number, dtype=torch.float64)
        for n, value in losses.items():  # only now: asking for one waits for the GPU
            found[n] = value
        loss = float(sum(processes.sum(found).tolist()))
        if isnan(loss):
            raise self.failure
        return loss, self.join(torch.cat(self._all(gradients, S.shape[1:])), pulled.total())

    def _tried(self, mine: list[int], S: Tensor, V: Tensor) -> Iterator[Part]:
        """As `_parts`. From where rows have no exact U they are NaN, since other processes wait for
        them."""
        try:
            yield from self._parts(mine, S, V)
        except NumericsError as error:
            self.failure = error
        yield from repeat((V.new_tensor(nan), V[:0], torch.zeros_like(V)))

    def left(self) -> Tensor:
        """The exact U [b, q, r] at the point evaluated last."""
        return torch.cat(self._all(self.found, (self.rows.shape[1], self.spec.rank)))

    def _parts(self, mine: list[int], S: Tensor, V: Tensor, solve: Solve = solve_spd) -> Iterator[Part]:
        """For each of `mine`, chunks of rows: its part of the loss, its gradient of S, and its part of
        that of V. Ends where rows have no exact U. Several chunks' systems are solved at once: one
        leaves a GPU idle."""
        shared, wave = self._shared(V), self._wave(V.element_size())
        for first in range(0, len(mine), wave):
            numbers = mine[first : first + wave]
            chunks = [self._products(self._at(n), S, V, shared) for n in numbers]
            normal = torch.cat([chunk.normal + torch.diag_embed(chunk.sizes) for chunk in chunks])
            solved = solve(normal, torch.cat([chunk.right for chunk in chunks]))
            heights = [len(chunk.right) for chunk in chunks]
            for n, chunk, U in zip(numbers, chunks, solved.split(heights), strict=True):
                self.found[n] = U
                yield self._pulls(self._at(n), chunk, U, S[self._at(n)], V)
            del chunks, chunk  # before the next ones are made

    def _at(self, n: int) -> slice:
        return slice(self.starts[n], self.starts[n] + self.chunk)

    def _wave(self, item_bytes: int) -> int:
        """How many chunks' products are held at once."""
        if self.weight.device.type == "cpu":
            return 1
        size = 2 * self.chunk * self.spec.in_features * self.spec.rank * item_bytes
        return max(1, SPREAD_BYTES // size)

    def _shared(self, V: Tensor) -> Tensor | None:
        """The products that all block rows share: V_lᵀV_l [l, r, r], or V_lᵀH_l [l, r, i] with the rows
        H_l of the Gram matrix, b times fewer operations than H Z_k for every k. None where that takes
        too much memory."""
        if self.gram is None:
            return V.mT @ V
        size = self.spec.blocks * self.spec.in_features * self.spec.rank * V.element_size()
        return V.mT @ self.gram.unflatten(0, (-1, self.p)) if size <= SPREAD_BYTES else None

    def _products(self, at: slice, S: Tensor, V: Tensor, shared: Tensor | None) -> Products:
        Z = (S[at].mT[..., None] * V.permute(2, 0, 1)).flatten(2)  # [k, r, i]
        weighted = self._weighted(Z, S[at], shared)
        if self.gram is None and shared is not None:
            normal = mixed_gram(S[at], shared)
        else:
            normal = weighted @ Z.mT
        sizes = self.noise * Z.square().sum(2)
        return Products(Z, weighted, normal, self.rows[at] @ weighted.mT, sizes)

    def _weighted(self, Z: Tensor, S: Tensor, shared: Tensor | None) -> Tensor:
        """Z_k H [k, r, i]."""
        if self.gram is None:
            return Z
        if shared is None:
            return Z @ self.gram
        if kernels_on(shared.device) and len(shared) in MIXED and shared.dtype == torch.float32:
            return mix(shared, S, on_cuda=True)
        return (S.permute(2, 0, 1) @ shared.transpose(0, 1)).transpose(0, 1)

    def _pulls(self, at: slice, made: Products, U: Tensor, S: Tensor, V: Tensor) -> Part:
        """The loss of some rows, their gradient of S, and their part of that of V, by the pull ``H E_kᵀ
        U_k`` [k, l, p, r]. E H is computed as a difference from W H, since H Z is at hand. The error
        itself and the pull bear tensor cores' rounding."""
        pushed = self.targets[at] - U @ made.weighted
        with tensor_cores(V.device):
            error = pushed if self.gram is None else self.rows[at] - U @ made.Z
            pull = (pushed.mT @ U).unflatten(1, (self.spec.blocks, self.p))
        squares = U.square().sum(1)  # [k, r]
        loss = (error * pushed).sum(dtype=torch.float64) + (squares * made.sizes).sum()
        held = self.noise * squares[:, None]  # what noise takes from the pull is held Z
        for_s = (V * pull).sum(2) - held * S * V.square().sum(1)
        for_v = (S[:, :, None] * pull).sum(0) - V * (held * S.square()).sum(0)[:, None]
        return loss, for_s, for_v

    def _all(self, mine: dict[int, Tensor], shape: tuple[int, ...] | torch.Size) -> list[Tensor]:
        """Collect tensors of all chunks from the processes that own them, in order. shape: of one
        row."""
        spread, owner = self.processes.spread, self.processes.owner
        shapes = [(len(self.rows[k : k + self.chunk]), *shape) for k in self.starts]
        dtype = self.weight.dtype
        return [spread(mine.get(n), owner(n), whole, dtype) for n, whole in enumerate(shapes)]

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
    """Write the low rank ``left rightᵀ`` of [o, r] and [i, r] as BLAST with all couplings 1."""
    U, V = (factor.unflatten(0, (spec.blocks, -1)) for factor in (left, right))
    return {"U": U, "S": left.new_ones(spec.blocks, spec.blocks, spec.rank), "V": V}
