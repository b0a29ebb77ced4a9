"""Fits the blocks of a model in order, each to the inputs that the compressed blocks before it give.

Each finished layer and refit is kept in the journal, under a key that covers everything before it.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from blr.compressor.base.device import tensor_cores
from blr.compressor.base.processes import Processes, sum_in_order
from blr.compressor.fitting.block_passes import Batch, captured_inputs, home, run_block, run_until
from blr.compressor.fitting.factorize import (
    Result,
    WeightedFit,
    fit_together,
    fitted_together,
    keys_of,
    layer_seed,
    metric_for,
)
from blr.compressor.fitting.moments import Moments, expert_moments, products, routed
from blr.compressor.fitting.refit import Errors, Refitting
from blr.compressor.fitting.sensitivity import HIDDEN
from blr.compressor.fitting.student import FitRun, Student, train_and_keep
from blr.compressor.planning.forecast import predicted_cost
from blr.compressor.planning.layers import AT_ONCE
from blr.compressor.recipe.architectures import Group
from blr.compressor.workspace.journal import layer_key

REFIT = 8  # to be raised when the refit's results change
ON_CPU = 1  # experts that a CPU fits at once: a thread has each
CACHE_BYTES = 4 << 30  # most bytes of a block's dense inputs that the CPU keeps


def fit_blocks(run: FitRun) -> dict[str, Result]:
    """Fit every planned layer inside the model's blocks. Returns factors and records by module name.

    Inside a block, groups of layers that share an input are fitted in order of execution, so that
    every layer makes up for what earlier ones lost. The targets are those of AA-SVD (arXiv
    2604.02119). Processes run their own batches through the blocks, share out the layers of a group
    and fit the largest together.
    """
    costs = {p.layer.module: predicted_cost(p.spec, calibrated=True) for p in run.plan.layers}
    with run.work.progress.layers(len(costs), costs=costs) as advance:
        for index in range(len(run.model)):
            BlockFit(run, index).fit(advance)
    return run.results


class BlockFit:
    """Turns the dense block `index` into a compressed one."""

    def __init__(self, run: FitRun, index: int) -> None:
        self.run, self.index = run, index
        self.dense = run.model.load_block(index)
        self.groups = run.model.groups(self.dense)
        self.student = Student(run, index)
        self.cache: dict[int, dict[str, Tensor]] | None = None

    def fit(self, advance: Callable[..., None]) -> None:
        """Fit all groups, refit if asked, and move the hidden states to the block's output."""
        for group in self.groups:
            self._fit_group(group, advance)
        targets = self._dense_outputs()
        if self.run.epochs and self.student.twins:
            with self.run.work.progress.timed("refits"):
                self._refit(targets)
        self._advance(targets)
        if self.run.finish:
            self.run.students.append(self.student)

    def _fit_group(self, group: Group, advance: Callable[..., None]) -> None:
        run, named = self.run, {name: self.student.module(name) for name in group.modules}
        members = {name: module for name, module in named.items() if module in run.planned}
        found = keys_of(run.work, [run.job(module) for module in members.values()], run.prefix)
        keys, lacking = dict(zip(members.values(), found, strict=True)), run.work.missing(found)
        missing = {module for module, key in keys.items() if key in lacking}
        if members:
            advance(*keys, there=[module for module in keys if module not in missing])
        if units := [unit for unit in self._units(keys, group) if missing.intersection(unit)]:
            self._fit(units, keys, group)
        self.student.install({name: keys[module] for name, module in members.items()})
        run.prefix = layer_key(prefix=run.prefix, done=sorted(found))

    def _units(self, modules: Iterable[str], group: Group) -> list[list[str]]:
        """A group's layers in units that are fitted by the same launches: on a GPU some experts of a
        type. They do not depend on what the journal has, as the last bits may on them."""
        number = ON_CPU if self.run.model.device.type == "cpu" else AT_ONCE
        alike: dict[object, list[str]] = {}
        for module in modules:
            planned = self.run.planned[module]
            kind = planned.layer.type, planned.spec, planned.layer.entry.dtype
            alone = not group.experts or fitted_together(self.run.job(module))
            alike.setdefault(module if alone else kind, []).append(module)
        return [each[n : n + number] for each in alike.values() for n in range(0, len(each), number)]

    def _fit(self, units: list[list[str]], keys: dict[str, str], group: Group) -> None:
        """Make sure that the journal has the factors of the layers of `units`, under their `keys`."""
        work = self.run.work
        with work.progress.timed("inputs"):
            moments = self._moments(group)
        jobs = {module: self.run.job(module) for unit in units for module in unit}
        metrics = {module: self._metric(module) for module in jobs}
        by_key = {keys[unit[0]]: unit for unit in units}

        def fit(key: str, processes: Processes | None = None) -> None:
            fits, unit = [], by_key[key]
            for module in unit:
                given = self.student.weight(module), moments.pop(module), metrics[module]
                fits.append(WeightedFit(replace(jobs[module], processes=processes), *given))
            found = fit_together(fits)
            if processes is None or processes.first:
                with ThreadPoolExecutor() as pool:  # a disk takes its time for each
                    stored = [keys[module] for module in unit], *zip(*found, strict=True)
                    list(pool.map(work.journal.store, *stored))

        specs = {key: jobs[unit[0]].planned.spec for key, unit in by_key.items()}
        for key in [key for key, unit in by_key.items() if fitted_together(jobs[unit[0]])]:
            with work.progress.timed("fits by all"):
                fit(key, work.processes)
            del specs[key]
        with work.progress.timed("fits"):
            work.share(specs, fit, calibrated=True)
        work.journal.await_all([keys[module] for module in jobs])

    def _metric(self, output: str) -> Tensor | None:
        """The cost of errors in an output, in the form that a layer's fit takes; None without
        sensitivities. The first process reads it and shares it."""
        run, found = self.run, None
        if run.sensitivity is None:
            return None
        if run.work.processes.first:
            found = self.information[output]
            if output in run.planned:
                found = metric_for(run.planned[output].spec, found)
        return run.work.processes.shared(found)

    @cached_property
    def information(self) -> dict[str, Tensor]:
        """The Fisher information of the block's and its layers' outputs; in the first process."""
        assert self.run.sensitivity is not None
        return self.run.sensitivity.read(self.index)

    @torch.no_grad()
    def _moments(self, group: Group) -> dict[str, Moments]:
        """The moments of the inputs of a group's layers, by their names on disk."""
        run, sequential = self.run, self.run.work.recipe.sequential
        drifts = sequential and group.residual is not None
        kinds = ["gram", *["cross"] * sequential, *["drift"] * drifts]
        kinds = ["gram", "cross", "tokens"] if group.experts else kinds
        parts = partial(self._routed if group.experts else self._products, group=group)
        with tensor_cores(run.model.device):
            sums = sum_in_order(run.work.processes, len(run.batches), parts, kinds, torch.float64)
        shared = Moments(sums["gram"], sums.get("cross"), sums.get("drift"))
        found = expert_moments(sums) if group.experts else [shared]
        pairs = zip(group.inputs, found, strict=True)
        return {self.student.module(name): each for names, each in pairs for name in names}

    def _routed(self, n: int, group: Group) -> dict[str, Tensor]:
        batch, (home, part, _) = self.run.batches[n], group.modules[0].rsplit(".", 2)
        student = self.student.block
        if not self.run.work.recipe.sequential:
            student, batch = self.dense, replace(batch, student=batch.hidden)
        return routed(student, self.dense, home, part, batch, self.run.model.device)

    def _products(self, n: int, group: Group) -> dict[str, Tensor]:
        batch = self.run.batches[n]
        dense = self._dense_inputs(n, group)
        x = batch.rows(dense[group.modules[0]])
        if not self.run.work.recipe.sequential:
            return products(x)
        student = self._inputs(self.student.block, batch.student, batch, group)
        drift = None
        if group.residual is not None:
            drift = batch.rows(dense[group.residual] - student[group.residual]) / group.scale
        return products(batch.rows(student[group.modules[0]]), x, drift)

    def _inputs(self, block: nn.Module, hidden: Tensor, batch: Batch, group: Group) -> dict[str, Tensor]:
        names = [group.modules[0], *([group.residual] if group.residual else [])]
        with captured_inputs(block, names) as kept:
            run_until(block, hidden.to(self.run.model.device), batch, group.modules[0])
        return kept

    def _dense_inputs(self, n: int, group: Group) -> dict[str, Tensor]:
        batch, device = self.run.batches[n], self.run.model.device
        if self.cache is None and (place := self._cache_place()):
            shared = [group for group in self.groups if not group.experts]
            names = sorted({name for g in shared for name in (g.modules[0], g.residual) if name})
            self.cache = {}
            for number, own in self.run.mine.items():
                with captured_inputs(self.dense, names) as kept:
                    kept[""] = run_block(self.dense, own.hidden.to(device), own)
                self.cache[number] = {name: tensor.to(place) for name, tensor in kept.items()}
        if self.cache is None:
            return self._inputs(self.dense, batch.hidden, batch, group)
        wanted = {group.modules[0], group.residual}
        return {name: t.to(device) for name, t in self.cache[n].items() if name in wanted}

    def _cache_place(self) -> torch.device | None:
        """The device that keeps this block's dense inputs; None if they are too large."""
        tokens = sum(batch.mask.numel() for batch in self.run.mine.values())
        shared = [group.modules[0] for group in self.groups if not group.experts]
        inputs = [self.dense.get_parameter(f"{name}.weight").shape for name in shared]
        widths = [min(shape) for shape in inputs]  # at least the width of the hidden states
        size = 4 * tokens * (2 * sum(widths) + max(max(shape) for shape in inputs))
        place = home(size, self.run.model.device)
        return place if place.type != "cpu" or size <= CACHE_BYTES else None

    @torch.no_grad()
    def _dense_outputs(self) -> dict[int, Tensor]:
        if self.cache is not None:
            return {n: kept[""].to(self.run.batches[n].hidden.device) for n, kept in self.cache.items()}
        return {n: self._out(self.dense, b.hidden, b) for n, b in self.run.mine.items()}

    def _out(self, block: nn.Module, states: Tensor, batch: Batch) -> Tensor:
        with tensor_cores(self.run.model.device):
            return run_block(block, states.to(self.run.model.device), batch).to(states.device)

    def _refit(self, targets: dict[int, Tensor]) -> None:
        settings = [self.run.epochs, REFIT, self.run.finish > 0]
        key = layer_key(refit=settings, prefix=self.run.prefix, block=self.index)
        states = {n: batch.student for n, batch in self.run.mine.items()}

        def train() -> Errors:
            self.cache = None
            work = self.run.work
            given = work.processes, self.run.batches, targets, self._metric(HIDDEN)
            seed = layer_seed(work.recipe.seed, f"refit:{self.index}")
            steps = Refitting(self.student.block, self.student.trained, *given)
            return steps.run(self.run.epochs, seed)

        train_and_keep(self.run, [self.student], [key], states, "refit", train)
        self.run.prefix = key

    @torch.no_grad()
    def _advance(self, targets: dict[int, Tensor]) -> None:
        for n, batch in self.run.mine.items():
            batch.hidden = targets[n]
            batch.student = self._out(self.student.block, batch.student, batch)
