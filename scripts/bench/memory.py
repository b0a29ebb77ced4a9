"""`blr bench memory`: what a forward pass takes beside the weights, dense, low-rank and bounded."""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from blr.bench.checks import float_dtype, relative_error
from blr.bench.harness import Case, Checked, Harness, free_models
from blr.bench.models import refuse_large
from blr.bench.options import MemoryOptions
from blr.bench.results import OK, REST, TIMES, BenchReport, Column, Timed, nested
from blr.bench.timing import event_ms, settle, wall_ms
from blr.compressor.base.device import pick_device
from blr.compressor.base.errors import CapabilityError, UsageError
from blr.compressor.base.progress import Progress
from blr.compressor.modeling.cuda_graphs import captured, unmasked
from blr.compressor.modeling.extended import Extension
from blr.compressor.modeling.layers import prepare_layers
from blr.compressor.modeling.modeling_blr import PREFIX, config_class
from blr.compressor.modeling.models import model_class
from blr.compressor.recipe.architectures import read_config_table
from blr.compressor.structures.specs import LowRankSpec
from blr.kernels.common.transient import DEFAULT, VARIABLE

DENSE, NAIVE, WHOLE, OURS = "dense", "naive", "whole", "ours"
# Relative error of our results against the same weights in float32, or so many times that of plain
# torch, which rounds every intermediate, too: attention among random weights makes more of it.
LIMITS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
USUAL = 1.25
STEP = 16  # ranks above it are its multiples


@dataclass
class BaseModels:
    """The forms of a model without a head, made when asked for; those of low rank have the same weights.

    Attributes:
        config, model: classes of transformers. keep: share of parameters of the replaced layers.
    """

    name: str
    config: str
    model: str
    settings: dict[str, Any]
    keep: float
    device: torch.device
    dtype: torch.dtype
    built: dict[str, Any] = field(default_factory=dict)

    def get(self, arm: str) -> Any:
        """The model of an arm."""
        kind = arm if arm in (DENSE, NAIVE) else OURS
        if kind not in self.built:
            self.built[kind] = unfused(self.get(OURS)) if kind == NAIVE else self._drawn(kind == DENSE)
        return self.built[kind]

    def inputs(self, batch: int, length: int) -> dict[str, Any]:
        """Random tokens."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(3, self.settings["vocab_size"], (batch, length), generator=generator)
        causal = {"use_cache": False} if self.config == "LlamaConfig" else {}
        return {"input_ids": ids.to(self.device), **causal}

    def _drawn(self, dense: bool) -> Any:
        """transformers' own model with random weights, or ours with every linear layer of low rank."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        torch.manual_seed(0)
        try:
            with torch.device(self.device):
                model = self._native() if dense else self._low_rank()
        finally:
            torch.set_default_dtype(before)
        prepare_layers(model)
        return model.eval()

    def _native(self) -> Any:
        config = getattr(transformers, self.config)(**self.settings)
        return getattr(transformers, self.model)(config)

    def _low_rank(self) -> Any:
        with torch.device("meta"):
            native = self._native()
        table = {
            name: rank_spec(layer.in_features, layer.out_features, self.keep).to_dict()
            for name, layer in native.named_modules()
            if isinstance(layer, torch.nn.Linear) and any(part.isdecimal() for part in name.split("."))
        }
        config = config_class(PREFIX + self.config)
        blr = {"format": 1, "layers": table}
        return model_class(PREFIX + self.model)(config(**self.settings, blr=blr))


def unfused(model: Any) -> Any:
    """The same weights in transformers' own modules, but for the low-rank layers."""
    made = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    for module in made.modules():
        if isinstance(module, Extension):
            module.__class__ = module.native
    return made


