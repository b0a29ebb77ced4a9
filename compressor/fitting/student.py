"""A block with its fitted layers in place, which can be trained, kept in the journal and put back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from blr.compressor.base.processes import sum_in_order
from blr.compressor.checkpoint.header import TORCH_NAMES, TensorEntry
from blr.compressor.fitting.block_passes import Batch, captured_inputs, run_block
from blr.compressor.fitting.blocks import BlockModel
from blr.compressor.fitting.factorize import (
    LayerJob,
    Result,
    Work,
    check_range,
    keep_factors,
    layer_errors,
)
from blr.compressor.fitting.rounding import Metric
from blr.compressor.fitting.sensitivity import Sensitivity
from blr.compressor.fitting.trainable_layers import Twin, compose_layers, make_twin
from blr.compressor.fitting.weighted import Moments, products
from blr.compressor.loading.training_kernels import fuse_trained
from blr.compressor.planning.plan import Plan
from blr.compressor.planning.training_sizes import WIDEST
from blr.compressor.structures.latent import Plain, Trained

NORM = "norm"  # prefix of norms in the journal


@dataclass
class FitRun:
    """One calibrated compression. `finish` epochs train the whole model, for which its `students` are
    kept; `prefix` is the digest of the calibration and of every layer finished so far; `norms` were
    trained, by tensor."""

    work: Work
    model: BlockModel
    plan: Plan
    batches: list[Batch]
    sensitivity: Sensitivity | None
    epochs: int
    prefix: str
    finish: int = 0
    students: list[Student] = field(default_factory=list)
    results: dict[str, Result] = field(default_factory=dict)
    norms: dict[str, TensorEntry] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.planned = {planned.layer.module: planned for planned in self.plan.layers}

    def job(self, module: str) -> LayerJob:
        return LayerJob(self.planned[module], self.work.recipe, self.model.device)

    @property
    def mine(self) -> dict[int, Batch]:
        """The batches of this process, by number."""
        return {n: batch for n, batch in enumerate(self.batches) if self.work.processes.owns(n)}


class Student:
    """Block `index` as it is compressed so far: `twins`, by name in the block, in the place of fitted
    layers, and `norms`, parameters that are trained too, by the names of their tensors."""

    def __init__(self, run: FitRun, index: int) -> None:
        self.run, self.index = run, index
        self.block = run.model.load_block(index)
        if run.model.device.type == "cuda":
            fuse_trained(self.block)
        self.twins: dict[str, Twin] = {}
        self.norms = self._norms()

    def _norms(self) -> dict[str, nn.Parameter]:
        """Where training them pays: beside packed weights (LOG, 2026-11-22), not beside plain factors
        (LOG, 2026-11-21)."""
        if not any(planned.spec.quantized for planned in self.run.plan.layers):
            return {}
        path = f"{self.run.model.path}.{self.index}"
        parts = {n: p for n, p in self.block.named_modules() if "Norm" in type(p).__name__}
        named = {f"{path}.{n}.{k}": v for n, p in parts.items() for k, v in p.named_parameters()}
        known = self.run.model.names
        return {known[name]: value for name, value in named.items() if name in known}

    def module(self, name: str) -> str:
        """Name on disk of the layer called `name` in the block."""
        return self.run.model.stored_module(f"{self.run.model.path}.{self.index}.{name}")

    def weight(self, module: str) -> Tensor:
        """The dense one, as stored."""
        return self.run.model.source.load_tensor(self.run.planned[module].layer.entry)

    @property
    def trained(self) -> list[Trained]:
        """What of the block can be trained, layers and norms, which cost nothing to store."""
        found: list[Trained] = [part for twin in self.twins.values() for part in twin.parts.values()]
        return found + [Plain(parameter) for parameter in self.norms.values()]

    def install(self, name: str, key: str) -> None:
        """Put the fit of one layer in its place, and among the results."""
        entries, record, found = self._read(key)
        self._put(name, entries, record, found, "")

    def _read(self, key: str) -> tuple[dict[str, TensorEntry], Any, dict[str, Tensor]]:
        """What the journal has under a key: entries, record, tensors."""
        known = self.run.work.journal.load(key)
        assert known is not None
        return *known, self.run.work.journal.tensors(key)

    def _put(
        self, name: str, entries: Mapping[str, TensorEntry], record: Any, found: Mapping[str, Tensor],
        start: str,
    ) -> None:  # fmt: skip
        """Put one layer, whose tensors' names start with `start`, in place and among the results."""
        self._place(name, {n.removeprefix(start): t for n, t in found.items() if n.startswith(start)})
        module = self.module(name)
        factors = {n: entries[start + n] for n in self.run.planned[module].spec.stored()}
        self.run.results[module] = (factors, record)

    def _place(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        old, device = self.block.get_submodule(name), self.run.model.device
        held = {n: tensor.to(device) for n, tensor in tensors.items()}
        spec = self.run.planned[self.module(name)].spec
        twin = make_twin(spec, held, getattr(old, "bias", None))
        compose_layers(twin.module, WIDEST)
        parent, _, leaf = name.rpartition(".")
        setattr(self.block.get_submodule(parent), leaf, twin.module.requires_grad_(False))
        self.twins[name] = twin

    def keep(self, key: str, facts: Mapping[str, Any], metrics: dict[str, Metric]) -> None:
        """Store what training has made of the block, with `facts` in every layer's record; `metrics` of
        `read_by` are given up as they are used."""
        tensors: dict[str, Tensor] = {}
        records: dict[str, Any] = {}
        for name, twin in self.twins.items():
            module = self.module(name)
            job, weight = self.run.job(module), self.weight(module)
            dtype, old = job.stored_dtype(weight), dict(self.run.results[module][1])
            old.pop("weighted_error", None)  # of the factors that these replace
            with layer_errors(job):
                found = twin.stored(dtype, metrics.pop(name, None))
                stored, record = keep_factors(job, weight, found, old)
            latents = twin.latents(dtype) if self.run.finish else {}
            tensors |= {f"{module}:{suffix}": t for suffix, t in (stored | latents).items()}
            records[module] = {**record, **facts}
        for name, parameter in self.norms.items():
            dtype = getattr(torch, TORCH_NAMES[self.run.model.source.entries[name].dtype])
            tensors[f"{NORM}:{name}"] = parameter.detach().to("cpu", dtype)
        check_range(tensors)
        self.run.work.journal.store(key, tensors, records)

    def take(self, key: str) -> None:
        """Put back, into block and results, what was stored."""
        entries, records, found = self._read(key)
        for name in list(self.twins):
            module = self.module(name)
            self._put(name, entries, records[module], found, f"{module}:")
        for name, parameter in self.norms.items():
            parameter.data.copy_(found[f"{NORM}:{name}"])
            self.run.norms[name] = entries[f"{NORM}:{name}"]


@torch.no_grad()
def read_by(
    student: Student, states: Mapping[int, Tensor]
) -> tuple[dict[str, Metric], dict[int, Tensor]]:
    """Metrics of the inputs of every layer, by name in the block, over the batches of all processes, and
    the states behind the block. `states`: that enter it, of this process's batches by number."""
    run, behind = student.run, dict[int, Tensor]()
    groups = [group.modules for group in run.model.groups(student.block)]
    heads = [names[0] for names in groups]

    def grams(n: int) -> dict[str, Tensor]:
        batch = run.batches[n]
        with captured_inputs(student.block, heads) as kept:
            out = run_block(student.block, states[n].to(run.model.device), batch)
        behind[n] = out.to(states[n].device)
        return {name: products(batch.rows(kept[name]))["gram"] for name in heads}

    sums = sum_in_order(run.work.processes, len(run.batches), grams, heads, torch.float64)
    found = {name: Moments(sums.pop(name)).metric for name in heads}
    return {name: found[names[0]] for names in groups for name in names}, behind


def train_and_keep(
    run: FitRun, students: list[Student], keys: list[str], states: Mapping[int, Tensor], name: str,
    train: Callable[[], tuple[float, float]],
) -> None:  # fmt: skip
    """Have what `train` makes of the students in the journal, each under its key, and take it. `states`
    enter the first student; `name` is what was trained, in the layers' records."""
    work = run.work
    if work.missing(keys):
        found = train()
        twins = (twin for student in students for twin in student.twins.values())
        float8 = any(getattr(twin.spec, "fp8", False) for twin in twins)  # rounded behind training
        for student, key in zip(students, keys, strict=True):
            metrics, states = read_by(student, states) if float8 else ({}, states)
            if work.processes.first:
                student.keep(key, {name: list(found)}, metrics)
        work.processes.wait()
        work.journal.await_all(keys)
    for student, key in zip(students, keys, strict=True):
        student.take(key)
