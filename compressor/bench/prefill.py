"""`blr bench prefill`: time to the first token of whole models in transformers, bf16 and float8.

Arms of one model and number of tokens are timed by the wall clock, a forward pass each. Compiled ones
have their decoder layers compiled, one compilation for all; graphs are their passes captured for
prompts of one length, which takes the host's time away; runtime is what an export does. No arm has a
time before its logits are right: compiled ones are compared with eager ones, float8 with the same
weights dequantized.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from blr.compressor.base.device import float_dtype, pick_device
from blr.compressor.base.errors import CapabilityError, UsageError
from blr.compressor.base.progress import Progress
from blr.compressor.bench.checks import WrongResult, relative_error
from blr.compressor.bench.harness import Arm, Case, Checked, Harness, free_models
from blr.compressor.bench.models import OWN, STRUCTURES, BenchModel, find_model, refuse_large
from blr.compressor.bench.options import PrefillOptions
from blr.compressor.bench.prefill_models import (
    COMPILED,
    FP8,
    GRAPH,
    RUNTIME,
    PrefillModels,
    dequantized_logits,
)
from blr.compressor.bench.results import PrefillRow, Report, statuses
from blr.compressor.bench.timing import wall_ms
from blr.kernels.fp8.op import STRUCTURES as FLOAT8

DENSE = "dense"
SHAPE_ARMS = (DENSE, *STRUCTURES, *(f"{name}-{FP8}" for name in FLOAT8))
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
    known = SHAPE_ARMS if model.folder is None else FOLDER_ARMS
    if wrong := set(asked) - {*SHAPE_ARMS, *FOLDER_ARMS}:
        raise UsageError(f"arm {min(wrong)!r}: expected some of {', '.join((*SHAPE_ARMS, OWN))}")
    arms = [arm for arm in asked or known if arm in known]
    if not arms:
        raise UsageError(f"none of the arms fits {model.name}: expected {', '.join(known)}")
    return arms


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
            Case(
                f"{model.name} {tokens} tokens",
                partial(self._arms, models, arms, tokens),
                partial(self._finish, models),
            )
            for tokens in o.tokens
        ]

    def _arms(self, models: PrefillModels, arms: Sequence[str], tokens: int) -> list[Arm]:
        made = []
        for arm in arms:
            for way in self.ways:
                row = PrefillRow(models.model.name, arm, way, tokens, self.options.batch)
                made.append(Arm(row, partial(self._check, models, row)))
        return made

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

    def _finish(self, models: PrefillModels, rows: Sequence[PrefillRow]) -> None:
        compare(rows)
        models.forget()
        free_models(self.device)


def compare(rows: Sequence[PrefillRow]) -> None:
    """Fill in what each is times as fast as dense and as dense float8, run in the same way; the runtime
    as the faster of eager and compiled ones in transformers."""
    for row in rows:
        ways = ("", COMPILED) if row.way == RUNTIME else (row.way,)
        for base, name in ((DENSE, "of_dense"), (f"{DENSE}-{FP8}", "of_dense_fp8")):
            found = [r.ms for r in rows if r.arm == base and r.way in ways and r.ms is not None]
            if found and row.ms is not None:
                setattr(row, name, min(found) / row.ms)


def prefill_summary(rows: Sequence[PrefillRow]) -> dict[str, Any]:
    """Milliseconds to the first token by model, arm and tokens."""
    times: dict[str, Any] = {}
    for row in rows:
        if row.ms is not None:
            name = f"{row.arm} {row.way}".strip()
            times.setdefault(row.model, {}).setdefault(name, {})[row.tokens] = round(row.ms, 2)
    return {"first_token_ms": times, "statuses": statuses(rows)}


def run_prefill(options: PrefillOptions, progress: Progress) -> tuple[Report, int]:
    """Time everything that `options` name; the report, and the exit code.

    Raises:
        UsageError: arms or models that there are not. CapabilityError: no device for them.
    """
    device = pick_device(options.device)
    cases = PrefillCases(options, device)
    models = [(model, chosen_arms(model, options.arms)) for model in map(find_model, options.models)]
    widths = {model.name: model.settings.get("hidden_size", 0) for model, _ in models}
    refuse_large(device, widths, "time --models pico or a checkpoint folder")
    report = Report("bench prefill", asdict(options), PrefillRow)
    harness = Harness(report, progress, device, options.rounds, options.seconds)
    return report, harness.run([case for model, arms in models for case in cases.of(model, arms)])
