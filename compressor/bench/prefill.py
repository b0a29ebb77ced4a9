"""`blr bench prefill`: whole models in transformers, bf16 and float8: decoders to the first token of an
answer, encoders to their output.

Arms of one model and number of tokens are timed in turn, a forward pass each, by the wall clock.
Compiled ones have their decoder layers compiled, one compilation for all; graphs are their passes
captured for prompts of one length, which takes the host's time away; runtime is what an export does.
No arm has a time before its logits are right: compiled ones are compared with eager ones, float8 with
the same weights dequantized.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from blr.compressor.base.errors import CapabilityError, UsageError
from blr.compressor.base.progress import Progress
from blr.compressor.bench.decode.models import OWN, STRUCTURES, Subject
from blr.compressor.bench.prefilled import (
    FP8,
    GRAPH,
    RUNTIME,
    Encoders,
    Prefilled,
    find_any,
    known_encoders,
)
from blr.compressor.bench.results import OK, WRONG, PrefillRow, Report
from blr.compressor.bench.timing import spread
from blr.compressor.bench.whole import WholeModels, recorded
from blr.kernels.fp8.op import STRUCTURES as FLOAT8

DENSE, COMPILED = "dense", "compiled"
SHAPE_ARMS = (DENSE, *STRUCTURES, *(f"{name}-{FP8}" for name in FLOAT8))
FOLDER_ARMS = (OWN,)
# Relative error of logits above which an arm is wrong: of bfloat16 as in `bench decode`; float8 rounds
# inputs of every layer to 2.6%, which some two hundred layers of random weights add up.
LIMITS = {"": 0.1, FP8: 0.6}


@dataclass(frozen=True)
class PrefillOptions:
    """What to time.

    Attributes:
        models: names of configs/bench-decode.yaml, of configs/bench-encoders.yaml or checkpoint folders.
        arms: empty for the usual ones.
        tokens: of the prompt. rounds: samples of an arm. cf, blocks: of structured layers of shapes.
        compiling: compiled arms, too; None: on a GPU. graphs: these as CUDA graphs, too. runtime: every
        arm as an export takes prompts, too.
        seconds: after which no case is started.
    """

    models: Sequence[str]
    arms: Sequence[str] = ()
    tokens: Sequence[int] = (2048,)
    batch: int = 1
    rounds: int = 5
    cf: float = 2.0
    blocks: int = 16
    device: str = "auto"
    dtype: str = "bfloat16"
    compiling: bool | None = None
    graphs: bool = False
    runtime: bool = False
    seconds: float | None = None


@dataclass
class PrefillBench(WholeModels):
    """One run."""

    options: PrefillOptions

    def __post_init__(self) -> None:
        super().__post_init__()
        self.subjects = [(s, self._arms(s)) for s in map(find_any, self.options.models)]
        widths = [(s.name, s.settings.get("hidden_size", 0)) for s, _ in self.subjects]
        self.refuse_large(widths, "time --models pico or a checkpoint folder")
        encoders = [subject.name for subject, _ in self.subjects if subject.name in known_encoders()]
        if self.options.runtime and encoders:
            raise UsageError(f"--runtime: {encoders[0]} is an encoder, expected decoders; leave one out")
        self.ways = self._ways(self.device.type == "cuda")

    def _ways(self, cuda: bool) -> list[str]:
        """How every arm is run: eager, "" for short, and what the options ask for."""
        given, graphs = self.options.compiling, self.options.graphs
        if graphs and not cuda:
            raise CapabilityError("--graphs on the CPU: expected a CUDA GPU; leave it out here")
        compiling = cuda if given is None else given
        return ["", *[COMPILED] * compiling, *[GRAPH] * graphs, *[RUNTIME] * self.options.runtime]

    def _arms(self, subject: Subject) -> list[str]:
        known = SHAPE_ARMS if subject.folder is None else FOLDER_ARMS
        arms = [arm for arm in self.options.arms or known if arm in known]
        if wrong := set(self.options.arms) - {*SHAPE_ARMS, *FOLDER_ARMS}:
            raise UsageError(f"arm {min(wrong)!r}: expected some of {', '.join((*SHAPE_ARMS, OWN))}")
        if not arms:
            raise UsageError(f"none of the arms fits {subject.name}: expected {', '.join(known)}")
        return arms

    def run_all(self) -> None:
        with self.progress.layers(len(self.subjects) * len(self.options.tokens), "timing") as starting:
            for subject, arms in self.subjects:
                models = self._models(subject)
                for tokens in self.options.tokens:
                    title = f"{subject.name} {tokens} tokens"
                    if self.is_over(title):
                        return
                    starting(title)
                    self.report.rows += self._case(models, arms, tokens)
                    models.forget()
                    torch.compiler.reset()
                del models
                gc.collect()

    def _models(self, subject: Subject) -> Prefilled:
        o, kind = self.options, Encoders if subject.name in known_encoders() else Prefilled
        return kind(subject, self.device, self.dtype, max(o.tokens), o.cf, o.blocks, o.batch)

    def _case(self, models: Prefilled, arms: Sequence[str], tokens: int) -> list[PrefillRow]:
        """All arms for one number of tokens, timed in turn."""
        rows = {
            (arm, way): PrefillRow(models.subject.name, arm, way, tokens, self.options.batch)
            for arm in arms
            for way in self.ways
        }
        for (arm, way), row in rows.items():
            with recorded(row):
                self._ready(models, arm, way, row, tokens)
        samples: dict[tuple[str, str], list[float]] = {key: [] for key in rows}
        for _ in range(self.options.rounds):
            for (arm, way), row in rows.items():
                if row.status == OK:
                    with recorded(row):
                        samples[arm, way].append(self._time(models, arm, way, tokens))
        for key, row in rows.items():
            if row.status == OK:
                row.fill(spread(samples[key]))
        _compare(list(rows.values()))
        return list(rows.values())

    def _ready(self, models: Prefilled, arm: str, way: str, row: PrefillRow, tokens: int) -> None:
        """Compile and check an arm. Raises what it does."""
        model, kind = models.get(arm), FP8 if arm.endswith(FP8) else ""
        x, expected = models.inputs(model, tokens), None
        if way:
            expected = models.output(model, x)
        elif kind:
            x = models.checked(x)
            expected = models.dequantized(model, x)
        found: Tensor = models.output(model, x, way)
        if expected is not None:
            row.rel_error = float((found - expected).norm() / expected.norm())
        if not torch.isfinite(found).all() or not (row.rel_error or 0.0) <= LIMITS[kind]:
            row.fail(WRONG, "logits differ, or are not finite")

    def _time(self, models: Prefilled, arm: str, way: str, tokens: int) -> float:
        """Milliseconds to the first token."""
        model = models.get(arm)
        x = models.inputs(model, tokens)
        _settle(self.device)
        begun = perf_counter()
        models.output(model, x, way).argmax(-1).cpu()
        return (perf_counter() - begun) * 1e3


def run_prefill(options: PrefillOptions, progress: Progress) -> tuple[Report, int]:
    """Time everything that `options` name; the report, and the exit code.

    Raises:
        UsageError: arms or models that there are not. CapabilityError: no device for them.
    """
    from dataclasses import asdict

    report = Report("bench prefill", asdict(options), kind=PrefillRow)
    return report, PrefillBench(options, report, progress).run()


def _compare(rows: Sequence[PrefillRow]) -> None:
    """Fill in what each is times as fast as dense and as dense float8, run in the same way; the runtime
    as the faster of eager and compiled ones in transformers."""
    for row in rows:
        ways = ("", COMPILED) if row.way == RUNTIME else (row.way,)
        for base, name in ((DENSE, "of_dense"), (f"{DENSE}-{FP8}", "of_dense_fp8")):
            found = [r.ms for r in rows if r.arm == base and r.way in ways and r.ms is not None]
            if found and row.ms is not None:
                setattr(row, name, min(found) / row.ms)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
