"""Specs of all structures: what tensors a layer has, and their shapes, without torch.

Notation (`i` inputs, `o` outputs, `b` blocks, `p = i/b`, `q = o/b`, rank `r`):

* low-rank        ``W = U Vᵀ``                        U [o, r], V [i, r]
  in G groups     ``W_g = U_g V_gᵀ``                  U [G, o/G, r], V [G, i, r] of output rows,
                                                      U [G, o, r], V [G, i/G, r] of input columns
* Monarch         ``W_kl = U_kl V_klᵀ``               U [b, q, b·r'], V [b, p, b·r'], r = b·r'
* BLAST           ``W_kl = U_k diag(S_kl) V_lᵀ``      U [b, q, r], S [b, b, r], V [b, p, r]
* Kronecker-sparse ``W = K_0 K_1 … K_{L-1}``          factors.n [a, b, c, d]
* dense           ``W``                               weight [o, i]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from blr.compressor.base.errors import InputError
from blr.compressor.structures.spec import Shape, Spec, Stored
from blr.kernels.common.orders import order_of
from blr.kernels.decode.quantized.formats import GROUP, ROW, check_format, packed_width, scale_count

Pattern = tuple[int, int, int, int]
Axes = tuple[tuple[int, ...], ...]
PACKED, SCALE = "_q", "_scale"
PIVOTED = "pivoted"  # a structure of versions before 0.2
PIVOT_ROWS = (
    "config.blr.layers holds pivot rows (`svd --pivot` of blr 0.1), which this version does not read; "
    "load the folder by its own code, from_pretrained(folder, trust_remote_code=True) without "
    "blr.compressor.register(), or compress the model again with --method svd"
)


@dataclass(frozen=True)
class LowRankSpec(Spec):
    """``W = U Vᵀ`` of rank `rank`: r(i + o) parameters.

    With `groups` G > 1 every group of output rows (`side` "out") or of input columns ("in") has
    factors of its own, as per-head projections in FlashSVD: r(G·i + o) or r(i + G·o) parameters.
    """

    rank: int
    groups: int = 1
    side: str = "out"
    structure = "svd"

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
    structure = "monarch"

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
    structure = "blast"

    def shapes(self) -> dict[str, Shape]:
        b, r = self.blocks, self.rank
        q, p = self.out_features // b, self.in_features // b
        return {"U": (b, q, r), "S": (b, b, r), "V": (b, p, r)}

    def start(self) -> LowRankSpec:
        return LowRankSpec(self.in_features, self.out_features, self.rank)

    def describe(self) -> str:
        return f"b={self.blocks} r={self.rank}"


@dataclass(frozen=True)
class KroneckerSpec(Spec):
    """A chain of Kronecker-sparse factors, leftmost (output side) first: Σ abcd parameters.

    Factor (a, b, c, d) has support ``I_a ⊗ 1_{b×c} ⊗ I_d`` and is stored as w [a, b, c, d] with
    ``K[i·bd + j·d + l, i·cd + k·d + l] = w[i, j, k, l]``.
    """

    patterns: tuple[Pattern, ...]
    structure = "ks"

    def __post_init__(self) -> None:
        object.__setattr__(self, "patterns", tuple(tuple(p) for p in self.patterns))
        if any(len(pattern) != 4 for pattern in self.patterns):
            raise ValueError(f"patterns are {self.patterns}: expected four numbers (a, b, c, d) in each")

    def shapes(self) -> dict[str, Shape]:
        return {f"factors.{n}": pattern for n, pattern in enumerate(self.patterns)}

    def describe(self) -> str:
        return written(self.patterns)


def written(patterns: Sequence[Pattern]) -> str:
    """A chain in words: ``(1,192,48,2)(2,48,192,1)``."""
    return "".join("(" + ",".join(map(str, p)) + ")" for p in patterns)


@dataclass(frozen=True)
class DenseSpec(Spec):
    """The weight itself, to be stored in fewer bits: o·i parameters."""

    structure = "dense"

    def shapes(self) -> dict[str, Shape]:
        return {"weight": (self.out_features, self.in_features)}

    def describe(self) -> str:
        return ""


SPECS: dict[str, type[Spec]] = {
    spec.structure: spec for spec in (LowRankSpec, MonarchSpec, BlastSpec, KroneckerSpec)
}
KEPT_GROUP = 32  # of couplings, whose rows are as short as the rank
# What an entry says of how a layer is packed, and what it leaves unsaid
PACKING = {"bits": None, "group": GROUP, "kept_bits": None, "tiled": False, "fp8": False, "curved": True}
PACKING["superblocks"] = False


@dataclass(frozen=True)
class QuantizedSpec(Spec):
    """`of` with its factors packed to `bits` in groups of `group` (`blr.kernels.decode.quantized`).

    A factor becomes a matrix [..., R, K] along its contracted axis, and ``U`` is stored as ``U_q`` and
    ``U_scale``, ``factors.0`` as ``factors_q.0`` and ``factors_scale.0``. BLAST's couplings keep their
    dtype unless `kept_bits` is 8. With `tiled`, rows of U shorter than half a group share one: as many
    as fit, each padded to a power of two. `fp8` are numbers in float8 e4m3, not integers, with a scale
    a row where `group` is 0. `curved`: whether the levels of 3 bits widen outwards. `superblocks`:
    whether the scales of 8 groups are multiples of one, which llama.cpp's Q2_K and Q3_K hold.
    """

    in_features: int = field(init=False)
    out_features: int = field(init=False)
    of: Spec
    bits: int
    group: int = GROUP
    kept_bits: int | None = None
    tiled: bool = False
    fp8: bool = False
    curved: bool = True
    superblocks: bool = False

    def __post_init__(self) -> None:
        if type(self.of) not in (DenseSpec, *SPECS.values()):
            raise ValueError(f"a quantized {type(self.of).__name__}: expected a plain structure")
        check_format(self.bits, self.group, self.fp8)
        if self.kept_bits is not None and not (type(self.kept_bits) is int and self.kept_bits == 8):
            raise ValueError(f"kept_bits {self.kept_bits!r}: expected 8, or none")
        for name in ("tiled", "fp8", "curved", "superblocks"):
            if type(flag := getattr(self, name)) is not bool:
                raise ValueError(f"{name} {flag!r}: expected true or false")
        object.__setattr__(self, "curved", self.curved or self.bits != 3)  # others have one grid
        for name in ("in_features", "out_features", "structure"):
            object.__setattr__(self, name, getattr(self.of, name))

    @property
    def plain(self) -> Spec:
        return self.of

    @property
    def packing(self) -> QuantizedSpec:
        return self

    @property
    def kind(self) -> str:
        """The kind of numbers as recipes write it: int4, fp8."""
        return "fp8" if self.fp8 else f"int{self.bits}"

    def shapes(self) -> dict[str, Shape]:
        return self.of.shapes()

    def format_of(self, name: str) -> tuple[int, int] | None:
        """Bits and group of a factor; None if it is not packed."""
        if name != "S":
            return self.bits, self.group
        return (8, KEPT_GROUP) if self.kept_bits else None

    def axes(self, name: str) -> Axes:
        """Which canonical axes each axis of a factor's packed matrix [..., R, K] runs over. The order is
        that of kernels; two axes are joined where a product sums over both or one alone would leave most
        of a group empty: Kronecker-sparse [a, d, b·c], and U of low rank in input groups [o, G·r]."""
        if getattr(self.of, "side", "out") == "in" and name == "U":
            return (1,), (0, 2)
        if name == "S":
            return (0,), (1,), (2,)  # a row is as long as the rank
        order = order_of(name, len(self.shapes()[name]))
        if self.structure == KroneckerSpec.structure:
            return order[:1], order[1:2], order[2:]
        return tuple((axis,) for axis in order)

    def matrix_shape(self, name: str) -> Shape:
        """The shape [..., R, K] of a factor's matrix."""
        shape = self.shapes()[name]
        return tuple(prod([shape[axis] for axis in joined]) for joined in self.axes(name))

    def tile(self, name: str) -> tuple[int, int] | None:
        """How many rows of a factor share a group, and the width of each with padding; None if none
        do."""
        K = self.matrix_shape(name)[-1]
        if not self.tiled or name != "U" or self.group < 2 * K:
            return None
        width = 1 << (K - 1).bit_length()
        return self.group // width, width

    def packed_shape(self, name: str) -> Shape:
        """The shape of what is packed: `matrix_shape`, or tiles of it [..., ⌈R/rows⌉, rows·width]."""
        if (tile := self.tile(name)) is None:
            return self.matrix_shape(name)
        *outer, R, _ = self.matrix_shape(name)
        return (*outer, -(-R // tile[0]), tile[0] * tile[1])

    def stored(self) -> dict[str, Stored]:
        found: dict[str, Stored] = {}
        for name in self.shapes():
            found |= self.packed_parts(name)
        return found

    def packed_parts(self, name: str) -> dict[str, Stored]:
        """The tensors that are stored for one factor, by name."""
        form = self.format_of(name)
        if form is None:
            return {name: Stored(self.shapes()[name])}
        (*rows, K), (bits, group) = self.packed_shape(name), form
        packed, scale = stored_names(name)
        kind = "F8_E4M3" if self.fp8 else "I8" if bits == 8 else "U8"
        return {
            scale: Stored((*rows, scale_count(K, group))),  # first: wider, and files are aligned
            packed: Stored((*rows, K if self.fp8 else packed_width(K, bits, group)), kind),
        }

    def to_dict(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in PACKING}
        return {**self.of.to_dict(), **{k: v for k, v in own.items() if PACKING[k] != v}}

    def describe(self) -> str:
        group = f"/{self.group}" if self.group != (ROW if self.fp8 else GROUP) else ""
        curve = " curved" if self.curved and self.bits == 3 else ""
        grid = f" q{self.bits}_k" if self.superblocks else curve
        return f"{self.of.describe()} {self.kind}{group}{grid}".strip()


@dataclass(frozen=True)
class CorrectedSpec(Spec):
    """``W = Q + S``: a dense weight in few bits, and a structure, packed or not, added to it."""

    in_features: int = field(init=False)
    out_features: int = field(init=False)
    base: QuantizedSpec
    correction: Spec
    structure = "corrected"

    def __post_init__(self) -> None:
        base, correction = self.base, self.correction
        if base.packing is None or base.structure != DenseSpec.structure:
            raise ValueError(f"base {base}: expected a quantized dense weight")
        if correction.structure in (self.structure, DenseSpec.structure):
            raise ValueError(f"correction {correction}: expected a structure")
        for name in ("in_features", "out_features"):
            if getattr(base, name) != getattr(correction, name):
                raise ValueError(f"{name} of base and correction differ")
            object.__setattr__(self, name, getattr(base, name))

    def shapes(self) -> dict[str, Shape]:
        return {f"{part}.{n}": s for part, spec in self.parts() for n, s in spec.shapes().items()}

    def stored(self) -> dict[str, Stored]:
        return {f"{part}.{n}": s for part, spec in self.parts() for n, s in spec.stored().items()}

    def parts(self) -> tuple[tuple[str, Spec], ...]:
        return ("base", self.base), ("correction", self.correction)

    def to_dict(self) -> dict[str, Any]:
        return {"structure": self.structure, **{name: spec.to_dict() for name, spec in self.parts()}}

    def describe(self) -> str:
        return f"{self.base.describe()} + {self.correction.structure} {self.correction.describe()}"


def families(spec: Spec) -> set[str]:
    """The names of the structures that a layer consists of."""
    return {leaf.structure for _, leaf in spec.parts()}


def stored_names(name: str) -> tuple[str, str]:
    """What files call the numbers and scales of a packed factor: ``V_q`` and ``V_scale`` of ``V``,
    ``factors_q.0`` and ``factors_scale.0`` of ``factors.0``."""
    stem, dot, index = name.partition(".")
    return f"{stem}{PACKED}{dot}{index}", f"{stem}{SCALE}{dot}{index}"


def spec_from_dict(fields: dict[str, Any]) -> Spec:
    """The spec of a layer table's entry (`Spec.to_dict`). Raises ValueError for an unknown structure or
    sizes that it cannot have, InputError for a structure of earlier versions."""
    fields = dict(fields)
    structure = fields.pop("structure", None)
    if structure == PIVOTED:
        raise InputError(PIVOT_ROWS)
    if structure == CorrectedSpec.structure:
        if fields.keys() != {"base", "correction"} or any(p.get("base") for p in fields.values()):
            raise ValueError(
                "a corrected layer of other parts: expected base and correction, plain ones"
            )
        return CorrectedSpec(**{n: spec_from_dict(p) for n, p in fields.items()})  # type: ignore[arg-type]
    own = {name: fields.pop(name) for name in PACKING if name in fields}
    known = {**SPECS, DenseSpec.structure: DenseSpec} if "bits" in own else SPECS
    if structure not in known:
        known_names = ", ".join((*SPECS, CorrectedSpec.structure))
        raise ValueError(f"unknown structure {structure!r}; known: {known_names}, or dense in some bits")
    spec = known[structure](**fields)
    return QuantizedSpec(spec, **own) if own else spec
