"""`blr bench prefill`: time to the first token of whole models in transformers, bf16 and float8.

Arms of one model and number of tokens are timed by the wall clock, a forward pass each. Compiled ones
have their decoder layers compiled, one compilation for all; graphs are their passes captured for
prompts of one length, which takes the host's time away; runtime is what an export does. No arm has a
time before its logits are right: compiled ones are compared with eager ones, float8 with the same
weights dequantized.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from blr.bench.checks import WrongResult, float_dtype, relative_error
from blr.bench.harness import Case, Checked, Harness, free_models
from blr.bench.models import (
    CORRECTED,
    FEW_BITS,
    FP8,
    OWN,
    STRUCTURES,
    BenchModel,
    Models,
    find_models,
    prompt,
)
from blr.bench.options import PrefillOptions
from blr.bench.results import REST, TIMES, BenchReport, Column, Timed, nested
from blr.bench.timing import wall_ms
from blr.compressor.base.device import pick_device
from blr.compressor.base.errors import CapabilityError, UsageError
from blr.compressor.base.progress import Progress
from blr.compressor.modeling.cuda_graphs import ForwardGraphs, captured, unmasked
from blr.compressor.modeling.extended import Extension
from blr.compressor.modeling.fused import fuse
from blr.kernels.common.available import kernels_on
from blr.kernels.fp8.op import STRUCTURES as FLOAT8

DENSE = "dense"
COMPILED, GRAPH, RUNTIME = "compiled", "graph", "runtime"  # ways beside eager, which is ""
SHAPE_ARMS = (DENSE, *STRUCTURES, *(f"{name}-{FP8}" for name in FLOAT8))
FEW_BITS_ARMS = (
    *(f"{name}-{kind}" for name in (DENSE, *STRUCTURES) for kind in FEW_BITS),
    *(f"{CORRECTED}-{kind}" for kind in FEW_BITS),
)
FOLDER_ARMS = (OWN,)
# Relative error of logits above which an arm is wrong: of bfloat16 as in `bench decode`; float8 rounds
# inputs of every layer to 2.6%, which some two hundred layers of random weights add up.
LIMITS = {"": 0.1, FP8: 0.6}
CHECKED = 128  # tokens of the check of float8: weights are dequantized at every call of it


def ways(options: PrefillOptions, cuda: bool) -> list[str]:
    """How every arm is run: eager, "" for short, and what else is asked for."""
    if options.graphs and not cuda:
        raise CapabilityError("--graphs on the CPU: expected a CUDA GPU; leave it out here")
    compiling = cuda if options.compiling is None else options.compiling
    return ["", *[COMPILED] * compiling, *[GRAPH] * options.graphs, *[RUNTIME] * options.runtime]


def chosen_arms(model: BenchModel, asked: Sequence[str]) -> list[str]:
    """The arms that fit a model. Raises UsageError for unknown ones, and if none does."""
    usual, known = SHAPE_ARMS, (*SHAPE_ARMS, *FEW_BITS_ARMS)
    if wrong := set(asked) - {*known, *FOLDER_ARMS}:
        raise UsageError(f"arm {min(wrong)!r}: expected some of {', '.join((*known, OWN))}")
    if model.folder is not None:
        usual = known = FOLDER_ARMS
    arms = [arm for arm in asked or usual if arm in known]
    if not arms:
        raise UsageError(f"none of the arms fits {model.name}: expected {', '.join(known)}")
    return arms


@dataclass
class PrefillModels:
    """The arms of one decoder, each made once, for `batch` sequences of at most `context` tokens."""

    model: BenchModel
    device: torch.device
    dtype: torch.dtype
    context: int
    cf: float
    blocks: int
    batch: int
    graphs: dict[int, ForwardGraphs] = field(default_factory=dict)  # by the id of a built model
    decoders: dict[int, Any] = field(default_factory=dict)  # likewise
    calls: dict[int, Any] = field(default_factory=dict)  # of compiled layers, by their id

    def __post_init__(self) -> None:
        self.models = Models(self.model, self.device, self.dtype, self.context + 1, self.cf, self.blocks)

    def get(self, arm: str) -> Any:
        """The model of an arm."""
        structure, _, kind = arm.partition("-")
        return self.models.get(structure, kind)

    def inputs(self, model: object, tokens: int) -> Tensor:
        """What is timed."""
        return prompt(self.model.folder, model, self.batch, tokens)

    def output(self, model: Any, x: Tensor, way: str = "") -> Tensor:
        """What is compared, in float32; `way`: eager, layers compiled, these captured in a graph, or as
        the runtime of an export takes prompts."""
        for layer in model.get_decoder().layers:
            layer._compiled_call_impl = self._compiled(layer) if way not in ("", RUNTIME) else None
        run = {GRAPH: self._replayed, RUNTIME: self._decoded}.get(way, first_logits)
        return run(model, x)

    def _compiled(self, layer: Any) -> Any:
        """What a call of a layer is when it is compiled, one compilation for all."""
        if id(layer) not in self.calls:
            layer.compile(dynamic=False)
            self.calls[id(layer)] = layer._compiled_call_impl
        return self.calls[id(layer)]

    def _replayed(self, model: object, x: Tensor) -> Tensor:
        """By the model's CUDA graph for such inputs. Raises RuntimeError if it has none."""
        graphs = self.graphs.setdefault(id(model), ForwardGraphs(captured))
        found: Tensor = graphs.replayed(lambda x: first_logits(model, x), ((x,), {}), inside=unmasked)
        if graphs.failed:
            raise RuntimeError("its pass cannot be captured as a CUDA graph")
        return found

    def _decoded(self, model: object, x: Tensor) -> Tensor:
        """By a decoder. Raises DecoderError where there can be none."""
        from blr.compressor.runtime.decoder import Decoder

        if id(model) not in self.decoders:
            ops = "triton" if kernels_on(self.device) else "torch"
            made = Decoder(fused(model), batch=self.batch, context=self.context + 1, ops=ops)
            self.decoders[id(model)] = made
        found: Tensor = self.decoders[id(model)].prefill(x)
        return found


