"""A block with its fitted layers in place, which can be trained, kept in the journal and put back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from blr.compressor.checkpoint.header import TORCH_NAMES
from blr.compressor.fitting.composed import compose_layers
from blr.compressor.fitting.equal_weights import Twin, make_twin
from blr.compressor.fitting.factorize import check_range, keep_factors, layer_errors
from blr.compressor.fitting.rounding import Metric
from blr.compressor.fitting.run import Run
from blr.compressor.fitting.sizes import WIDEST
from blr.compressor.loading.training_kernels import fuse_trained
from blr.compressor.structures.latent import Plain, Trained

NORM = "norm"  # prefix of theirs in the journal


class Student:
    """Block `index` as it is compressed so far: `twins`, by name in the block, in the place of fitted
    layers, and `norms`, parameters that are trained too, by the names of their tensors."""

    def __init__(self, run: Run, index: int) -> None:
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
        entries, found = self.run.work.journal.load(key), self.run.work.journal.tensors(key)
        assert entries is not None
        self._place(name, found)
        module = self.module(name)
        spec = self.run.planned[module].spec
        self.run.results[module] = ({n: entries[0][n] for n in spec.stored()}, entries[1])

    def _place(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        old, device = self.block.get_submodule(name), self.run.model.device
        held = {n: tensor.to(device) for n, tensor in tensors.items()}
        spec = self.run.planned[self.module(name)].spec
        twin = make_twin(spec, held, getattr(old, "bias", None))
        compose_layers(twin.module, WIDEST)
        parent, _, leaf = name.rpartition(".")
        setattr(self.block.get_submodule(parent), leaf, twin.module.requires_grad_(False))
        self.twins[name] = twin

    def keep(self, key: str, facts: Mapping[str, Any], metrics: Mapping[str, Metric]) -> None:
        """Store what training has made of the block, with `facts` in every layer's record.

        Args:
            metrics: of `read_by`, by name in the block.
        """
        tensors: dict[str, Tensor] = {}
        records: dict[str, Any] = {}
        for name, twin in self.twins.items():
            module = self.module(name)
            job, weight = self.run.job(module), self.weight(module)
            dtype, old = job.stored_dtype(weight), dict(self.run.results[module][1])
            old.pop("weighted_error", None)  # of the factors that these replace
            with layer_errors(job):
                found = twin.stored(dtype, metrics.get(name))
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
        entries, found = self.run.work.journal.load(key), self.run.work.journal.tensors(key)
        assert entries is not None
        for name in list(self.twins):
            start = f"{self.module(name)}:"
            own = {full.removeprefix(start): t for full, t in found.items() if full.startswith(start)}
            self._place(name, own)
            module = self.module(name)
            factors = {n: entries[0][start + n] for n in self.run.planned[module].spec.stored()}
            self.run.results[module] = (factors, entries[1][module])
        for name, parameter in self.norms.items():
            parameter.data.copy_(found[f"{NORM}:{name}"])
            self.run.norms[name] = entries[0][f"{NORM}:{name}"]
