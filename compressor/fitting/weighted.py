"""Fits one layer to calibration: moments of its inputs give the target and the norm of its fit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import cast

import torch
from torch import Tensor

from blr.compressor.base.device import moved
from blr.compressor.fitting.factorize import Kept, LayerJob, keep_factors, layer_errors
from blr.compressor.fitting.rounding import Metric, is_latent, plain_fit, round_layers
from blr.compressor.structures import lowrank
from blr.compressor.structures.base import relative_error
from blr.compressor.structures.blast import is_shared
from blr.compressor.structures.linalg import (
    add_ridge,
    balance,
    cholesky,
    recorded_fallbacks,
    solve_factored,
    solve_upper,
)
from blr.compressor.structures.packing import restored
from blr.compressor.structures.specs import BlastSpec, KroneckerSpec, LowRankSpec, Spec

RIDGE = 0.01  # added to H, relative to its mean diagonal: without it targets grow thirty-fold
CPU_ROUNDS = 40  # default of BLAST on a CPU: 100 take twice the time for 3% of perplexity
OUTPUT_RIDGE = 1e-3  # added to the output metric, relative to its mean diagonal


@dataclass
class Moments:
    """Sums over tokens in float64. gram H = Σ x̂ x̂ᵀ [i, i] is of the inputs x̂ that the compressed
    blocks give; cross = Σ (x − x̂) x̂ᵀ [i, i] also of the dense inputs x; drift = Σ (h − ĥ) x̂ᵀ [d, i]
    of the residual streams h and ĥ that the layers' outputs are added to. tokens: how many chose the
    expert whose inputs these are."""

    gram: Tensor
    cross: Tensor | None = None
    drift: Tensor | None = None
    tokens: int | None = None

    @cached_property
    def metric(self) -> Metric:
        """H scaled to a mean diagonal of 1; all layers of the group share it."""
        return Metric(self.gram / self.gram.diagonal().mean().clamp_min(1e-300))

    def target(self, weight: Tensor) -> Tensor:
        """The weight to fit in place of W [o, i], float64: the T that minimizes Σ ‖T x̂ − W x − (h −
        ĥ)‖² + λ‖T − W‖², which is W + (W cross + drift) (H + λ)⁻¹. Directions that tokens hardly show
        keep W. This is AA-SVD's target (arXiv 2604.02119) with drift and ridge added."""
        if self.cross is None:
            return weight
        right = weight @ self.cross
        if self.drift is not None:
            right = right + self.drift
        return weight + solve_factored(self._ridged, right.mT).mT

    @cached_property
    def _ridged(self) -> Tensor:
        """The lower Cholesky factor of H + λ; all layers of the group share it."""
        return cholesky(add_ridge(self.gram, RIDGE * self.gram.diagonal().mean()))


def products(
    student: Tensor, dense: Tensor | None = None, drift: Tensor | None = None
) -> dict[str, Tensor]:
    """What a batch adds to the moments, from inputs x̂ and x [n, i] and the drift h − ĥ [n, d]."""
    left = {"gram": student, "cross": None if dense is None else dense - student, "drift": drift}
    return {name: rows.mT @ student for name, rows in left.items() if rows is not None}


def output_root(information: Tensor, groups: int = 1) -> Tensor:
    """The upper Cholesky factor [o, o] of the outputs' Fisher information [o, o], or of its diagonal
    blocks by group of rows, with a small ridge."""
    parts = information.unflatten(0, (groups, -1)).unflatten(2, (groups, -1))
    own = torch.block_diag(*(parts[g, :, g] for g in range(groups)))
    return cholesky(add_ridge(own, OUTPUT_RIDGE)).mT


class WeightedFit:
    """One layer to fit in the norm of its inputs' `moments` and of its outputs' `metric` (as
    `metric_for` gives it, or None)."""

    def __init__(self, job: LayerJob, weight: Tensor, moments: Moments, metric: Tensor | None) -> None:
        work = moved(weight, job.device, torch.float64)
        work = work.mT.contiguous() if job.layer.transposed else work
        self.job, self.weight, self.moments = job, weight, moments
        self.target = moments.target(work)
        self.metric = None if metric is None else metric.to(job.device, torch.float64)

    @cached_property
    def root(self) -> Tensor | None:
        """The root of the cost of errors in the outputs, of a layer without groups."""
        return None if self.metric is None else output_root(self.metric)

    def fit(self, matrix: Tensor, spec: Spec) -> dict[str, Tensor]:
        """The factors of a plain structure."""
        return _fit(self.job, spec, matrix, self.moments.metric.gram, self.metric)

    def kept(self, found: Mapping[str, Tensor], notes: list[str]) -> Kept:
        """What is stored of fitted factors, with those before rounding, and the record."""
        job, dtype, target = self.job, self.job.stored_dtype(self.weight), self.target
        tensors, record = keep_factors(job, self.weight, found, {"notes": notes})
        latents = {n: t.to("cpu", dtype).contiguous() for n, t in found.items() if is_latent(n)}
        moved = {n: t.to(target.device) for n, t in tensors.items()}
        back = restored(job.planned.spec, moved, target.dtype)
        record["weighted_error"] = relative_error(target, back, self.moments.metric.gram)
        if self.moments.tokens is not None:
            record["tokens"] = self.moments.tokens
        return tensors | latents, record