def first_logits(model: Any, x: Tensor) -> Tensor:
    """The logits [B, vocab] of the token after `x`; x: ids, or embedded."""
    name = "inputs_embeds" if x.is_floating_point() else "input_ids"
    found: Tensor = model(**{name: x}, use_cache=False, logits_to_keep=1).logits[:, -1].float()
    return found


def dequantized_logits(model: Any, x: Tensor) -> Tensor:
    """The same with weights of float8 dequantized, as wherever a gradient is asked for."""
    with torch.enable_grad():
        return first_logits(model, model.get_input_embeddings()(x).detach().requires_grad_()).detach()


def fused(model: Any) -> Any:
    """The model, or of a plain dense one the same weights in modules that are fused, as exports are."""
    if any(isinstance(module, Extension) for module in model.modules()):
        return model
    made = deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
    fuse(made)
    return made


@dataclass
class PrefillRow(Timed):
    """One arm of `blr bench prefill` at one model and number of tokens.

    Attributes:
        way: "" eager, "compiled", "graph" or "runtime". ms, low, high: to the first token.
        of_dense, of_dense_fp8: times as fast as these arms, run in the same way (the runtime: as the
            faster of eager and compiled ones).
        rel_error: of logits, of float8 against its weights dequantized, of compiled against eager.
    """

    columns = (
        *(Column("arm", "arm"), Column("", "way"), *TIMES, Column("x dense", "of_dense", ".4g")),
        *(Column("x dense fp8", "of_dense_fp8", ".4g"), *REST),
    )
    title = "{0.model}, {0.batch} x {0.tokens} tokens"
    right = range(2, 7)
    model: str
    arm: str
    way: str
    tokens: int
    batch: int
    of_dense: float | None = None
    of_dense_fp8: float | None = None

    @staticmethod
    def head(machine: Mapping[str, object]) -> str:
        return f"{machine.get('name')}: milliseconds to the first token"

    @staticmethod
    def summary(rows: Sequence[PrefillRow]) -> dict[str, Any]:
        """Milliseconds to the first token by model, arm and tokens."""
        timed = [(row, row.ms) for row in rows if row.ms is not None]
        times = ((r.model, f"{r.arm} {r.way}".strip(), r.tokens, round(ms, 2)) for r, ms in timed)
        return {"first_token_ms": nested(times)}


