"""Factorizes planned layers, which processes share out; the journal keeps each finished one."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import cast

import torch
from torch import Tensor

from blr.compressor import __version__
from blr.compressor.base.device import moved, working_dtype
from blr.compressor.base.errors import CapabilityError, NumericsError, StorageError
from blr.compressor.base.exhaustion import exhausted
from blr.compressor.base.process_environment import share_out
from blr.compressor.base.processes import Processes
from blr.compressor.base.progress import Progress
from blr.compressor.base.quoting import first_line
from blr.compressor.base.threads import on_one_thread
from blr.compressor.checkpoint.header import TensorEntry
from blr.compressor.checkpoint.source import Source
from blr.compressor.fitting.moments import Moments
from blr.compressor.fitting.rounding import is_latent, plain_fit, round_layer, round_layers
from blr.compressor.planning.forecast import predicted_cost
from blr.compressor.planning.layers import Layer
from blr.compressor.planning.plan import Plan, PlannedLayer
from blr.compressor.recipe.schema import Recipe
from blr.compressor.structures import lowrank
from blr.compressor.structures.base import FitOptions, relative_error
from blr.compressor.structures.blast import SHARES, rows_at_once
from blr.compressor.structures.linalg import (
    add_ridge,
    balance,
    cholesky,
    recorded_fallbacks,
    solve_upper,
)
from blr.compressor.structures.packing import restored
from blr.compressor.structures.specs import BlastSpec, DenseSpec, KroneckerSpec, LowRankSpec, Spec
from blr.compressor.workspace.journal import Journal, layer_key
from blr.kernels.common.available import kernels_on
from blr.kernels.fp8.reference import is_number

ALGORITHM = 15  # to be raised when results change, so that older journals are not used
SMALL = 1 << 20  # weights of a layer that a CPU fits on one thread: two gain nothing for 576 × 1536
# Relative variance that BLAST's solver assumes of each term of a product, by bits of its factors: it
# keeps terms from cancelling. For 4 bits and fewer it is what compensation leaves.
NOISE = {None: 5e-4, 8: 1e-3, 4: 0.005, 3: 0.02, 2: 0.1}
CPU_ROUNDS = 40  # default of BLAST on a CPU: 100 take twice the time for 3% of perplexity
OUTPUT_RIDGE = 1e-3  # added to the output metric, relative to its mean diagonal


@dataclass(frozen=True)
class Work:
    """The weights, the recipe, and the journal that keeps finished layers."""

    source: Source
    recipe: Recipe
    journal: Journal
    progress: Progress
    device: str = "auto"
    offline: bool = False

    @cached_property
    def processes(self) -> Processes:
        return Processes(self.device)

    @property
    def target(self) -> torch.device:
        return self.processes.device

    def missing(self, keys: list[str]) -> list[str]:
        """Those of `keys` under which the journal has nothing; the same in all processes."""
        lacking = self.processes.first and [key for key in keys if self.journal.load(key) is None]
        return self.processes.told(lacking)

    def share(
        self, specs: Mapping[str, Spec], compute: Callable[[str], None], calibrated: bool = False
    ) -> None:
        """Fit the layer under each key, divided over the processes by predicted cost, and wait until the
        journal has all. On a CPU a process fits several small ones at once."""
        costs = [predicted_cost(spec, calibrated) for spec in specs.values()]
        owners = zip(specs, share_out(costs, self.processes.count), strict=True)
        mine = [key for key, owner in owners if owner == self.processes.rank]
        most = SMALL if self.target.type == "cpu" else 0
        on_one_thread([key for key in mine if specs[key].dense_parameters <= most], compute)
        for key in mine:
            if specs[key].dense_parameters > most:
                compute(key)
        self.processes.wait()
        self.journal.await_all(list(specs))


Result = tuple[dict[str, TensorEntry], dict[str, object]]  # stored factors by suffix, record
Kept = tuple[dict[str, Tensor], dict[str, object]]  # the same before they are stored


@dataclass(frozen=True)
class LayerJob:
    """One layer to factorize on `device`, by this process alone or by `processes` together."""

    planned: PlannedLayer
    recipe: Recipe
    device: torch.device
    processes: Processes | None = None

    @property
    def layer(self) -> Layer:
        return self.planned.layer

    @property
    def options(self) -> FitOptions:
        seed = layer_seed(self.recipe.seed, self.layer.module)
        noise = NOISE[getattr(self.planned.spec, "bits", None)]
        return FitOptions(self.planned.solver, self.planned.rounds, seed, self.processes, noise)

    def stored_dtype(self, weight: Tensor) -> torch.dtype:
        """The dtype of stored numbers that are not packed: the recipe's, or else the weight's."""
        return getattr(torch, self.recipe.dtype) if self.recipe.dtype else weight.dtype

    def key(self, weight: str, prefix: str = "") -> str:
        """The journal's key for the factors of a weight with the SHA-256 `weight`; `prefix` is the
        digest of whatever else they depend on."""
        device = self.device
        threads = torch.get_num_threads() if device.type == "cpu" else None
        return layer_key(
            prefix=prefix,
            weight=weight,
            dtype=self.layer.entry.dtype,
            shape=self.layer.entry.shape,
            spec=self.planned.spec.to_dict(),
            options=[self.planned.solver, self.planned.rounds, self.recipe.seed, self.recipe.dtype],
            module=self.layer.module,
            algorithm=[ALGORITHM, __version__, torch.__version__],
            machine=[device.type, threads, kernels_on(device)],  # what changes the bits of results
        )


def factorize_layers(work: Work, plan: Plan) -> dict[str, Result]:
    """Fit every planned layer, or take it from the journal; factors and record by module."""
    planned = [LayerJob(each, work.recipe, work.target) for each in plan.layers]
    jobs = dict(zip(keys_of(work, planned), planned, strict=True))
    specs = {key: jobs[key].planned.spec for key in work.missing(list(jobs))}
    with work.progress.layers(-(-len(specs) // work.processes.count)) as advance:

        def compute(key: str) -> None:
            job = jobs[key]
            advance(job.layer.module)
            with layer_errors(job):
                tensors, record = factorize(work.source.load_tensor(job.layer.entry), job)
            work.journal.store(key, tensors, record)

        work.share(specs, compute)
    results = {}
    for key, job in jobs.items():
        done = work.journal.load(key)
        if done is None:
            module = job.layer.module
            raise StorageError(f"{module}: its fit was damaged on the disk; run the same command again")
        factors, record = done
        results[job.layer.module] = {n: factors[n] for n in job.planned.spec.stored()}, record
    return results


def keys_of(work: Work, jobs: list[LayerJob], prefix: str = "") -> list[str]:
    """The journal's keys of the jobs' factors; processes share out the hashing of weights."""
    mine = {n: job for n, job in enumerate(jobs) if work.processes.owns(n)}
    keys = {n: job.key(work.source.sha256(job.layer.entry), prefix) for n, job in mine.items()}
    known = work.processes.merged(keys)
    return [known[n] for n in range(len(jobs))]


def layer_seed(seed: int, module: str) -> int:
    """A seed for one layer, whichever other layers are factorized."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{module}".encode()).digest()[:7], "big")


