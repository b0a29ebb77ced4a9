"""Shapes and parameter counts of the four structured families, without torch.

A spec says what one structured linear layer is: its tensors, their shapes and how many
parameters they hold. The planner uses specs before a single weight is read, the factorizers
fill them, and the modeling files build modules from them (this file travels inside every
checkpoint, so it imports nothing outside the standard library).

Notation (`i` inputs, `o` outputs, `b` blocks, `p = i/b`, `q = o/b`, rank `r`):

* low-rank        ``W = U Vᵀ``                        U [o, r], V [i, r]
  in G groups     ``W_g = U_g V_gᵀ``                  U [G, o/G, r], V [G, i, r] of output rows,
                                                      U [G, o, r], V [G, i/G, r] of input columns
* Monarch         ``W_kl = U_kl V_klᵀ``               U [b, q, b·r'], V [b, p, b·r'], r = b·r'
* BLAST           ``W_kl = U_k diag(S_kl) V_lᵀ``      U [b, q, r], S [b, b, r], V [b, p, r]
* Kronecker-sparse ``W = K_0 K_1 … K_{L-1}``          factors.n [a, b, c, d]

Sources: "Memory-Efficient Acceleration of Block Low-Rank Foundation Models" (section 2) and
"Fast Inference with Kronecker-Sparse Matrices" (section 2).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod
from typing import Any, ClassVar

Pattern = tuple[int, int, int, int]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Spec:
    """What every family shares: a layer mapping `in_features` to `out_features`."""

    in_features: int
    out_features: int
    structure: ClassVar[str] = ""

    def shapes(self) -> dict[str, Shape]:
        """Tensor suffix (``U``, ``factors.0``, …) to shape, in the order they are stored."""
        raise NotImplementedError

    @property
    def parameters(self) -> int:
        """Number of parameters, bias excluded (the bias stays dense and unchanged)."""
        return sum(prod(shape) for shape in self.shapes().values())

    @property
    def dense_parameters(self) -> int:
        """Number of parameters of the dense weight this spec replaces."""
        return self.in_features * self.out_features

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready description; `spec_from_dict` is the inverse."""
        return {"structure": self.structure, **asdict(self)}

    def describe(self) -> str:
        """The rank or pattern as a person writes it."""
        raise NotImplementedError


@dataclass(frozen=True)
class LowRankSpec(Spec):
    """``W = U Vᵀ`` of rank `rank`: r(i + o) parameters.

    With `groups` G > 1 every group of output rows (`side` "out") or of input columns ("in") has
    factors of its own, as per-head projections in FlashSVD: r(G·i + o) or r(i + G·o) parameters.
    """

    rank: int
    groups: int = 1
    side: str = "out"
    structure: ClassVar[str] = "svd"

    def __post_init__(self) -> None:
        if self.side not in ("out", "in"):
            raise ValueError(f"side is {self.side!r}: expected 'out' or 'in'")
        if self.groups < 1 or self._split % self.groups:
            raise ValueError(f"{self.groups} groups do not divide {self._split} features")
        if self.groups == 1:  # one way to write the plain factorization
            object.__setattr__(self, "side", "out")

    @property
    def _split(self) -> int:
        return self.out_features if self.side == "out" else self.in_features

    def shapes(self) -> dict[str, Shape]:
        o, i, g = self.out_features, self.in_features, self.groups
        if g == 1:
            return {"U": (o, self.rank), "V": (i, self.rank)}
        rows, columns = (o // g, i) if self.side == "out" else (o, i // g)
        return {"U": (g, rows, self.rank), "V": (g, columns, self.rank)}

    def to_dict(self) -> dict[str, Any]:
        fields = super().to_dict()
        if self.groups == 1:
            del fields["groups"], fields["side"]
        return fields

    def describe(self) -> str:
        grouped = f"{self.groups} {self.side} groups of " if self.groups > 1 else ""
        return f"{grouped}r={self.rank}"


@dataclass(frozen=True)
class MonarchSpec(Spec):
    """`blocks`² blocks of rank `block_rank` each: b·r'(i + o) parameters.

    The middle index of ``U[k]`` runs over (input block l, s in r') and that of ``V[l]`` over
    (output block k, s in r'): ``W_kl = U[k, :, l·r':(l+1)·r'] V[l, :, k·r':(k+1)·r']ᵀ``.
    """

    blocks: int
    block_rank: int
    structure: ClassVar[str] = "monarch"

    @property
    def rank(self) -> int:
        """r = b·r', the width of a block row, as the papers count it."""
        return self.blocks * self.block_rank

    def shapes(self) -> dict[str, Shape]:
        b, r = self.blocks, self.rank
        return {"U": (b, self.out_features // b, r), "V": (b, self.in_features // b, r)}

    def describe(self) -> str:
        return f"b={self.blocks} r={self.rank}"


@dataclass(frozen=True)
class BlastSpec(Spec):
    """Shared factors of `blocks` rows and columns coupled by diagonals: r(i + o + b²) parameters."""

    blocks: int
    rank: int
    structure: ClassVar[str] = "blast"

    def shapes(self) -> dict[str, Shape]:
        b, r = self.blocks, self.rank
        return {
            "U": (b, self.out_features // b, r),
            "S": (b, b, r),
            "V": (b, self.in_features // b, r),
        }

    def describe(self) -> str:
        return f"b={self.blocks} r={self.rank}"


@dataclass(frozen=True)
class KroneckerSpec(Spec):
    """A chain of Kronecker-sparse factors, leftmost (output side) first: Σ abcd parameters.

    Factor (a, b, c, d) has support ``I_a ⊗ 1_{b×c} ⊗ I_d`` and is stored as w [a, b, c, d] with
    ``K[i·bd + j·d + l, i·cd + k·d + l] = w[i, j, k, l]``.
    """

    patterns: tuple[Pattern, ...]
    structure: ClassVar[str] = "ks"

    def __post_init__(self) -> None:
        object.__setattr__(self, "patterns", tuple(tuple(p) for p in self.patterns))
        if any(len(pattern) != 4 for pattern in self.patterns):
            raise ValueError(f"patterns are {self.patterns}: expected four numbers (a, b, c, d) in each")

    def shapes(self) -> dict[str, Shape]:
        return {f"factors.{n}": pattern for n, pattern in enumerate(self.patterns)}

    def describe(self) -> str:
        return "".join("(" + ",".join(map(str, p)) + ")" for p in self.patterns)


SPECS: dict[str, type[Spec]] = {
    spec.structure: spec for spec in (LowRankSpec, MonarchSpec, BlastSpec, KroneckerSpec)
}


def spec_from_dict(fields: dict[str, Any]) -> Spec:
    """The inverse of `Spec.to_dict`. Raises ValueError for an unknown structure."""
    fields = dict(fields)
    structure = fields.pop("structure", None)
    if structure not in SPECS:
        raise ValueError(f"unknown structure {structure!r}; known: {', '.join(SPECS)}")
    return SPECS[structure](**fields)
