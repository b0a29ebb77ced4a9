"""Layers and blocks as they are trained: fitted ones in the place of dense ones, kept and restored.

Those in few bits are trained as full numbers, others by their dense weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from blr.compressor.base.processes import sum_in_order
from blr.compressor.checkpoint.header import TORCH_NAMES, TensorEntry
from blr.compressor.fitting.block_passes import Batch, captured_inputs, run_block
from blr.compressor.fitting.blocks import BlockModel
from blr.compressor.fitting.composed import Sum, compose_layers
from blr.compressor.fitting.experts import Joined, StackedExperts, experts_of, kind_of, watched_experts
from blr.compressor.fitting.factorize import (
    LayerJob,
    Result,
    Work,
    check_range,
    keep_factors,
    layer_errors,
)
from blr.compressor.fitting.moments import Moments, products
from blr.compressor.fitting.rounding import Metric, latent_name, round_factors
from blr.compressor.fitting.sensitivity import Sensitivity
from blr.compressor.modeling.fused import fuse_trained
from blr.compressor.modeling.layers import StructuredLinear
from blr.compressor.planning.plan import Plan
from blr.compressor.planning.training_sizes import WIDEST
from blr.compressor.structures.latent import MOST, GroupPlace, Latent, Plain, RoundedGrid, Trained
from blr.compressor.structures.packing import factors_of, from_matrix, part_of, to_matrix
from blr.compressor.structures.specs import DenseSpec, Spec, stored_names
from blr.kernels.decode.quantized.reference import pack

NORM = "norm"  # begins the names of norms in the journal


@dataclass(frozen=True)
class Twin:
    """The trainable form of a stored layer: `module` computes with the values that are stored, and
    `parts` are its trained parameters by the names of factors. The bias is not among them."""

    spec: Spec
    module: nn.Module
    parts: dict[str, Trained]

    def stored(self, dtype: torch.dtype, metric: Metric | None = None) -> dict[str, Tensor]:
        """What is stored of the layer, as ``spec.stored()`` names it; unpacked numbers are in `dtype`.
        Factors in float8 are rounded only here, in the `metric` of the layer's inputs."""
        found: dict[str, Tensor] = {}
        if self.spec.corrected:
            for half, spec in self.spec.parts():
                twin = Twin(spec, self.module.get_submodule(half), part_of(self.parts, half))
                found |= {f"{half}.{name}": tensor for name, tensor in twin.stored(dtype).items()}
            return found
        if (packing := self.spec.packing) is not None and packing.fp8:
            factors = {name: part.parameter.detach().float() for name, part in self.parts.items()}
            return round_factors(factors, packing, metric, dtype)
        for name, part in self.parts.items():
            if isinstance(part, Plain):
                found[name] = part.parameter.detach().to(dtype).contiguous()
            else:
                levels, scale = part.rounded()
                packed = pack(levels, part.grid.bits, part.grid.group)
                found |= dict(zip(stored_names(name), (packed, scale), strict=True))
        return found

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Compute with the stored `tensors` of a layer that has no correction."""
        factors = factors_of(self.spec, tensors, torch.float32)
        for name, part in self.parts.items():
            part.parameter.copy_(factors[name])

    def latents(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The numbers behind packed ones, on the CPU, by `latent_name`; `make_twin` takes them."""
        found = {name: part.full() for name, part in self.parts.items() if isinstance(part, Latent)}
        return {latent_name(name): t.to("cpu", dtype).contiguous() for name, t in found.items()}


def make_twin(spec: Spec, tensors: Mapping[str, Tensor], bias: Tensor | None = None) -> Twin:
    """The trainable form of a stored layer, in float32 on the device of its `tensors`: those that
    ``spec.stored()`` names, and the numbers behind packed ones where they are known."""
    if spec.corrected:
        halves = {name: make_twin(part, part_of(tensors, name)) for name, part in spec.parts()}
        module: nn.Module = Sum(halves["base"].module, halves["correction"].module)
        parts = {f"{n}.{k}": part for n, half in halves.items() for k, part in half.parts.items()}
    else:
        factors = factors_of(spec, tensors, torch.float32)
        module = _plain_module(spec, factors)
        found = {name: module.get_parameter(name) for name in spec.shapes()}
        parts = {name: _part(spec, name, p, tensors) for name, p in found.items()}
    if bias is not None:
        module.bias = nn.Parameter(bias.detach().float(), requires_grad=False)
    return Twin(spec, module, parts)