def factorize(weight: Tensor, job: LayerJob) -> Kept:
    """Fit one layer to its stored `weight`: its factors as stored, on the CPU, and its record."""
    work = moved(weight, job.device, working_dtype(job.device))
    work = work.mT.contiguous() if job.layer.transposed else work
    if job.planned.spec.structure == DenseSpec.structure:
        work = work.to(weight.dtype)  # as an export rounds it
    with recorded_fallbacks() as fallbacks:
        given = None, job.stored_dtype(weight), plain_fit(job.options)
        found = round_layer(work, job.planned.spec, *given)
    return keep_factors(job, weight, found, {"notes": fallbacks})


def keep_factors(
    job: LayerJob, weight: Tensor, factors: Mapping[str, Tensor], record: dict[str, object]
) -> Kept:
    """Round fitted factors to the dtype they are stored in, on the CPU, and add type, spec, error and
    bits a weight to the layer's `record`. Packed factors stay as they are."""
    spec, dtype = job.planned.spec, job.stored_dtype(weight)
    found = {name: factors[name].detach() for name in spec.stored()}
    dtypes = {name: dtype if is_number(t) else t.dtype for name, t in found.items()}
    tensors = {name: t.to("cpu", dtypes[name]).contiguous() for name, t in found.items()}
    check_range(tensors)
    work = moved(weight, job.device, working_dtype(job.device))
    work = work.mT if job.layer.transposed else work
    back = restored(spec, {n: t.to(work.device) for n, t in tensors.items()}, work.dtype)
    facts = {"type": job.layer.type, "spec": spec.to_dict(), "error": relative_error(work, back)}
    return tensors, {**record, **facts, "bits": job.planned.bits / spec.dense_parameters}


