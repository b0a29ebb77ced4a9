"""`blr bench decode`: tokens a second of our decoder beside transformers', on the same weights.

Arms of one model, context and batch are timed by the wall clock over whole steps. No arm has a time
before its logits (and, for a checkpoint, its greedy tokens) are right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from blr.bench.checks import WrongResult, float_dtype, relative_error
from blr.bench.decode_arms import (
    HF,
    INT8,
    SPECULATIVE,
    ArmName,
    HfArm,
    OursArm,
    SpeculativeArm,
    compare_tokens,
    parse_arm,
)
from blr.bench.harness import Case, Checked, Harness, free_models
from blr.bench.models import (
    CORRECTED,
    OWN,
    BenchModel,
    Models,
    cache_bytes,
    find_model,
    find_models,
    prompt,
    weight_bytes,
)
from blr.bench.options import DecodeOptions
from blr.bench.results import REST, BenchReport, Column, Timed, nested
from blr.bench.timing import CudaSampler, Rotation, spread, wall_ms
from blr.compressor.base.device import pick_device
from blr.compressor.base.errors import UsageError
from blr.compressor.base.progress import Progress
from blr.compressor.checkpoint.context import NGRAM
from blr.compressor.modeling.settings import export_settings
from blr.compressor.runtime.drafted import load_draft

BASELINE = f"{HF}-dense"
# What is timed unless --arms says otherwise, for shapes and for checkpoints.
SHAPE_ARMS = (
    *(BASELINE, "ours-dense", "ours-lowrank", "ours-blast", "ours-monarch"),
    *("ours-lowrank-int8", "ours-lowrank-int4"),
)
FOLDER_ARMS = (f"{HF}-{OWN}", f"ours-{OWN}")
# Relative error of logits above which an arm is wrong. Both sides round activations dozens of times
# on the way through a model: for 32 layers in bfloat16 (2^-9, some 200 roundings) that is 0.03. Keys and
# values in int8 count as bfloat16.
LIMITS = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
GREEDY = 32  # tokens that are compared
DEQUANTIZED = 1.25  # times the stored bytes: a decoder that reads more holds copies in another form
COPIED, REPEATS = 1 << 30, 7  # bytes of a copy whose speed is measured, and how often
RESERVE = 0.7  # of the free memory that the caches of arms timed together may take


def chosen_arms(model: BenchModel, asked: Sequence[str]) -> list[ArmName]:
    """The arms that fit a model. Raises UsageError if none does."""
    usual = SHAPE_ARMS if model.folder is None else FOLDER_ARMS
    arms = [parse_arm(text) for text in asked or usual]
    own = model.folder is not None
    fitting = [a for a in arms if a.structure == SPECULATIVE or (a.structure == OWN) == own]
    if not fitting:
        raise UsageError(
            f"none of the arms fits {model.name}: a shape takes dense and the structures, "
            "a checkpoint takes hf-own and ours-own; give --arms of these"
        )
    return fitting


@dataclass
class DecodeRow(Timed):
    """One arm of `blr bench decode` at one model, context and batch.

    Attributes:
        ms, low, high: of a step of `steps`. tokens_per_second: of all rows of the batch together.
        bytes: weights and cache that a step reads. fraction: of the copy bandwidth; floor_ms: at all
            of it. speedup: over the baseline at the same context and batch.
        rel_error: of logits against eager transformers on the same weights. equal_tokens: leading
            greedy tokens equal to those of transformers' generate, the least of all rows.
    """

    columns = (
        *(Column("arm", "arm"), Column("tokens/s", "tokens_per_second", ".1f", judged=True)),
        *(Column("x base", "speedup", ".4g"), Column("ms/step", "ms", ".4g")),
        *(Column("floor", "floor_ms", ".4g"), Column("of it", "fraction", ".0%")),
        *(Column("GB/step", "bytes", ".4g", scale=1e9), *REST),
    )
    title = "{0.model}, context {0.context}, batch {0.batch}, {0.dtype}"
    right = range(1, 8)
    model: str
    arm: str
    context: int
    batch: int
    dtype: str
    steps: int = 0
    tokens_per_second: float | None = None
    speedup: float | None = None
    bytes: int | None = None
    floor_ms: float | None = None
    fraction: float | None = None
    equal_tokens: int | None = None

    @staticmethod
    def head(machine: Mapping[str, object]) -> str:
        copied = machine.get("copy_tbps")
        return f"{machine.get('name')}" + (f": measured copy {copied:.2f} TB/s" if copied else "")

    @staticmethod
    def summary(rows: Sequence[DecodeRow]) -> dict[str, Any]:
        """Tokens a second by model, arm and "context x batch"."""
        speeds = (
            (row.model, row.arm, f"{row.context}x{row.batch}", round(row.tokens_per_second, 1))
            for row in rows
            if row.tokens_per_second is not None
        )
        return {"tokens_per_second": nested(speeds)}


@dataclass
class DecodeCases:
    """The cases of one run. copy_tbps: of the GPU, for floors."""

    options: DecodeOptions
    device: torch.device
    copy_tbps: float | None = None

    def __post_init__(self) -> None:
        self.dtype = float_dtype(self.options.dtype)

    def of(self, model: BenchModel, arms: Sequence[ArmName]) -> list[Case]:
        """A case for every context and batch."""
        o = self.options
        room = max(o.contexts) + o.steps + 2
        models = Models(model, self.device, self.dtype, room, o.cf, o.blocks, o.rank)
        return [
            Case.of_rows(
                f"{model.name} context {context} batch {batch}",
                [DecodeRow(model.name, str(arm), context, batch, o.dtype, o.steps) for arm in arms],
                partial(self._check, models),
                finish=self._compare,
                together=partial(self._fitting, models, context, batch),
            )
            for context in o.contexts
            for batch in o.batches
        ]

    def _fitting(self, models: Models, context: int, batch: int, arms: Sequence[Any]) -> int:
        """How many of `arms` find room for their caches beside the weights."""
        if self.device.type != "cuda":
            return len(arms)
        free_models(self.device)
        size, held = 0, context + self.options.steps + 1
        for name in (parse_arm(arm.row.arm) for arm in arms):
            with suppress(torch.OutOfMemoryError):  # said again, and recorded, when its turn comes
                size = cache_bytes(_model(models, name), held, batch, name.cache == INT8)
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(self.device)[0] * RESERVE
        return max(int(free // size), 1) if size else len(arms)

    def _check(self, models: Models, row: DecodeRow) -> Checked:
        """The arm with its graphs captured, and how far its logits are off."""
        name, o = parse_arm(row.arm), self.options
        model = _model(models, name)
        held = cache_bytes(model, row.context + o.steps // 2, row.batch, name.cache == INT8)
        row.bytes = weight_bytes(model) + held
        ids = prompt(models.model.folder, model, row.batch, row.context)
        room = max(o.steps, GREEDY if models.model.folder is not None else 1)
        made = self._made(name, models, ids, room)
        if isinstance(made, OursArm) and (read := made.bytes_read()) > DEQUANTIZED * row.bytes:
            what = f"the decoder reads {read / row.bytes:.1f} times the bytes of the model"
            raise RuntimeError(f"{what}: it does not take these layers as they are stored")
        packed_on_cpu = self.device.type == "cpu" and (name.kind or name.head)  # computes in bfloat16
        rounded = name.cache == INT8 or packed_on_cpu
        limit, note = LIMITS[torch.bfloat16 if rounded else self.dtype], None
        error = logits_error(made, model)
        if not error <= limit:
            raise WrongResult(error, f"logits differ by {error:.2g}")
        if models.model.folder is not None and isinstance(made, OursArm):
            plain = HfArm(model, ids, GREEDY, compiling=False)
            row.equal_tokens, note, wrong = compare_tokens(made.greedy(GREEDY), plain, model, limit)
            if wrong:
                raise WrongResult(error, note or "")
        sampler = partial(step_ms, made, o.steps)
        sampler()
        if isinstance(made, SpeculativeArm):
            note = "; ".join(filter(None, (note, made.said())))
        return Checked(sampler, error, limit, note)

    def _made(self, name: ArmName, models: Models, ids: torch.Tensor, room: int) -> HfArm | OursArm:
        model, o, cuda = _model(models, name), self.options, self.device.type == "cuda"
        if name.runtime == HF:
            return HfArm(model, ids, room, cuda if o.compiling is None else o.compiling)
        if name.structure == SPECULATIVE:
            draft = _draft(models, model, name)
            share = name.share if models.model.folder is None else None
            return SpeculativeArm(model, draft, ids, room, name.cache, share)
        return OursArm(model, ids, room, name.cache, name.mode)

    def _compare(self, rows: Sequence[DecodeRow]) -> None:
        """Fill in floors, and `speedup` over the dense baseline or transformers on a checkpoint."""
        base = next((r.ms for r in rows if r.arm in (BASELINE, FOLDER_ARMS[0])), None)
        for row in rows:
            if row.ms is None:
                continue
            row.tokens_per_second = row.batch * 1e3 / row.ms
            if base is not None:
                row.speedup = base / row.ms
            if self.copy_tbps is not None and row.bytes is not None:
                row.floor_ms = row.bytes / self.copy_tbps * 1e-9
                row.fraction = row.floor_ms / row.ms


def _model(models: Models, name: ArmName) -> Any:
    dense = "dense" if models.model.folder is None else OWN
    if name.structure == SPECULATIVE:
        return models.get(dense)
    return models.get(name.structure, name.kind, name.head)


def _draft(models: Models, model: Any, name: ArmName) -> Any:
    """The draft of an arm's model: one that is named; its folder's own; of a shape, low rank, or
    corrected in few bits. None for the text so far. Raises RuntimeError for a folder without one."""
    settings = export_settings(model.config)
    own = None if settings is None else settings.draft
    if NGRAM in (name.draft, own):
        return None
    if name.draft:
        return replace(models, model=find_model(name.draft), built={}, ends=None).get("dense")
    if models.model.folder is None:
        return models.get(CORRECTED, name.kind) if name.kind else models.get("lowrank")
    draft = None if own is None else load_draft(model, own)
    if draft is None:
        raise RuntimeError(f"{models.model.folder} has no draft; make one with blr export --draft")
    return draft


def logits_error(made: HfArm | OursArm, model: Any) -> float:
    """Of the logits after the prompt and one step, against transformers, eager, without a cache."""
    fed = made.ids[:, 0].clone()
    made.prefill()
    found = made.step(fed).float().clone()
    whole = torch.cat([made.ids, fed[:, None]], 1)
    return relative_error(found, model(whole, use_cache=False, logits_to_keep=1).logits[:, -1].float())


def measured_copy(device: torch.device) -> float:
    """Terabytes a second that a large copy on a CUDA device reads and writes, a median of repeats."""
    source = torch.randn(COPIED // 4, device=device)
    target = torch.empty_like(source)
    sampler = CudaSampler(lambda: target.copy_(source), Rotation((), 0), target)
    return 2 * COPIED / spread([sampler.sample() for _ in range(REPEATS)]).ms * 1e-9


def step_ms(arm: HfArm | OursArm, steps: int) -> float:
    """Milliseconds a token by the wall clock, host included, over `steps` tokens after a prompt."""
    arm.prefill()
    return wall_ms(partial(arm.run, steps), arm.ids.device) / steps


def run_decode(options: DecodeOptions, progress: Progress) -> tuple[BenchReport, int]:
    """Time all that `options` name; the report, and the exit code. Raises UsageError or CapabilityError
    before anything is timed."""
    device = pick_device(options.device)
    cases = DecodeCases(options, device)
    models = [(m, chosen_arms(m, options.arms)) for m in find_models(options.models, device)]
    settings = {k: v for k, v in asdict(options).items() if v is not None}
    report = BenchReport("bench decode", settings, DecodeRow)
    harness = Harness(report, progress, device, options.rounds, options.seconds)
    if device.type == "cuda":
        progress.stage("measuring copy bandwidth")
        cases.copy_tbps = measured_copy(device)
    report.machine["copy_tbps"] = cases.copy_tbps
    return report, harness.run([case for model, arms in models for case in cases.of(model, arms)])
