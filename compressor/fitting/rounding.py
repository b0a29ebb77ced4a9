"""Turns a weight into what is stored of it in few bits: dense, structured, or dense with a correction.

Beside integers, results hold the numbers before rounding (`latent_name`), from which training goes on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from blr.compressor.base.errors import NumericsError
from blr.compressor.modeling.layers import rows_at_once
from blr.compressor.structures.balance import even_columns, turned
from blr.compressor.structures.base import FitOptions, relative_error
from blr.compressor.structures.blast import from_low_rank
from blr.compressor.structures.gptq import (
    EASE,
    Costs,
    compensation,
    costs_of,
    gptq,
    round_fp8,
    seen_by_v,
)
from blr.compressor.structures.latent import RoundedGrid
from blr.compressor.structures.linalg import solve_spd
from blr.compressor.structures.packing import from_rows, pack_factor, restored, to_matrix, unpack_factor
from blr.compressor.structures.registry import STRUCTURES
from blr.compressor.structures.specs import (
    BlastSpec,
    CorrectedSpec,
    DenseSpec,
    LowRankSpec,
    QuantizedSpec,
    Spec,
    stored_names,
)
from blr.kernels.decode.quantized.reference import pack
from blr.kernels.fp8.reference import is_number

LAST = "U"  # the factor that is solved for
SOLVED = (4, 3, 2)  # bits for which U is solved for, as for float8: int8 loses too little
LATENT = "_latent"
ROUNDS = 4  # rounds of rounding and correcting


@dataclass(frozen=True)
class Quantized:
    """A rounded layer: `tensors` by stored name (``V_q``, ``V_scale``, ``S``), the relative `error` of
    its weight, `latents`: the factors before rounding."""

    tensors: dict[str, Tensor]
    error: float
    latents: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Metric:
    """The cost of errors in a layer's weight: the inputs' Gram matrix H [i, i], float64; `ease` as in
    `costs_of`."""

    gram: Tensor
    ease: float = EASE

    @cached_property
    def root(self) -> Tensor:
        """The factor of H by which GPTQ spreads errors over later columns (`compensation`)."""
        return compensation(self.gram)

    @cached_property
    def float8(self) -> Costs:
        """What errors in float8 cost, as `round_fp8` takes it."""
        return costs_of(self.gram, self.ease)


FitFactors = Callable[[Tensor, Spec], dict[str, Tensor]]


def stacked(metrics: Sequence[Metric]) -> Metric:
    """The metrics of several layers of one shape as one, [n, i, i]."""
    found = Metric(torch.stack([metric.gram for metric in metrics]))
    vars(found)["root"] = torch.stack([metric.root for metric in metrics])  # layers share each
    return found


def latent_name(name: str) -> str:
    """The name of a factor before rounding: ``base.weight`` becomes ``base.weight_latent``."""
    return name + LATENT


def is_latent(name: str) -> bool:
    """Whether a tensor is a factor before rounding, which is trained and not stored."""
    return name.endswith(LATENT)


def plain_fit(options: FitOptions = FitOptions(), gram: Tensor | None = None) -> FitFactors:
    """A function that fits a structure to a matrix by the structure's own solver."""

    def fit(weight: Tensor, spec: Spec) -> dict[str, Tensor]:
        metric = None if gram is None else gram.to(weight)
        solve = STRUCTURES[spec.structure].factorizer().fit
        found: dict[str, Tensor] = solve(weight, spec, metric, options)
        return found

    return fit


def round_layer(
    weight: Tensor, spec: Spec, metric: Metric | None, dtype: torch.dtype, fit: FitFactors
) -> dict[str, Tensor]:
    """What is stored of a layer with the weight or target W [o, i], and its factors before rounding.

    With a `metric` dense weights are rounded with error compensation; without one all errors cost the
    same, and each number goes to the nearest level. `dtype` is that of scales and unpacked numbers;
    `fit` gives the factors of a plain structure. Raises NumericsError for scales that are not finite in
    `dtype`.
    """
    if isinstance(spec, CorrectedSpec):
        return _corrected(weight, spec, metric, dtype, fit)
    if (packing := spec.packing) is not None:
        plain = spec.plain
        factors = {"weight": weight} if plain.structure == DenseSpec.structure else fit(weight, plain)
        return round_factors(turned(plain, factors) if packing.fp8 else factors, packing, metric, dtype)
    factors = fit(weight, spec)
    return {n: factor.to(dtype).contiguous() for n, factor in factors.items() if n in spec.shapes()}


def round_layers(
    weights: Sequence[Tensor], spec: Spec, metrics: Sequence[Metric], dtype: torch.dtype,
    fits: Sequence[FitFactors], fit: FitFactors,
) -> list[dict[str, Tensor]]:  # fmt: skip
    """`round_layer` of layers of one spec by the same launches, of which one fit has thousands, where
    `are_stacked`; `fit` is that of a stack of matrices."""
    if len(weights) == 1 or not are_stacked(spec):
        each = zip(weights, metrics, fits, strict=True)
        return [round_layer(weight, spec, metric, dtype, own) for weight, metric, own in each]
    found = round_layer(torch.stack([*weights]), spec, stacked(metrics), dtype, fit)
    return [{name: t[n] for name, t in found.items()} for n in range(len(weights))]