@dataclass
class PrefillCases:
    """The cases of one run."""

    options: PrefillOptions
    device: torch.device

    def __post_init__(self) -> None:
        self.ways = ways(self.options, self.device.type == "cuda")
        self.dtype = float_dtype(self.options.dtype)

    def of(self, model: BenchModel, arms: Sequence[str]) -> list[Case]:
        """A case for every number of tokens."""
        o = self.options
        models = PrefillModels(model, self.device, self.dtype, max(o.tokens), o.cf, o.blocks, o.batch)
        return [
            Case.of_rows(
                f"{model.name} {tokens} tokens",
                [
                    PrefillRow(model.name, arm, way, tokens, o.batch)
                    for arm, way in product(arms, self.ways)
                ],
                partial(self._check, models),
                finish=compare,
                around=partial(self._fresh, models),
            )
            for tokens in o.tokens
        ]

    def _check(self, models: PrefillModels, row: PrefillRow) -> Checked:
        """An arm compiled and compared."""
        model, kind = models.get(row.arm), FP8 if row.arm.endswith(FP8) else ""
        whole = x = models.inputs(model, row.tokens)
        expected = None
        if row.way:
            expected = models.output(model, x)
        elif kind:
            x = x[:, :CHECKED]
            expected = dequantized_logits(model, x)
        found = models.output(model, x, row.way)
        error = None if expected is None else relative_error(found, expected)
        if not torch.isfinite(found).all() or not (error or 0.0) <= LIMITS[kind]:
            raise WrongResult(error or float("nan"), "logits differ, or are not finite")
        sampler = partial(
            wall_ms, lambda: models.output(model, whole, row.way).argmax(-1).cpu(), self.device
        )
        return Checked(sampler, error, LIMITS[kind])

    @contextmanager
    def _fresh(self, models: PrefillModels) -> Iterator[None]:
        """Without what cases before have left, and leaving nothing made for prompts of this length."""
        free_models(self.device)
        yield
        models.graphs.clear()
        models.decoders.clear()
        torch.compiler.reset()


def compare(rows: Sequence[PrefillRow]) -> None:
    """Fill in what each is times as fast as dense and as dense float8, run in the same way; the runtime
    as the faster of eager and compiled ones in transformers."""
    for row in rows:
        ways = ("", COMPILED) if row.way == RUNTIME else (row.way,)
        for base, name in ((DENSE, "of_dense"), (f"{DENSE}-{FP8}", "of_dense_fp8")):
            found = [r.ms for r in rows if r.arm == base and r.way in ways and r.ms is not None]
            if found and row.ms is not None:
                setattr(row, name, min(found) / row.ms)


def run_prefill(options: PrefillOptions, progress: Progress) -> tuple[BenchReport, int]:
    """Time all that `options` name; the report, and the exit code. Raises UsageError or CapabilityError
    before anything is timed."""
    device = pick_device(options.device)
    cases = PrefillCases(options, device)
    models = [(m, chosen_arms(m, options.arms)) for m in find_models(options.models, device)]
    report = BenchReport("bench prefill", asdict(options), PrefillRow)
    harness = Harness(report, progress, device, options.rounds, options.seconds)
    return report, harness.run([case for model, arms in models for case in cases.of(model, arms)])
