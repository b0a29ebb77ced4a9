"""Fits the blocks of a model in order, each from the inputs that the compressed prefix gives it.

Inside a block the groups of layers that share an input are fitted in order of execution, so that
every layer makes up for what the ones before it lost; its target also corrects the drift of the
residual stream. Optionally all factors of the block are then refitted together. Every finished
layer and refit is kept in the journal under a key that covers all before it.
Source: AA-SVD (arXiv 2604.02119) for the sequential targets.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from blr.compressor.architectures import Group
from blr.compressor.checkpoint.journal import layer_key
from blr.compressor.fitting.blocks import (
    Batch,
    BlockModel,
    captured_inputs,
    run_block,
    run_until,
)
from blr.compressor.fitting.factorize import Job, Result, keep_factors, layer_seed
from blr.compressor.fitting.moments import Moments
from blr.compressor.fitting.refit import Refit, refit_block
from blr.compressor.fitting.sensitivity import Sensitivity
from blr.compressor.fitting.weighted import fit_weighted
from blr.compressor.fitting.work import Work
from blr.compressor.modeling.layers import StructuredLinear, structured_linear
from blr.compressor.planning.plan import Plan
from blr.compressor.rounding.latent import Plain, Trained

CACHE_BYTES = 4 << 30  # of dense inputs of one block kept on the CPU; beyond, they are recomputed


@dataclass
class Run:
    """One calibrated compression: what is fitted, from what, and what is done so far."""

    work: Work
    model: BlockModel
    plan: Plan
    batches: list[Batch]
    sensitivity: Sensitivity | None
    epochs: int
    prefix: str  # digest of the calibration and of every layer finished so far
    results: dict[str, Result] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.planned = {planned.layer.module: planned for planned in self.plan.layers}

    def job(self, module: str) -> Job:
        return Job(self.planned[module], self.work.recipe, self.model.device)


def fit_blocks(run: Run) -> dict[str, Result]:
    """Factors and records of every planned layer inside the model's blocks, by module name."""
    with run.work.progress.layers(len(run.plan.layers)) as advance:
        for index in range(len(run.model)):
            BlockFit(run, index).fit(advance)
    return run.results