def are_stacked(spec: Spec) -> bool:
    """Whether layers can be rounded as a stack: dense ones in few bits, also with low rank beside."""
    (_, base), *more = spec.parts()
    packings = [part.packing for _, part in spec.parts() if part.packing is not None]
    if base.packing is None or base.structure != DenseSpec.structure or any(p.fp8 for p in packings):
        return False
    plain = [added.plain for _, added in more]
    return all(isinstance(added, LowRankSpec) and added.groups == 1 for added in plain)


def round_factors(
    factors: dict[str, Tensor], spec: QuantizedSpec, metric: Metric | None, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Round factors that are fitted already, as `round_layer`; a dense layer has its ``weight``."""
    if spec.structure != DenseSpec.structure:
        found = quantize_factors(spec, factors, dtype, metric)
        return found.tensors | found.latents
    if metric is None:
        return quantize_dense(factors["weight"], spec, dtype).tensors
    stored, latent = _by_compensation(factors["weight"], metric, "weight", spec, dtype)
    return stored if spec.fp8 else stored | {latent_name("weight"): latent}


def quantize_dense(
    weight: Tensor, spec: QuantizedSpec, scale_dtype: torch.dtype | None = None
) -> Quantized:
    """Round a dense weight [o, i], each number to its nearest level. Raises NumericsError."""
    parts, lost, whole = [], 0.0, 0.0
    for rows in weight.split(rows_at_once(weight.shape[1])):
        own = replace(spec, of=DenseSpec(spec.in_features, len(rows)))
        stored = _checked("weight", pack_factor(own, "weight", rows, scale_dtype or weight.dtype))
        back = unpack_factor(own, "weight", stored, _work(rows))
        lost, whole = lost + _square(back - rows.to(back)), whole + _square(rows.to(back))
        parts.append(stored)
    tensors = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return Quantized(tensors, (lost / whole) ** 0.5 if whole else 0.0)


def quantize_factors(
    spec: QuantizedSpec,
    factors: dict[str, Tensor],
    scale_dtype: torch.dtype | None = None,
    metric: Metric | None = None,
) -> Quantized:
    """Round the canonical `factors` of a structured layer; scales are in `scale_dtype`, or in each
    factor's dtype. Raises NumericsError for scales that are not finite.

    With 4 bits or fewer, and in float8, the factor U of W = U Zᵀ comes last: it is solved for by least
    squares, given the weight and the rounded Z, and rounded with compensation. So each term makes up
    for what others lost.
    """
    tensors, latents, structure = dict[str, Tensor](), dict[str, Tensor](), STRUCTURES[spec.structure]
    reconstruct = structure.factorizer().reconstruct
    exact = {name: factors[name].to(_work(factors[name])) for name in spec.shapes()}
    if spec.tiled:
        exact = even_columns(spec.of, exact)
    product, back = reconstruct(exact, spec.of), dict[str, Tensor]()
    solved = LAST if structure.linear and (spec.fp8 or spec.bits in SOLVED) else None
    for name in sorted(spec.shapes(), key=lambda name: name == solved):
        dtype = scale_dtype or factors[name].dtype
        if name == solved:
            factor, stored = _solved(spec, back, product, metric, dtype)
        else:
            factor, stored = exact[name], _unsolved(spec, name, exact | back, metric, dtype)
        back[name] = unpack_factor(spec, name, stored, product.dtype)
        tensors |= stored
        if not spec.fp8:
            latents[latent_name(name)] = factor  # scaled and solved again, as it was rounded
    return Quantized(tensors, relative_error(product, reconstruct(back, spec.of)), latents)


def _corrected(
    weight: Tensor, spec: CorrectedSpec, metric: Metric | None, dtype: torch.dtype, fit: FitFactors
) -> dict[str, Tensor]:
    """Round a weight, or a stack of them, and fit its correction in turn, each to what the other leaves
    (LoftQ, arXiv 2310.08659, here in the metric of the inputs); the best round of each."""
    best, added = torch.full(weight.shape[:-2], torch.inf).to(weight), torch.zeros_like(weight)
    kept: dict[str, Tensor] = {}
    for _ in range(ROUNDS):
        base = round_layer(weight - added, spec.base, metric, dtype, fit)
        left = weight - restored(spec.base, base, weight.dtype)
        correction = round_layer(left, spec.correction, metric, dtype, partial(_start, fit))
        added = restored(spec.correction, correction, weight.dtype)
        error = left - added
        weighted = error if metric is None else error @ metric.gram.to(weight)
        missed = (weighted * error).sum((-2, -1))
        better = missed < best
        best = torch.where(better, missed, best)
        made = {f"base.{n}": t for n, t in base.items()}
        made |= {f"correction.{n}": t for n, t in correction.items()}
        kept = {name: _chosen(better, t, kept.get(name, t)) for name, t in made.items()}
    return kept


def _chosen(better: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """`new` of the layers that are `better`, `old` of the others."""
    return torch.where(better.view(*better.shape, *[1] * (new.dim() - better.dim())), new, old)


def _start(fit: FitFactors, weight: Tensor, spec: Spec) -> dict[str, Tensor]:
    """Factors from which a correction starts. BLAST starts from low rank, whose terms do not cancel."""
    if not isinstance(spec, BlastSpec):
        return fit(weight, spec)
    found = fit(weight, spec.start())
    return from_low_rank(found["U"], found["V"], spec)


def _solved(
    spec: QuantizedSpec,
    rounded: dict[str, Tensor],
    weight: Tensor,
    metric: Metric | None,
    dtype: torch.dtype,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Solve for U by least squares, given `weight` and the other factors; U and what is stored of it.
    Small corrections, whose rows share groups, are rounded to the nearest levels."""
    Z = STRUCTURES[spec.structure].factorizer().right_factor(rounded, spec.of)  # [..., i, K]
    weighted = Z if metric is None else metric.gram.to(Z) @ Z
    normal = Z.mT @ weighted
    rows = weight if weight.dim() == Z.dim() else weight.unflatten(0, (*Z.shape[:-2], -1))
    left = solve_spd(normal, rows @ weighted)  # [..., o, K]
    if spec.tile(LAST):
        factor = from_rows(spec, LAST, left)
        return factor, _checked(LAST, pack_factor(spec, LAST, factor, dtype))
    stored, latent = _by_compensation(left, Metric(normal.double(), ease=0.0), LAST, spec, dtype)
    return from_rows(spec, LAST, latent), stored


def _unsolved(
    spec: QuantizedSpec, name: str, factors: dict[str, Tensor], metric: Metric | None, dtype: torch.dtype
) -> dict[str, Tensor]:
    """What is stored of a factor that is not solved for. V in float8 is rounded with compensation.
    `factors` that were rounded have their stored values."""
    factor, gram = factors[name], None if metric is None else metric.gram
    seen = seen_by_v(spec.of, factors, gram) if spec.fp8 and name == "V" else None
    if seen is None:
        costs = None
        if gram is not None and name == "V":
            width, costs = spec.shapes()["V"][-2], gram.diagonal(dim1=-2, dim2=-1)  # by input
            blocks = width < spec.in_features
            costs = costs.view(-1, 1, width) if blocks else costs[..., None, :]
        return _checked(name, pack_factor(spec, name, factor, dtype, costs))
    return _float8(name, spec, to_matrix(spec, name, factor), costs_of(seen.double()), dtype)


def _float8(
    name: str, spec: QuantizedSpec, matrix: Tensor, costs: Costs, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Round a matrix [..., R, K] to float8 in the metric of its columns, or of groups of its rows."""
    matrix = matrix.float() if matrix.is_cuda else matrix
    apart = costs.order.dim() == matrix.dim()
    rows = matrix.unflatten(-2, (costs.order.shape[-2], -1)) if apart else matrix
    found = [t.flatten(-3, -2) if apart else t for t in round_fp8(rows, costs, spec.group, dtype)]
    return _checked(name, dict(zip(stored_names(name), found, strict=True)))


def _by_compensation(
    matrix: Tensor, metric: Metric, name: str, spec: QuantizedSpec, dtype: torch.dtype
) -> tuple[dict[str, Tensor], Tensor]:
    """Round a factor that is packed as `matrix` [..., R, K] with compensation in the metric of its
    columns. Returns what is stored and the factor before rounding. A GPU takes float32, for which GPTQ
    has a kernel."""
    matrix = matrix.float() if matrix.is_cuda else matrix
    if spec.fp8:
        return _float8(name, spec, matrix, metric.float8, dtype), matrix
    grid = RoundedGrid(spec.bits, spec.group, dtype, spec.curved, spec.superblocks)
    levels, scale, latent = gptq(matrix, metric.root.to(matrix), grid)
    padded = torch.nn.functional.pad(levels, (0, -matrix.shape[-1] % spec.group))
    packed = pack(padded, spec.bits, spec.group)
    stored = dict(zip(stored_names(name), (packed, scale.to(dtype)), strict=True))
    return _checked(name, stored), latent


def _checked(name: str, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Raise NumericsError if scales of a factor are not finite."""
    for tensor in stored.values():
        if is_number(tensor) and not bool(torch.isfinite(tensor).all()):
            raise NumericsError(
                f"scales of {name} are not finite in {tensor.dtype}; take a model in bfloat16 or "
                "float32, or leave the layer out"
            )
    return stored


def _square(tensor: Tensor) -> float:
    return float(tensor.square().sum(dtype=torch.float64))


def _work(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
