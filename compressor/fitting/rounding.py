"""From a weight to what is stored of it in few bits: dense, structured, and dense with a correction.

Rounding here is to the nearest level of scales that are searched, weighted by the diagonal of the
inputs' Gram matrix where that is known. Of 4 bits and fewer, which round coarsely, factors that follow
from the others by least squares are solved again behind those that are rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blr.compressor.errors import NumericsError
from blr.compressor.modeling.quantized import rows_at_once
from blr.compressor.structures.base import FitOptions, relative_error, weighted_norm_squared
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
)

PRODUCT = "product"
SOLVED = (4, 3, 2)  # bits for which factors are solved again: 8 have nothing to make good
ROUNDS = 4  # of rounding and correcting in turn
CORRECTION_ROUNDS = 10  # of an iterative solver in each of them, unless the recipe says


@dataclass(frozen=True)
class Quantized:
    """`tensors` by stored name (``V_q``, ``V_scale``, ``S``); `errors`, relative Frobenius, by factor
    and, under "product", of the weight they multiply out to."""

    tensors: dict[str, Tensor]
    errors: dict[str, float]


def round_layer(
    weight: Tensor,
    spec: Spec,
    gram: Tensor | None,
    dtype: torch.dtype,
    options: FitOptions | None = None,
    factors: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """What is stored of one layer, by the names of ``spec.stored()``, on the weight's device.

    Args:
        weight: W [o, i], float32 or float64, or the target in its place.
        gram: H [i, i] of the inputs, None for errors that all cost the same.
        dtype: of scales and of what is not packed.
        options: of the fit of a structure; `factors`: canonical ones that are fitted already.

    Raises:
        NumericsError: scales that are not finite in `dtype`.
    """
    options = options or FitOptions()
    if isinstance(spec, CorrectedSpec):
        return _corrected(weight, spec, gram, dtype, options)
    plain = spec.of if isinstance(spec, QuantizedSpec) else spec
    costs = None if gram is None else gram.diagonal()
    if isinstance(spec, QuantizedSpec) and isinstance(plain, DenseSpec):
        return quantize_dense(weight, spec, dtype, costs).tensors
    if factors is None:
        metric = None if gram is None else gram.to(weight)
        factors = STRUCTURES[plain.structure].factorizer().fit(weight, plain, metric, options).tensors
    if isinstance(spec, QuantizedSpec):
        return quantize_factors(spec, dict(factors), dtype, costs).tensors
    return {name: factor.to(dtype).contiguous() for name, factor in factors.items()}


def quantize_dense(
    weight: Tensor,
    spec: QuantizedSpec,
    scale_dtype: torch.dtype | None = None,
    costs: Tensor | None = None,
) -> Quantized:
    """Quantize one dense weight [o, i], errors in its columns costing `costs` [i].

    Raises NumericsError when its scales are not finite.
    """
    parts, lost, whole = [], 0.0, 0.0
    for rows in weight.split(rows_at_once(weight.shape[1])):
        own = replace(spec, of=DenseSpec(spec.in_features, len(rows)))
        stored = _pack(own, "weight", rows, scale_dtype or weight.dtype, costs)
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
        if spec.format_of(name):
            errors[name] = relative_error(factor, back[name])
    reconstruct = STRUCTURES[spec.structure].factorizer().reconstruct
    errors[PRODUCT] = relative_error(reconstruct(exact, spec.of), reconstruct(back, spec.of))
    return Quantized(tensors, errors)


def _corrected(
    weight: Tensor, spec: CorrectedSpec, gram: Tensor | None, dtype: torch.dtype, options: FitOptions
) -> dict[str, Tensor]:
    """Q and S in turn, each of what the other leaves; the best of `ROUNDS`."""
    best, kept = float("inf"), dict[str, Tensor]()
    if options.rounds is None:
        options = replace(options, rounds=CORRECTION_ROUNDS)
    added, metric = torch.zeros_like(weight), None if gram is None else gram.to(weight)
    for _ in range(ROUNDS):
        base = round_layer(weight - added, spec.base, gram, dtype)
        left = weight - restored(spec.base, base, weight.dtype)
        correction = round_layer(left, spec.correction, gram, dtype, options)
        added = restored(spec.correction, correction, weight.dtype)
        missed = weighted_norm_squared(left - added, metric)
        if missed < best:
            named = {f"base.{n}": t for n, t in base.items()}
            best, kept = missed, named | {f"correction.{n}": t for n, t in correction.items()}
    return kept


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
    """What errors in the matrix of a factor cost: by input for V and dense weights, else alike."""
    if costs is None or name not in ("V", "weight"):
        return None
    if name == "weight":
        return costs
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
    """`pack_factor`. Raises NumericsError for scales that are not finite."""
    stored = pack_factor(spec, name, factor, dtype, costs)
    for tensor in stored.values():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise NumericsError(
                f"scales of {name} are not finite in {tensor.dtype}; take a model in bfloat16 or "
                "float32, or leave the layer out"
            )
    return stored


def _square(tensor: Tensor) -> float:
    return float(tensor.square().sum(dtype=torch.float64))


def _work(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