def _plain_module(spec: Spec, factors: dict[str, Tensor]) -> nn.Module:
    plain = spec.plain
    with torch.device("meta"):
        if plain.structure == DenseSpec.structure:
            module: nn.Module = nn.Linear(plain.in_features, plain.out_features, bias=False)
        else:
            module = StructuredLinear(plain, bias=False)
    module.load_state_dict(factors, assign=True)
    return module.requires_grad_(False)


def _part(spec: Spec, name: str, parameter: nn.Parameter, tensors: Mapping[str, Tensor]) -> Trained:
    packing = spec.packing
    if packing is None or packing.fp8 or (form := packing.format_of(name)) is None:
        return Plain(parameter)
    place = GroupPlace(partial(to_matrix, packing, name), partial(from_matrix, packing, name))
    scale = tensors[stored_names(name)[1]]
    grid = RoundedGrid(*form, scale.dtype, packing.curved, packing.superblocks)
    return Latent(parameter, grid, place, scale, tensors.get(latent_name(name)))


@dataclass
class FitRun:
    """One calibrated compression. `finish` epochs train the whole model at the end, for which its
    `students` are kept. `prefix` is the digest of the calibration and of every layer finished so far;
    `norms` are those that were trained, by tensor name."""

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
        """This process's batches, by number."""
        return {n: batch for n, batch in enumerate(self.batches) if self.work.processes.owns(n)}