class BlockFit:
    """The dense block `index`, its compressed twin, and how the one becomes the other."""

    def __init__(self, run: Run, index: int) -> None:
        self.run, self.index = run, index
        self.dense = run.model.load_block(index)
        self.student = run.model.load_block(index)
        self.cache: list[dict[str, Tensor]] | None = None

    def fit(self, advance: Any) -> None:
        """Fit all groups, refit if asked, and move the hidden states behind this block."""
        for group in self.run.model.family.groups:
            self._fit_group(group, advance)
        targets = self._dense_outputs()
        if self.run.epochs and self._structured():
            self._refit(targets)
        self._advance(targets)

    def _stored(self, name: str) -> str:
        return self.run.model.stored_module(f"{self.run.model.path}.{self.index}.{name}")

    def _fit_group(self, group: Group, advance: Any) -> None:
        members = {name: m for name in group.modules if (m := self._stored(name)) in self.run.planned}
        weights = {name: self._weight(module) for name, module in members.items()}
        keys = {
            name: self.run.job(members[name]).key(weights[name], self.run.prefix) for name in members
        }
        moments: Moments | None = None
        for name, module in members.items():
            advance(module)
            if self.run.work.journal.load(keys[name]) is None:
                moments = moments or self._moments(group)
                tensors, record = fit_weighted(
                    self.run.job(module), weights[name], moments, self._metric(module)
                )
                self.run.work.journal.store(keys[name], tensors, record)
            self._install(name, module, keys[name])
        self.run.prefix = layer_key(prefix=self.run.prefix, done=sorted(keys.values()))

    def _weight(self, module: str) -> Tensor:
        return self.run.model.source.load_tensor(self.run.planned[module].layer.entry)

    def _metric(self, module: str) -> Tensor | None:
        return self.run.sensitivity.outputs[module] if self.run.sensitivity else None

    @torch.no_grad()
    def _moments(self, group: Group) -> Moments:
        moments = Moments()
        for n, batch in enumerate(self.run.batches):
            keep = batch.mask.to(self.run.model.device)
            dense = self._dense_inputs(n, group)
            x = dense[group.modules[0]][keep]
            if not self.run.work.recipe.sequential:
                moments.add(x)
                continue
            student = self._inputs(self.student, batch.student, batch, group)
            drift = None
            if group.residual is not None:
                drift = (dense[group.residual] - student[group.residual])[keep]
            moments.add(student[group.modules[0]][keep], x, drift)
        return moments

    def _inputs(self, block: nn.Module, hidden: Tensor, batch: Batch, group: Group) -> dict[str, Tensor]:
        """Input of the group's layers and of its residual module."""
        names = [group.modules[0], *([group.residual] if group.residual else [])]
        with captured_inputs(block, names) as kept:
            run_until(block, hidden.to(self.run.model.device), batch, group.modules[0])
        return kept

    def _dense_inputs(self, n: int, group: Group) -> dict[str, Tensor]:
        batch = self.run.batches[n]
        if not self._fits_cache():
            return self._inputs(self.dense, batch.hidden, batch, group)
        if self.cache is None:
            self.cache = [self._all_inputs(batch) for batch in self.run.batches]
        return {name: t.to(self.run.model.device) for name, t in self.cache[n].items()}

    def _all_inputs(self, batch: Batch) -> dict[str, Tensor]:
        groups = self.run.model.family.groups
        names = {name for g in groups for name in (g.modules[0], g.residual) if name}
        with captured_inputs(self.dense, sorted(names)) as kept:
            out = run_block(self.dense, batch.hidden.to(self.run.model.device), batch)
        return {name: tensor.cpu() for name, tensor in kept.items()} | {"": out.cpu()}

    def _fits_cache(self) -> bool:
        tokens = sum(batch.mask.numel() for batch in self.run.batches)
        groups = self.run.model.family.groups
        inputs = [self.dense.get_parameter(f"{g.modules[0]}.weight").shape for g in groups]
        widths = [min(shape) for shape in inputs]  # at least the width of the hidden states
        wide = max(max(shape) for shape in inputs)
        return 4 * tokens * (2 * sum(widths) + wide) <= CACHE_BYTES

    def _install(self, name: str, module: str, key: str) -> None:
        """Put the stored factors of `module` into the student, rounded as they are stored."""
        entries, found = self.run.work.journal.load(key), self.run.work.journal.tensors(key)
        assert entries is not None
        spec = self.run.planned[module].spec
        bias = getattr(self.student.get_submodule(name), "bias", None)
        layer = structured_linear(spec.to_dict(), bias is not None)
        state = {suffix: found[suffix].float() for suffix in spec.shapes()}
        if bias is not None:
            state["bias"] = bias.detach()
        layer.load_state_dict(state)
        parent, _, leaf = name.rpartition(".")
        layer.to(self.run.model.device).requires_grad_(False)
        setattr(self.student.get_submodule(parent), leaf, layer)
        factors = {suffix: entries[0][suffix] for suffix in spec.shapes()}
        self.run.results[module] = (factors, entries[1])

    def _structured(self) -> dict[str, StructuredLinear]:
        parts = self.student.named_modules()
        return {name: part for name, part in parts if isinstance(part, StructuredLinear)}

    @torch.no_grad()
    def _dense_outputs(self) -> list[Tensor]:
        if self.cache is not None:
            return [kept[""] for kept in self.cache]
        device = self.run.model.device
        return [run_block(self.dense, b.hidden.to(device), b).cpu() for b in self.run.batches]

    def _refit(self, targets: list[Tensor]) -> None:
        key = layer_key(refit=self.run.epochs, prefix=self.run.prefix, block=self.index)
        done = self.run.work.journal.load(key)
        if done is None:
            self._store_refit(key, self._run_refit(targets))
        for name in self._structured():
            self._reload(name, key)
        self.run.prefix = key

    def _run_refit(self, targets: list[Tensor]) -> Refit:
        self.cache = None
        structured = self._structured().values()
        parameters = [p for part in structured for n, p in part.named_parameters() if n != "bias"]
        for parameter in parameters:
            parameter.requires_grad_(True)
        metric = self.run.sensitivity.blocks[str(self.index)] if self.run.sensitivity else None
        seed = layer_seed(self.run.work.recipe.seed, f"refit:{self.index}")
        trained: list[Trained] = [Plain(parameter) for parameter in parameters]
        epochs = self.run.epochs
        found = refit_block(self.student, trained, self.run.batches, targets, metric, epochs, seed)
        for parameter in parameters:
            parameter.requires_grad_(False)
        return found

    def _store_refit(self, key: str, found: Refit) -> None:
        tensors: dict[str, Tensor] = {}
        records: dict[str, Any] = {}
        for name, part in self._structured().items():
            module = self._stored(name)
            factors = {s: part.get_parameter(s) for s in self.run.planned[module].spec.shapes()}
            old = self.run.results[module][1]
            stored, record = keep_factors(self.run.job(module), self._weight(module), factors, old)
            tensors |= {f"{module}:{suffix}": tensor for suffix, tensor in stored.items()}
            records[module] = {**record, "refit": [found.before, found.after]}
        self.run.work.journal.store(key, tensors, records)

    def _reload(self, name: str, key: str) -> None:
        entries, found = self.run.work.journal.load(key), self.run.work.journal.tensors(key)
        assert entries is not None
        module = self._stored(name)
        part, spec = self.student.get_submodule(name), self.run.planned[module].spec
        with torch.no_grad():
            for suffix in spec.shapes():
                part.get_parameter(suffix).copy_(found[f"{module}:{suffix}"])
        factors = {suffix: entries[0][f"{module}:{suffix}"] for suffix in spec.shapes()}
        self.run.results[module] = (factors, entries[1][module])

    @torch.no_grad()
    def _advance(self, targets: list[Tensor]) -> None:
        device = self.run.model.device
        for batch, target in zip(self.run.batches, targets, strict=True):
            batch.hidden = target
            batch.student = run_block(self.student, batch.student.to(device), batch).cpu()
