"""From a weight to what is stored of it in few bits: dense, structured, and dense with a correction.

Where the inputs' Gram matrix is known, dense weights are rounded behind error compensation (GPTQ) and
factors weighted by its diagonal; else each to the nearest level of scales that are searched. Of 4 bits
and fewer, which round coarsely, factors that follow from the others by least squares are solved again
behind those that are rounded. A correction starts from Q and S in turn, each what the other leaves:
LoftQ (arXiv 2310.08659), here in the metric of the inputs, with factors rounded as they are stored.

Beside integers stand the numbers that were rounded (`latent_name`), from which training goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from blr.compressor.errors import NumericsError
from blr.compressor.modeling.quantized import rows_at_once
from blr.compressor.rounding.gptq import compensation, gptq
from blr.compressor.structures.base import FitOptions, relative_error, weighted_norm_squared
from blr.compressor.structures.blast import from_low_rank
from blr.compressor.structures.packing import pack_factor, unpack_factor
from blr.compressor.structures.registry import STRUCTURES
from blr.compressor.structures.restore import restored
from blr.compressor.structures.specs import (
    BlastSpec,
    CorrectedSpec,
    DenseSpec,
    LowRankSpec,
    MonarchSpec,
    QuantizedSpec,
    Spec,
    stored_names,
)
from blr.kernels.fp8.reference import is_number
from blr.kernels.quantized.reference import pack

PRODUCT = "product"
SOLVED = (4, 3, 2)  # bits for which factors are solved again: 8 have nothing to make good
LATENT = "_latent"
ROUNDS = 4  # of rounding and correcting in turn


@dataclass(frozen=True)
class Quantized:
    """`tensors` by stored name (``V_q``, ``V_scale``, ``S``); `errors`, relative Frobenius, by factor
    and, under "product", of the weight they multiply out to; `latents` the factors that were rounded,
    by `latent_name`."""

    tensors: dict[str, Tensor]
    errors: dict[str, float]
    latents: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Metric:
    """What errors of a layer cost: H [i, i] of its inputs, float64."""

    gram: Tensor

    @property
    def costs(self) -> Tensor:
        """By input, [i]."""
        return self.gram.diagonal()

    @cached_property
    def root(self) -> Tensor:
        """As of `compensation`."""
        return compensation(self.gram)


FitFactors = Callable[[Tensor, Spec], Mapping[str, Tensor]]


def latent_name(name: str) -> str:
    """``base.weight`` -> ``base.weight_latent``: a factor before it was rounded."""
    return name + LATENT


def is_latent(name: str) -> bool:
    """Whether a tensor is one that is trained, not stored."""
    return name.endswith(LATENT)


def plain_fit(options: FitOptions | None = None, gram: Tensor | None = None) -> FitFactors:
    """The fit of a structure to a matrix, as its own solver does it."""

    def fit(weight: Tensor, spec: Spec) -> Mapping[str, Tensor]:
        metric = None if gram is None else gram.to(weight)
        solver = STRUCTURES[spec.structure].factorizer()
        return solver.fit(weight, spec, metric, options or FitOptions()).tensors

    return fit


def round_layer(
    weight: Tensor, spec: Spec, metric: Metric | None, dtype: torch.dtype, fit: FitFactors
) -> dict[str, Tensor]:
    """What is stored of one layer, by the names of ``spec.stored()``, and what was rounded, on the
    weight's device.

    Args:
        weight: W [o, i], float32 or float64, or the target in its place.
        metric: None for errors that all cost the same.
        dtype: of scales and of what is not packed.
        fit: canonical factors of a plain structure.

    Raises:
        NumericsError: scales that are not finite in `dtype`.
    """
    if isinstance(spec, CorrectedSpec):
        return _corrected(weight, spec, metric, dtype, fit)
    plain = spec.of if isinstance(spec, QuantizedSpec) else spec
    if isinstance(spec, QuantizedSpec) and isinstance(plain, DenseSpec):
        if metric is not None and not spec.fp8:
            return _compensated(weight, spec, metric, dtype)
        return quantize_dense(weight, spec, dtype).tensors
    factors = fit(weight, plain)
    if isinstance(spec, QuantizedSpec):
        costs = None if metric is None else metric.costs
        found = quantize_factors(spec, dict(factors), dtype, costs)
        return found.tensors | found.latents
    return {name: factor.to(dtype).contiguous() for name, factor in factors.items()}


def _compensated(
    weight: Tensor, spec: QuantizedSpec, metric: Metric, dtype: torch.dtype
) -> dict[str, Tensor]:
    """A dense weight by GPTQ; on a GPU in float32, for which there is a kernel."""
    weight = weight.float() if weight.is_cuda else weight
    found = gptq(weight, metric.root.to(weight), spec.bits, spec.group, dtype)
    padded = torch.nn.functional.pad(found.levels, (0, -weight.shape[1] % spec.group))
    packed = pack(padded, spec.bits, spec.group)
    names = stored_names("weight")
    stored = dict(zip(names, (packed, found.scale.to(dtype)), strict=True))
    check_scales("weight", stored)
    return stored | {latent_name("weight"): found.latent}


def quantize_dense(
    weight: Tensor, spec: QuantizedSpec, scale_dtype: torch.dtype | None = None
) -> Quantized:
    """Quantize one dense weight [o, i], each number to its nearest level.

    Raises NumericsError when its scales are not finite.
    """
    parts, lost, whole = [], 0.0, 0.0
    for rows in weight.split(rows_at_once(weight.shape[1])):
        own = replace(spec, of=DenseSpec(spec.in_features, len(rows)))
        stored = _pack(own, "weight", rows, scale_dtype or weight.dtype)
        back = unpack_factor(own, "weight", stored, _work(rows))
        lost, whole = lost + _square(back - rows.to(back)), whole + _square(rows.to(back))
        parts.append(stored)
    tensors = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return Quantized(tensors, {PRODUCT: (lost / whole) ** 0.5 if whole else 0.0})


def quantize_factors(
    spec: QuantizedSpec,
    factors: dict[str, Tensor],
    scale_dtype: torch.dtype | None = None,
    costs: Tensor | None = None,
) -> Quantized:
    """Quantize one structured layer.

    Args:
        factors: canonical, as named by `spec`. scale_dtype: the model's (default: of each factor).
        costs: [i], of errors by input.

    Raises:
        NumericsError: a factor whose scales are not finite.
    """
    tensors: dict[str, Tensor] = {}
    errors: dict[str, float] = {}
    latents: dict[str, Tensor] = {}
    back: dict[str, Tensor] = {}
    exact = {name: factor.to(_work(factor)) for name, factor in factors.items()}
    if spec.tiled:
        exact = _even(spec.of, exact)
    for name in _turns(spec):
        factor = _solved(name, spec, back, exact, costs)
        dtype = scale_dtype or factors[name].dtype
        stored = _pack(spec, name, factor, dtype, _costs_of(spec, name, costs))
        back[name] = unpack_factor(spec, name, stored, factor.dtype)
        tensors |= stored
        if not spec.fp8:
            latents[latent_name(name)] = factor  # scaled and solved again, as it was rounded
        if spec.format_of(name):
            errors[name] = relative_error(factor, back[name])
    reconstruct = STRUCTURES[spec.structure].factorizer().reconstruct
    errors[PRODUCT] = relative_error(reconstruct(exact, spec.of), reconstruct(back, spec.of))
    return Quantized(tensors, errors, latents)


def _corrected(
    weight: Tensor, spec: CorrectedSpec, metric: Metric | None, dtype: torch.dtype, fit: FitFactors
) -> dict[str, Tensor]:
    """Q and S in turn, each of what the other leaves; the best of `ROUNDS`."""
    best, kept = float("inf"), dict[str, Tensor]()
    added, gram = torch.zeros_like(weight), None if metric is None else metric.gram.to(weight)
    for _ in range(ROUNDS):
        base = round_layer(weight - added, spec.base, metric, dtype, fit)
        left = weight - restored(spec.base, base, weight.dtype)
        correction = round_layer(left, spec.correction, metric, dtype, partial(_start, fit))
        added = restored(spec.correction, correction, weight.dtype)
        missed = weighted_norm_squared(left - added, gram)
        if missed < best:
            named = {f"base.{n}": t for n, t in base.items()}
            best, kept = missed, named | {f"correction.{n}": t for n, t in correction.items()}
    return kept


def _start(fit: FitFactors, weight: Tensor, spec: Spec) -> Mapping[str, Tensor]:
    """Factors of a correction: of BLAST those of low rank in blocks, whose terms do not cancel each
    other and so can be rounded."""
    if not isinstance(spec, BlastSpec):
        return fit(weight, spec)
    found = fit(weight, start_of(spec))
    return from_low_rank(found["U"], found["V"], spec)


def start_of(spec: BlastSpec) -> LowRankSpec:
    """The low rank from which a correction by BLAST starts."""
    return LowRankSpec(spec.in_features, spec.out_features, spec.rank)


def _turns(spec: QuantizedSpec) -> list[str]:
    """The factors as they are rounded: those that are solved again come last."""
    solved = STRUCTURES[spec.structure].solved if spec.bits in SOLVED else ()
    return [*(name for name in spec.shapes() if name not in solved), *solved]


def _solved(
    name: str,
    spec: QuantizedSpec,
    rounded: dict[str, Tensor],
    exact: dict[str, Tensor],
    costs: Tensor | None,
) -> Tensor:
    """The factor `name` for those of `rounded` so far, errors weighted by `costs` of their inputs."""
    structure = STRUCTURES[spec.structure]
    if name not in structure.solved or spec.bits not in SOLVED:
        return exact[name]
    now = {**exact, **rounded}
    if costs is not None:
        roots = costs.to(exact["V"]).clamp_min(0).sqrt()
        now, exact = ({**f, "V": f["V"] * _by_input(f["V"], roots)} for f in (now, exact))
    return structure.factorizer().solve_again(name, now, exact, spec.of)


def _by_input(V: Tensor, values: Tensor) -> Tensor:
    """`values` [i] as they belong to the rows of V: [i, 1], or [b, p, 1], or alike for all groups."""
    same = V.dim() == 2 or V.shape[1] == len(values)
    return values[:, None] if same else values.view(V.shape[0], V.shape[1], 1)


def _costs_of(spec: QuantizedSpec, name: str, costs: Tensor | None) -> Tensor | None:
    """What errors in the matrix of a factor cost: by input for V, else alike."""
    if costs is None or name != "V":
        return None
    V_shape = spec.shapes()["V"]
    rows = _by_input(costs.new_empty(V_shape, device="meta"), costs)
    return rows.movedim(-1, -2)  # [1, i] or [b, 1, p], as V is packed


def _even(spec: Spec, factors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same product with columns of U of one size, V taking the rest, for rows that share a scale."""
    if not isinstance(spec, LowRankSpec | MonarchSpec | BlastSpec):
        return factors
    U, V = factors["U"], factors["V"]
    if isinstance(spec, MonarchSpec):  # U [k, q, l·s] belongs to V [l, p, k·s]
        shape = spec.blocks, spec.blocks, spec.block_rank
        size = _size(U, 1).unflatten(-1, shape[1:]).squeeze(1)  # [k, l, s]
        other = size.transpose(0, 1).flatten(1)[:, None]
        return {**factors, "U": U / size.flatten(1)[:, None], "V": V * other}
    if isinstance(spec, BlastSpec):
        size = _size(U.flatten(0, 1), 0)  # [1, r], of all blocks
        return {**factors, "U": U / size, "V": V * size}
    size = _size(U, -2)
    return {**factors, "U": U / size, "V": V * size}


def _size(factor: Tensor, axis: int) -> Tensor:
    found = factor.square().mean(axis, keepdim=True).sqrt()
    return torch.where(found > 0, found, torch.ones_like(found))


def _pack(
    spec: QuantizedSpec, name: str, factor: Tensor, dtype: torch.dtype, costs: Tensor | None = None
) -> dict[str, Tensor]:
    """`pack_factor`, checked."""
    stored = pack_factor(spec, name, factor, dtype, costs)
    check_scales(name, stored)
    return stored


def check_scales(name: str, stored: Mapping[str, Tensor]) -> None:
    """Raise NumericsError for scales of a factor that are not finite."""
    for tensor in stored.values():
        if is_number(tensor) and not bool(torch.isfinite(tensor).all()):
            raise NumericsError(
                f"scales of {name} are not finite in {tensor.dtype}; take a model in bfloat16 or "
                "float32, or leave the layer out"
            )


def _square(tensor: Tensor) -> float:
    return float(tensor.square().sum(dtype=torch.float64))


def _work(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