class Student:
    """Block `index` as compressed so far: `twins` are its fitted layers, by name in the block, and
    `norms` other parameters that are trained, by the names of their tensors."""

    def __init__(self, run: FitRun, index: int) -> None:
        self.run, self.index = run, index
        self.block = run.model.load_block(index)
        if run.model.device.type == "cuda":
            fuse_trained(self.block)
        self.twins: dict[str, Twin] = {}
        self.norms = self._norms()

    def _norms(self) -> dict[str, nn.Parameter]:
        """The norms to train: they pay beside packed weights alone."""
        if not any(planned.spec.quantized for planned in self.run.plan.layers):
            return {}
        path = f"{self.run.model.path}.{self.index}"
        parts = {n: p for n, p in self.block.named_modules() if "Norm" in type(p).__name__}
        named = {f"{path}.{n}.{k}": v for n, p in parts.items() for k, v in p.named_parameters()}
        known = self.run.model.names
        return {known[name]: value for name, value in named.items() if name in known}

    def module(self, name: str) -> str:
        """The name on disk of the layer called `name` in the block."""
        return self.run.model.stored_module(f"{self.run.model.path}.{self.index}.{name}")

    def weight(self, module: str) -> Tensor:
        """The dense weight of a layer, as stored."""
        return self.run.model.source.load_tensor(self.run.planned[module].layer.entry)

    @property
    def trained(self) -> list[Trained]:
        """The parameters of the block that can be trained without storing more: its layers and norms."""
        twins, parts = dict(self.twins), list[Mapping[str, Trained]]()
        for home, experts in experts_of(self.block).items():
            for part, groups in experts.joined.items():
                for numbers, one in groups:
                    parts.append(one.parts)
                    for n in numbers:
                        del twins[f"{home}.{part}.{n}"]
        own = [*(twin.parts for twin in twins.values()), *parts]
        found: list[Trained] = [part for each in own for part in each.values()]
        return found + [Plain(parameter) for parameter in self.norms.values()]

    def join(self, names: Iterable[str]) -> None:
        """Compute and train the layers `names` of experts as one, as far as they are of one kind."""
        for path in dict.fromkeys(name.rpartition(".")[0] for name in names):
            home, _, part = path.rpartition(".")
            experts = self.block.get_submodule(home)
            if isinstance(experts, StackedExperts):
                kinds = self._kinds(path, experts.count)
                members = [[twin.parts for twin in own.values()] for own in kinds]
                experts.joined[part] = [
                    (list(k), Joined(m)) for k, m in zip(kinds, members, strict=True)
                ]

    def _kinds(self, name: str, count: int) -> list[dict[int, Twin]]:
        """The twins of a list of experts' layers by their number, those that can be joined together: of
        one kind, and `MOST` numbers at most."""
        found: dict[object, dict[int, Twin]] = {}
        twins = {n: self.twins[f"{name}.{n}"] for n in range(count) if f"{name}.{n}" in self.twins}
        for n, twin in twins.items():
            if (kind := kind_of(twin.parts)) is not None:
                together = max(MOST // twin.spec.dense_parameters, 1)
                found.setdefault((twin.spec, kind, n // together), {})[n] = twin
        return [*found.values()]

    def install(self, keys: Mapping[str, str]) -> None:
        """Put fits, which the journal has under `keys` by the layers' names in the block, into the block
        and the results."""
        with ThreadPoolExecutor() as pool:  # there may be hundreds of experts
            for name, found in zip(keys, pool.map(self._read, keys.values()), strict=True):
                self._put(name, *found, "")
        self.join(keys)

    def _read(self, key: str) -> tuple[dict[str, TensorEntry], Any, dict[str, Tensor]]:
        known = self.run.work.journal.load(key)
        assert known is not None
        return *known, self.run.work.journal.tensors(key)

    def _put(
        self, name: str, entries: Mapping[str, TensorEntry], record: Any, found: Mapping[str, Tensor],
        start: str,
    ) -> None:  # fmt: skip
        """Put one layer, whose tensors' names begin with `start`, into the block and the results."""
        module, device = self.module(name), self.run.model.device
        spec = self.run.planned[module].spec
        self.run.results[module] = ({n: entries[start + n] for n in spec.stored()}, record)
        held = {n.removeprefix(start): t.to(device) for n, t in found.items() if n.startswith(start)}
        twin = make_twin(spec, held, getattr(self.block.get_submodule(name), "bias", None))
        compose_layers(twin.module, WIDEST)
        self.block.set_submodule(name, twin.module.requires_grad_(False))
        self.twins[name] = twin

    def keep(self, key: str, facts: Mapping[str, object], metrics: dict[str, Metric]) -> None:
        """Store the trained block under `key`, with `facts` in every layer's record. `metrics` are
        those of `read_by`; each is dropped once used."""
        tensors: dict[str, Tensor] = {}
        records: dict[str, object] = {}
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
        """Restore the trained block that is stored under `key`, and take it into the results."""
        entries, records, found = self._read(key)
        for name in list(self.twins):
            module = self.module(name)
            self._put(name, entries, records[module], found, f"{module}:")
        self.join(self.twins)
        for name, parameter in self.norms.items():
            parameter.data.copy_(found[f"{NORM}:{name}"])
            self.run.norms[name] = entries[f"{NORM}:{name}"]


@torch.no_grad()
def read_by(
    student: Student, states: Mapping[int, Tensor]
) -> tuple[dict[str, Metric], dict[int, Tensor]]:
    """Run the block on `states`, those of this process's batches by number. Returns the metric of every
    layer's inputs, over all processes, by its name in the block, and the states behind the block."""
    run, behind = student.run, dict[int, Tensor]()
    groups = run.model.groups(student.block)
    heads = [group.modules[0] for group in groups if not group.experts]
    stacks = [group.lists[0] for group in groups if group.experts]

    def grams(n: int) -> dict[str, Tensor]:
        batch = run.batches[n]
        with captured_inputs(student.block, heads) as kept, watched_experts(student.block) as rows:
            out = run_block(student.block, states[n].to(run.model.device), batch)
        behind[n] = out.to(states[n].device)
        found = {name: products(batch.rows(kept[name]))["gram"] for name in heads}
        entered = {name: rows[name, "in"] for name in stacks}
        return found | {name: seats.gram(x, x) for name, (seats, x) in entered.items()}

    sums = sum_in_order(run.work.processes, len(run.batches), grams, heads + stacks, torch.float64)
    found = dict[str, Metric]()
    for group in groups:
        own = sums[group.lists[0]] if group.experts else [sums[group.modules[0]]]
        for names, gram in zip(group.inputs, own, strict=True):
            found |= dict.fromkeys(names, Moments(gram).metric)
    return found, behind


def train_and_keep(
    run: FitRun, students: list[Student], keys: list[str], states: Mapping[int, Tensor], name: str,
    train: Callable[[], tuple[float, float]],
) -> None:  # fmt: skip
    """Train the students by `train`, unless the journal has the result under `keys`, and restore it
    from there. `states` enter the first student; `name` says in the layers' records what was trained."""
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