def rank_spec(inputs: int, outputs: int, keep: float) -> LowRankSpec:
    """The largest rank, a multiple of `STEP` where that leaves any."""
    rank = max(int(keep * inputs * outputs / (inputs + outputs)), 1)
    return LowRankSpec(inputs, outputs, rank // STEP * STEP or rank)


@dataclass
class MemoryRow(Timed):
    """One arm of `blr bench memory` at one model, batch and length.

    Attributes:
        keep: share of the parameters of the replaced layers. arm: dense, naive (low rank, unfused),
            whole, ours, or ours-N for a bound of N MiB.
        transient_bytes: the most that a forward pass allocates beside what was there, its result
            included. peak_bytes: with the weights.
        memory_of_naive, time_of_naive, memory_of_dense, time_of_dense: ratios to these arms.
        rel_error: of low rank against the same weights in float32.
    """

    columns = (
        *(Column("arm", "arm"), Column("transient MiB", "transient_bytes", ".1f", scale=2**20)),
        *(Column("of naive", "memory_of_naive", ".2f"), Column("of dense", "memory_of_dense", ".2f")),
        *(Column("peak MiB", "peak_bytes", ".1f", scale=2**20), *TIMES),
        *(Column("of naive", "time_of_naive", ".2f"), Column("of dense", "time_of_dense", ".2f"), *REST),
    )
    title = "{0.model} at {0.keep:.0%}, {0.batch} x {0.length}, {0.dtype}"
    right = range(1, 6)
    model: str
    keep: float
    batch: int
    length: int
    dtype: str
    arm: str
    transient_bytes: int | None = None
    peak_bytes: int | None = None
    weights_bytes: int | None = None
    memory_of_naive: float | None = None
    memory_of_dense: float | None = None
    time_of_naive: float | None = None
    time_of_dense: float | None = None

    @staticmethod
    def summary(rows: Sequence[MemoryRow]) -> dict[str, Any]:
        """Ratios of our arms by case, and how many rows are not right."""
        names = ("memory_of_naive", "memory_of_dense", "time_of_naive", "time_of_dense")
        cases = nested(
            (f"{row.title.format(row)}, {row.arm}", name, None if value is None else round(value, 3))
            for row in rows
            if row.arm.startswith(OURS) and row.status == OK
            for name, value in ((name, getattr(row, name)) for name in names)
        )
        return {"cases": cases, "not_ok": sum(row.status != OK for row in rows)}


@dataclass
class MemoryCases:
    """The cases of one run."""

    options: MemoryOptions
    device: torch.device

    def __post_init__(self) -> None:
        self.dtype = float_dtype(self.options.dtype)

    def of(self, name: str, keep: float) -> list[Case]:
        """A case for every batch and length."""
        found = read_config_table("bench-memory.yaml")[name]
        models = BaseModels(name, **found, keep=keep, device=self.device, dtype=self.dtype)
        return [self._case(models, batch, length) for batch, length in self.options.cases()]

    def _case(self, models: BaseModels, batch: int, length: int) -> Case:
        o, inputs = self.options, models.inputs(batch, length)
        right = cache(lambda: self._expected(models.get(NAIVE), inputs))
        return Case.of_rows(
            f"{models.name} at {models.keep:.0%}, {batch} x {length}",
            [MemoryRow(models.name, models.keep, batch, length, o.dtype, arm) for arm in o.arms],
            lambda row: self._check(models, row, inputs, right),
            finish=ratios,
        )

    def _expected(self, naive: Any, inputs: dict[str, Any]) -> tuple[Tensor, float]:
        """The result in float32, and the relative error that is allowed."""
        with bounded(NAIVE):
            exact = exact_result(naive, inputs)
            usual = relative_error(naive(**inputs).last_hidden_state.float(), exact)
        return exact, max(LIMITS[self.dtype], USUAL * usual)

    def _check(
        self,
        models: BaseModels,
        row: MemoryRow,
        inputs: dict[str, Any],
        right: Callable[[], tuple[Tensor, float]],
    ) -> Checked:
        """Fill in the memory, and compare what is not dense, which has other weights."""
        free_models(self.device)
        model, arm = models.get(row.arm), row.arm
        row.weights_bytes = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        with bounded(arm):
            found = model(**inputs).last_hidden_state  # and libraries allocate what they keep
            row.transient_bytes = transient_bytes(lambda: model(**inputs), self.device)
        row.peak_bytes = row.weights_bytes + row.transient_bytes
        sampler = BoundedPass(arm, partial(model, **inputs), self.device, self.options.graphs)
        if arm == DENSE:
            return Checked(sampler, None)
        exact, limit = right()
        return Checked(sampler, relative_error(found.float(), exact), limit)


@dataclass
class BoundedPass:
    """Times a pass within the bound of an arm, or, with `graphs`, the CUDA graph that its first call
    captures, once all arms are measured: it holds what the pass takes."""

    arm: str
    run: Callable[[], Any]
    device: torch.device
    graphs: bool

    def __call__(self) -> float:
        with bounded(self.arm):
            if self.graphs:
                plain, self.graphs = self.run, False
                with unmasked():
                    self.run = captured(lambda: plain().last_hidden_state)
            settle(self.device)
            cuda = self.device.type == "cuda"
            return event_ms(self.run) if cuda else wall_ms(self.run, self.device)


def bound_of(arm: str) -> int | None:
    """MiB of a bounded arm, None of the others. Raises UsageError for what is no arm."""
    if arm in (DENSE, NAIVE, WHOLE):
        return None
    name, _, number = arm.partition("-")
    if name == OURS and (not number or (number.isdecimal() and int(number))):
        return int(number or DEFAULT)
    raise UsageError(f"arm {arm!r}: expected dense, naive, whole, ours or ours-N for a bound of N MiB")


@contextmanager
def bounded(arm: str) -> Iterator[None]:
    """BLR_TRANSIENT as the arm has it."""
    before = os.environ.get(VARIABLE)
    bound = bound_of(arm)
    os.environ[VARIABLE] = "off" if bound is None else str(bound)
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def exact_result(model: Any, inputs: dict[str, Any]) -> Tensor:
    """The last hidden state [B, M, D] of `model` in float32, a sequence at a time."""
    made = copy.deepcopy(model).float()
    rest = {name: value for name, value in inputs.items() if name != "input_ids"}
    rows = inputs["input_ids"].split(1)
    return torch.cat([made(input_ids=row, **rest).last_hidden_state for row in rows])


def transient_bytes(run: Callable[[], object], device: torch.device) -> int:
    """The most that was allocated at one time while `run` ran, above what was at its start: by the
    allocator of a GPU, on a CPU by the tensors that torch makes."""
    if device.type != "cuda":
        with Tracker() as tracker:
            run()
        return tracker.peak
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


class Tracker(TorchDispatchMode):
    """Counts the bytes of storages that appear in results of torch's operators until they are freed.

    What an operator needs inside and gives back is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if _held(t)}
        for tensor in tree_leaves(result):
            if _held(tensor) and tensor.untyped_storage()._cdata not in given:
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: Any) -> None:
        key = storage._cdata
        if key in self.live:
            return
        self.live[key] = storage.nbytes()
        self.now += self.live[key]
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, key)

    def _remove(self, key: int) -> None:
        self.now -= self.live.pop(key, 0)


def _held(leaf: object) -> bool:
    """Whether it is a tensor with memory."""
    return isinstance(leaf, Tensor) and not leaf.is_meta


def ratios(rows: Sequence[MemoryRow]) -> None:
    """Fill in what the arms of one case are of the naive and of the dense one."""
    by_arm = {row.arm: row for row in rows if row.status == OK}
    for base in (by_arm[name] for name in (NAIVE, DENSE) if name in by_arm):
        for row in by_arm.values():
            setattr(row, f"memory_of_{base.arm}", _ratio(row.transient_bytes, base.transient_bytes))
            setattr(row, f"time_of_{base.arm}", _ratio(row.ms, base.ms))


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def run_memory(options: MemoryOptions, progress: Progress) -> tuple[BenchReport, int]:
    """Measure all that `options` name; the report, and the exit code. Raises UsageError or
    CapabilityError before anything is measured."""
    device = pick_device(options.device)
    cases = MemoryCases(options, device)
    models = read_config_table("bench-memory.yaml")
    for name in options.models:
        if name not in models:
            raise UsageError(f"model {name!r} is not known; expected one of {', '.join(models)}")
    for arm in options.arms:
        bound_of(arm)
    if options.graphs and device.type != "cuda":
        raise CapabilityError("--graphs on the CPU: expected a CUDA GPU; leave it out here")
    widths = {name: int(models[name]["settings"]["hidden_size"]) for name in options.models}
    refuse_large(device, widths, "measure --models pico-bert,pico-llama")
    settings = {k: v for k, v in asdict(options).items() if v is not None}
    report = BenchReport("bench memory", settings, MemoryRow)
    harness = Harness(report, progress, device, options.rounds, options.seconds)
    return report, harness.run([c for m in options.models for k in options.keep for c in cases.of(m, k)])
