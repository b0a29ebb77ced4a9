"""BLAST factorization ``W_kl = U_k diag(S_kl) V_lᵀ``: two solvers.

`als` starts from the optimal low rank (S = 1), so it can only improve on it, then solves for U,
V and S in turn, each exactly. `precgd` is the published preconditioned gradient descent.
Source: "Memory-Efficient Acceleration of Block Low-Rank Foundation Models", section 2, and
BLAST (Lee et al., arXiv 2410.21262, algorithm 2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from blr.compressor.structures import lowrank
from blr.compressor.structures.base import Fit, FitOptions
from blr.compressor.structures.linalg import solve_spd
from blr.compressor.structures.specs import BlastSpec, LowRankSpec

SOLVERS = ("als", "precgd")
DEFAULT_ROUNDS = {"als": 30, "precgd": 300}
DELTA = 0.1  # regularization of the preconditioners, relative to the error norm
CHUNK_ELEMENTS = 1 << 26  # of the S systems solved at once: 0.5 GB in float64

Factors = dict[str, Tensor]


def fit(
    weight: Tensor,
    spec: BlastSpec,
    gram: Tensor | None = None,
    options: FitOptions = FitOptions(),
) -> Fit:
    """U [b, q, r], S [b, b, r], V [b, p, r] for `weight` [o, i].

    `options.solver` is `als` (default) or `precgd`.
    """
    solver = options.solver or "als"
    rounds = DEFAULT_ROUNDS[solver] if options.rounds is None else options.rounds
    if solver == "precgd":
        return Fit(_precgd(weight, spec, rounds, options.seed))
    return Fit(_als(weight, spec, rounds))


def reconstruct(tensors: Factors, spec: BlastSpec) -> Tensor:
    """The dense weight [o, i]."""
    return _rows(tensors, spec).flatten(0, 1)


def _rows(f: Factors, spec: BlastSpec) -> Tensor:
    """[k, q, i]: block rows ``U_k Z_k``."""
    return f["U"] @ _mixed_right(f).mT


def _mixed_right(f: Factors) -> Tensor:
    """Z_kᵀ [k, i, r]: the rows of V_l scaled by S_kl."""
    return (f["V"][None] * f["S"][:, :, None]).flatten(1, 2)


def _mixed_left(f: Factors) -> Tensor:
    """Y_l [l, o, r]: the rows of U_k scaled by S_kl."""
    return (f["U"][None] * f["S"].transpose(0, 1)[:, :, None]).flatten(1, 2)


def _als(weight: Tensor, spec: BlastSpec, rounds: int) -> Factors:
    factors = _from_lowrank(weight, spec)
    best, best_error = factors, _error(weight, factors, spec)
    for _ in range(rounds):
        factors = _round(weight, factors, spec)
        error = _error(weight, factors, spec)
        if error < best_error:
            best, best_error = factors, error
    return best


def _error(weight: Tensor, f: Factors, spec: BlastSpec) -> float:
    return float((weight - reconstruct(f, spec)).norm())


def _from_lowrank(weight: Tensor, spec: BlastSpec) -> Factors:
    """The optimal low rank as BLAST with S = 1."""
    low = lowrank.fit(weight, LowRankSpec(spec.in_features, spec.out_features, spec.rank))
    b = spec.blocks
    return {
        "U": low.tensors["U"].unflatten(0, (b, -1)),
        "S": weight.new_ones(b, b, spec.rank),
        "V": low.tensors["V"].unflatten(0, (b, -1)),
    }


def _round(weight: Tensor, f: Factors, spec: BlastSpec) -> Factors:
    b = spec.blocks
    f = {**f, "U": _side(weight.unflatten(0, (b, -1)), f["S"], f["V"])}
    f = {**f, "V": _side(weight.mT.unflatten(0, (b, -1)), f["S"].transpose(0, 1), f["U"])}
    return _rescale({**f, "S": _couplings(weight, f, spec)})


def _side(rows: Tensor, mix: Tensor, other: Tensor) -> Tensor:
    """The exact factor of one side, the other fixed: [b, m, r] from block rows [b, m, n]."""
    gram = torch.einsum("klr,kls,lrs->krs", mix, mix, other.mT @ other)
    scaled = (other[None] * mix[:, :, None]).flatten(1, 2)  # [k, n, r]
    return solve_spd(gram, rows @ scaled)


def _couplings(weight: Tensor, f: Factors, spec: BlastSpec) -> Tensor:
    """The exact S [b, b, r], each S_kl its own system of size r, a chunk of rows k at a time."""
    b, r = spec.blocks, spec.rank
    blocks = weight.reshape(b, -1, b, spec.in_features // b).permute(0, 2, 1, 3)  # [k, l, q, p]
    left, right = f["U"].mT @ f["U"], f["V"].mT @ f["V"]
    step = max(1, CHUNK_ELEMENTS // (b * r * r))
    solved = []
    for k in range(0, b, step):
        target = ((blocks[k : k + step] @ f["V"]) * f["U"][k : k + step, None]).sum(-2)
        gram = left[k : k + step, None] * right[None]
        solved.append(solve_spd(gram, target[..., None, :]).squeeze(-2))
    return torch.cat(solved)


def _rescale(f: Factors) -> Factors:
    """Give U, V and S comparable scales in every rank; the product is unchanged."""
    u = f["U"].square().mean((0, 1)).sqrt().clamp_min(1e-30)
    v = f["V"].square().mean((0, 1)).sqrt().clamp_min(1e-30)
    scale = (u * v).sqrt()
    return {"U": f["U"] / u * scale, "S": f["S"], "V": f["V"] / v * scale}


def _precgd(weight: Tensor, spec: BlastSpec, steps: int, seed: int) -> Factors:
    scale = weight.std().clamp_min(torch.finfo(weight.dtype).tiny)
    target = weight / scale
    factors = _random_start(weight, spec, seed)
    for step in range(steps):
        factors = _descend(target, factors, spec, rate=1 - step / steps)
    root = scale.sqrt()
    return {"U": factors["U"] * root, "S": factors["S"], "V": factors["V"] * root}


def _random_start(weight: Tensor, spec: BlastSpec, seed: int) -> Factors:
    generator = torch.Generator().manual_seed(seed)

    def normal(name: str) -> Tensor:
        return torch.randn(spec.shapes()[name], generator=generator, dtype=torch.float64)

    small = 1e-3 / spec.rank**0.5
    start = {"U": small * normal("U"), "S": normal("S"), "V": small * normal("V")}
    return {name: tensor.to(weight) for name, tensor in start.items()}


def _descend(target: Tensor, f: Factors, spec: BlastSpec, rate: float) -> Factors:
    """One preconditioned step on U, then V, then S, each from the newest of the others."""
    b = spec.blocks
    f = {**f, "U": f["U"] - rate * _side_step(target, f, spec)}
    flipped = {"U": f["V"], "S": f["S"].transpose(0, 1), "V": f["U"]}
    f = {**f, "V": f["V"] - rate * _side_step(target.mT, flipped, _flip(spec))}
    error = reconstruct(f, spec) - target
    blocks = error.reshape(b, -1, b, spec.in_features // b).permute(0, 2, 1, 3)
    gradient = ((blocks @ f["V"]) * f["U"][:, None]).sum(-2)
    gram = (f["U"].mT @ f["U"])[:, None] * (f["V"].mT @ f["V"])[None]
    step = solve_spd(gram + _damping(error, spec), gradient[..., None, :]).squeeze(-2)
    return {**f, "S": f["S"] - rate * step}


def _side_step(target: Tensor, f: Factors, spec: BlastSpec) -> Tensor:
    error = reconstruct(f, spec) - target
    mixed = _mixed_right(f)  # [k, n, r]
    gradient = error.unflatten(0, (spec.blocks, -1)) @ mixed
    return solve_spd(mixed.mT @ mixed + _damping(error, spec), gradient)


def _flip(spec: BlastSpec) -> BlastSpec:
    return BlastSpec(spec.out_features, spec.in_features, spec.blocks, spec.rank)


def _damping(error: Tensor, spec: BlastSpec) -> Tensor:
    """δ‖E‖ I."""
    return DELTA * error.norm() * torch.eye(spec.rank, dtype=error.dtype, device=error.device)
