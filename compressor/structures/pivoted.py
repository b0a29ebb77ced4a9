"""Fits low rank that stores some rows of the weight itself: ``W = P [W_p; C W_p]``, the function of U Vᵀ
in r(i + o − r) numbers.

W_p are r rows of W, C is what the others are made of them. Any r independent rows would do in exact
arithmetic; here those of a strong rank-revealing factorization, for which no entry of C is beyond
`BOUND`, so that rounding W_p (or its outputs) costs the other rows little. The pivots of a triangular
factorization are the start; then a row whose coefficient is too large takes the place of the pivot that
it is one of, until there is none: each exchange multiplies the volume of the pivot rows, which the
columns of an orthonormal basis bound by 1, by more than `BOUND`.
Sources: PIFA (arXiv 2501.19090), section 3; Gu and Eisenstat, "Efficient algorithms for computing a
strong rank-revealing QR factorization" (SIAM J. Sci. Comput. 17, 1996), algorithm 4, whose criterion for
a matrix of exactly this rank is that bound.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blr.compressor.structures import lowrank
from blr.compressor.structures.base import Fit, FitOptions
from blr.compressor.structures.linalg import independent_rows, orthonormal, solve_square
from blr.compressor.structures.specs import PivotedSpec

BOUND = 2.0  # of what pivot rows are multiplied with


def fit(
    weight: Tensor,
    spec: PivotedSpec,
    gram: Tensor | None = None,
    options: FitOptions = FitOptions(),
) -> Fit:
    """The optimal low rank for `weight` [o, i] in the norm of `gram` [i, i], held by pivot rows.
    Tensors as of `from_low_rank`."""
    found = lowrank.fit(weight, spec.low_rank(), gram, options)
    found.tensors = from_low_rank(found.tensors["U"], found.tensors["V"])
    return found


def from_low_rank(left: Tensor, right: Tensor) -> dict[str, Tensor]:
    """Write ``left rightᵀ`` of left [o, r] and right [i, r] by pivot rows: U [o - r, r], V [i, r] and
    places [o] (int32). Computed in float64; U and V get the dtype of `left`."""
    wide = left.double()
    pivots, coefficients = strong_pivots(orthonormal(wide))
    rest = _others(pivots, len(left))
    places = torch.empty(len(left), dtype=torch.int32, device=left.device)
    places[torch.cat((pivots, rest))] = torch.arange(len(left), dtype=torch.int32, device=left.device)
    rows = right.double() @ wide[pivots].mT
    return {"U": coefficients.to(left), "V": rows.to(left), "places": places}


def to_low_rank(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Write pivot rows as a low rank U [o, r], V [i, r]: U has rows of the identity for pivots."""
    U, V = tensors["U"], tensors["V"]
    one = torch.eye(U.shape[-1], dtype=U.dtype, device=U.device)
    return {"U": torch.cat((one, U)).index_select(0, tensors["places"]), "V": V}


def strong_pivots(basis: Tensor, bound: float = BOUND) -> tuple[Tensor, Tensor]:
    """Choose r rows of `basis`, [o, r] float64 with orthonormal columns, of which all others are small
    combinations. Returns the pivots [r] and C [o - r, r] of the other rows, both rising: ``basis[others]
    = C basis[pivots]``, with no entry beyond `bound` (and rounding)."""
    pivots = independent_rows(basis)
    while True:
        pivots = pivots.sort().values
        others = _others(pivots, len(basis))
        coefficients = solve_square(basis[pivots], basis[others])
        exchanged = _exchanged(pivots, others, coefficients, bound)
        if exchanged is None:
            return pivots, coefficients
        pivots = exchanged


def _exchanged(pivots: Tensor, others: Tensor, coefficients: Tensor, bound: float) -> Tensor | None:
    """The pivots after all exchanges that are due; None if none is. Coefficients are updated as it goes;
    their rounding errors do not matter, for the caller solves again for the new pivots."""
    table, pivots, others = coefficients.clone(), pivots.clone(), others.clone()
    due = False
    while True:
        flat = int(table.abs().argmax())
        row, column = divmod(flat, table.shape[1])
        largest = float(table[row, column])
        if abs(largest) <= bound * (1 + 1e-9):
            return pivots if due else None
        due = True
        # old pivot = (new pivot - the rest of its combination) / largest
        combination = table[row].clone()
        combination[column] -= 1
        into = table[:, column].clone()
        into[row] += 1
        table.addr_(into, combination / largest, alpha=-1)
        pivots[column], others[row] = others[row].clone(), pivots[column].clone()


def _others(pivots: Tensor, rows: int) -> Tensor:
    """The numbers of the rows that are no pivots, rising."""
    free = torch.ones(rows, dtype=torch.bool, device=pivots.device)
    free[pivots] = False
    return free.nonzero().flatten()


def right_factor(tensors: dict[str, Tensor], spec: PivotedSpec) -> Tensor:
    """Z [i, r] of ``W = P [Zᵀ; U Zᵀ]``."""
    return tensors["V"]


def other_rows(weight: Tensor, tensors: dict[str, Tensor]) -> Tensor:
    """The rows [o - r, i] of `weight` [o, i] that U stands for, in its order."""
    return weight[tensors["places"].argsort()[tensors["V"].shape[-1] :]]


def reconstruct(tensors: dict[str, Tensor], spec: PivotedSpec) -> Tensor:
    """The dense weight [o, i]."""
    rows = tensors["V"].mT
    return torch.cat((rows, tensors["U"] @ rows)).index_select(0, tensors["places"])