@contextmanager
def layer_errors(job: LayerJob) -> Iterator[None]:
    """While active, name the layer in NumericsError, and in CapabilityError for want of memory."""
    try:
        yield
    except NumericsError as error:
        raise NumericsError(f"{job.layer.module}: {error}") from error
    except torch.linalg.LinAlgError as error:
        raise NumericsError(f"{job.layer.module}: {first_line(error)}; --exclude the layer") from error
    except (RuntimeError, MemoryError) as error:
        if exhausted(error) is None:
            raise
        raise CapabilityError(
            f"{job.layer.module}: out of memory on {job.device} for a layer of {job.layer.entry.shape}; "
            "try --device cpu or a machine with more memory"
        ) from error


def check_range(tensors: dict[str, Tensor]) -> None:
    """Raise NumericsError if factors are not finite in the dtype they are stored in."""
    for name, tensor in tensors.items():
        if is_number(tensor) and not bool(torch.isfinite(tensor).all()):
            raise NumericsError(
                f"factor {name} is not finite in {tensor.dtype}; "
                "store the factors as --dtype float32 or bfloat16, or --exclude the layer"
            )


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
        """The factors of a plain structure: fit the matrix with outputs weighted by the metric, then
        take the weights out. Low rank takes the whole metric in closed form, each group of output rows
        its own block of it. Others take its diagonal [o], which scales rows."""
        job, gram, metric = self.job, self.moments.metric.gram, self.metric
        if metric is not None and isinstance(spec, LowRankSpec):
            root = output_root(metric, spec.groups if spec.side == "out" else 1)
            return _fit_low_rank(matrix, spec, gram, root)
        dtype, options = fitting_dtype(job.device), job.options
        if isinstance(spec, BlastSpec) and job.device.type == "cpu" and options.rounds is None:
            options = replace(options, rounds=CPU_ROUNDS)
        fit = plain_fit(options, gram)
        if metric is None:
            return fit(matrix.to(dtype), spec)
        rows = metric.sqrt() + OUTPUT_RIDGE
        return divide_rows(fit((rows[:, None] * matrix).to(dtype), spec), spec, rows.to(dtype))

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
    return lowrank.fit(matrices.to(dtype), shape, grams.to(dtype))


def _fit_low_rank(target: Tensor, spec: LowRankSpec, gram: Tensor, root: Tensor) -> dict[str, Tensor]:
    """Low rank of [..., o, i] where errors in outputs cost what their `root` [..., o, o] says."""
    found = lowrank.fit(root @ target, spec, gram)
    left = found["U"]
    # U [G, o/G, r] of groups of rows is all of [o, r]
    rows = left.flatten(0, 1) if spec.groups > 1 and spec.side == "out" else left
    solved = solve_upper(root, rows).view_as(left)
    return dict(zip("UV", balance(solved, found["V"]), strict=True))


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
    return spec.blocks >= SHARES * rows_at_once(spec, fitting_dtype(job.device).itemsize, True)


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