def fit_together(fits: Sequence[WeightedFit]) -> list[Kept]:
    """Fit layers of one spec, shape and dtype. Returns of each what is stored, with the numbers before
    rounding, on the CPU; and the record, in which `weighted_error` is the relative error of the
    outputs."""
    job, dtype = fits[0].job, fits[0].job.stored_dtype(fits[0].weight)
    with layer_errors(job), recorded_fallbacks() as fallbacks:
        given = [fit.target for fit in fits], job.planned.spec, [fit.moments.metric for fit in fits]
        found = round_layers(*given, dtype, [fit.fit for fit in fits], partial(_fit_stack, fits))
        return [fit.kept(each, fallbacks) for fit, each in zip(fits, found, strict=True)]


def _fit_stack(fits: Sequence[WeightedFit], matrices: Tensor, spec: Spec) -> dict[str, Tensor]:
    """Low rank of the `matrices` [n, o, i] of layers of one shape."""
    shape = cast(LowRankSpec, spec)
    grams = torch.stack([fit.moments.metric.gram for fit in fits])
    roots = [fit.root for fit in fits if fit.root is not None]
    if roots:
        return _fit_low_rank(matrices, shape, grams, torch.stack(roots))
    dtype = fitting_dtype(matrices.device)
    return lowrank.fit(matrices.to(dtype), shape, grams.to(dtype)).tensors


def _fit_low_rank(target: Tensor, spec: LowRankSpec, gram: Tensor, root: Tensor) -> dict[str, Tensor]:
    """Low rank of [..., o, i] where errors in outputs cost what their `root` [..., o, o] says."""
    found = lowrank.fit(root @ target, spec, gram).tensors
    left = found["U"]
    if spec.groups > 1 and spec.side == "out":  # U [G, o/G, r] is all of [o, r]
        left = solve_upper(root, left.flatten(0, 1)).view_as(left)
    else:
        left = solve_upper(root, left)
    left, right = balance(left, found["V"])
    return {"U": left, "V": right}


def _fit(
    job: LayerJob, spec: Spec, target: Tensor, gram: Tensor, metric: Tensor | None
) -> dict[str, Tensor]:
    """Fit the target with outputs weighted by `metric`, then take the weights out of the factors. Low
    rank takes the whole metric in closed form, each group of output rows its own block of it. Others
    take its diagonal [o], which scales rows."""
    if metric is not None and isinstance(spec, LowRankSpec):
        root = output_root(metric, spec.groups if spec.side == "out" else 1)
        return _fit_low_rank(target, spec, gram, root)
    dtype, options = fitting_dtype(job.device), job.options
    if isinstance(spec, BlastSpec) and job.device.type == "cpu" and options.rounds is None:
        options = replace(options, rounds=CPU_ROUNDS)
    fit = plain_fit(options, gram)
    if metric is None:
        return fit(target.to(dtype), spec)
    rows = metric.sqrt() + OUTPUT_RIDGE
    return divide_rows(fit((rows[:, None] * target).to(dtype), spec), spec, rows.to(dtype))


def metric_for(spec: Spec, information: Tensor) -> Tensor:
    """The part of the Fisher information of its outputs that a fit takes: all of [o, o] or the diagonal
    [o]. `information` may be a diagonal already."""
    if is_whole(spec):
        return information if information.dim() == 2 else torch.diag(information)
    return information.diagonal() if information.dim() == 2 else information


def is_whole(spec: Spec) -> bool:
    """Whether a fit takes all of the Fisher information of its outputs; low rank does."""
    return spec.fitted().structure == LowRankSpec.structure


def fitted_together(job: LayerJob) -> bool:
    """Whether the layer is so large that processes fit it together, instead of sharing out layers."""
    spec = job.planned.spec.fitted()
    if not isinstance(spec, BlastSpec) or job.planned.solver == "precgd":
        return False
    return is_shared(spec, fitting_dtype(job.device).itemsize)


def fitting_dtype(device: torch.device) -> torch.dtype:
    """float64 on a CPU. On a GPU float32, for there float64 can be 64 times as slow."""
    return torch.float64 if device.type == "cpu" else torch.float32


def divide_rows(tensors: dict[str, Tensor], spec: Spec, rows: Tensor) -> dict[str, Tensor]:
    """Factors of ``diag(rows)⁻¹ W'`` from factors of W'; `rows` is [o]."""
    if isinstance(spec, KroneckerSpec):
        a, b, _, d = spec.patterns[0]
        first = tensors["factors.0"] / rows.view(a, b, 1, d)
        return {**tensors, "factors.0": first}
    left = tensors["U"]
    return {**tensors, "U": left / rows.view(*left.shape[:-1], 1)}
