"""`blr bench decode`: tokens a second of our decoder beside transformers', on the same weights.

Arms of one model, context and batch are timed in turn, a round each, by the wall clock over whole
steps. No arm has a time before its logits (and, for a checkpoint, its greedy tokens) are right.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from blr.compressor.base.errors import UsageError
from blr.compressor.base.progress import Progress
from blr.compressor.bench.decode.arms import (
    HF,
    INT8,
    ArmName,
    HfArm,
    OursArm,
    parse_arm,
    reference_logits,
    timed,
)
from blr.compressor.bench.decode.models import (
    OWN,
    Models,
    Subject,
    cache_bytes,
    find_subject,
    prompt,
    weight_bytes,
)
from blr.compressor.bench.results import FAILED, OK, WRONG, DecodeRow, Report
from blr.compressor.bench.timing import spread
from blr.compressor.bench.whole import WholeModels, recorded
from blr.compressor.runtime.failures import FORMER, MODES, OPS

BASELINE = f"{HF}-dense"
# What is timed unless --arms says otherwise, for shapes and for checkpoints.
SHAPE_ARMS = (
    *(BASELINE, "hf-lowrank", "ours-dense", "ours-lowrank", "ours-blast", "ours-monarch"),
    *("ours-lowrank-int8", "ours-lowrank-int4"),
)
FOLDER_ARMS = (f"{HF}-{OWN}", f"ours-{OWN}")
# Relative error of logits above which an arm is wrong. Both sides round activations dozens of times
# on the way through a model: for 32 layers in bfloat16 (2^-9, some 200 roundings) that is 0.03. Keys and
# values in int8 count as bfloat16.
LIMITS = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
GREEDY = 32  # tokens that are compared
DEQUANTIZED = 1.25  # times the stored bytes: a decoder that reads more holds copies in another form
RESERVE = 0.7  # of the free memory that the caches of arms timed together may take


@dataclass(frozen=True)
class DecodeOptions:
    """What to time.

    Attributes:
        models: names of configs/bench-decode.yaml or checkpoint folders. arms: empty for the usual
            ones. steps, rounds: of a measurement. cf, blocks: of structured layers of shapes, rank: of
            corrections.
        ops: of our decoder, "auto" is Triton on a GPU. compiling: transformers' step; None: on a GPU.
        seconds: after which no case is started.
    """

    models: Sequence[str]
    arms: Sequence[str] = ()
    contexts: Sequence[int] = (128,)
    batches: Sequence[int] = (1,)
    steps: int = 64
    rounds: int = 3
    cf: float = 2.0
    blocks: int = 16
    rank: int = 16
    device: str = "auto"
    dtype: str = "bfloat16"
    ops: str = "auto"
    mode: str = "auto"
    compiling: bool | None = None
    seconds: float | None = None


def _current(options: DecodeOptions, progress: Progress) -> DecodeOptions:
    """The options with modes of earlier versions, also at the end of arms, by what does their work."""
    named = [options.mode, *(arm.rpartition("-")[2] for arm in options.arms)]
    for old in FORMER.keys() & set(named):
        progress.say(f"mode {old!r} is gone: the CUDA graph is faster; timed as {FORMER[old]!r}")
    arms = [_current_arm(arm) for arm in options.arms]
    return replace(options, mode=FORMER.get(options.mode, options.mode), arms=tuple(dict.fromkeys(arms)))


def _current_arm(arm: str) -> str:
    rest, dash, mode = arm.rpartition("-")
    return rest + dash + FORMER.get(mode, mode)


@dataclass
class DecodeBench(WholeModels):
    """One run."""

    options: DecodeOptions

    def __post_init__(self) -> None:
        super().__post_init__()
        self.options = _current(self.options, self.progress)
        for name, value, known in (
            ("mode", self.options.mode, MODES),
            ("ops", self.options.ops, ("auto", *OPS)),
        ):
            if value not in known:
                raise UsageError(f"{name} {value!r}: expected one of {', '.join(known)}")
        self.subjects = [(s, self._arms(s)) for s in map(find_subject, self.options.models)]
        widths = [(s.name, s.settings.get("hidden_size", 0)) for s, _ in self.subjects]
        self.refuse_large(widths, "time --models pico or a checkpoint folder")
        self.copy_tbps: float | None = None

    def run_all(self) -> None:
        shapes = [(c, b) for c in self.options.contexts for b in self.options.batches]
        with self.progress.layers(len(self.subjects) * len(shapes), "timing") as starting:
            for subject, arms in self.subjects:
                room = max(self.options.contexts) + self.options.steps + 2
                models = Models(
                    *(subject, self.device, self.dtype, room, self.options.cf),
                    *(self.options.blocks, self.options.rank),
                )
                for context, batch in shapes:
                    title = f"{subject.name} context {context} batch {batch}"
                    if self.is_over(title):
                        return
                    starting(title)
                    self.report.rows += self._case(models, arms, context, batch)
                del models
                self._release()

    def _arms(self, subject: Subject) -> list[ArmName]:
        usual = SHAPE_ARMS if subject.folder is None else FOLDER_ARMS
        arms = [parse_arm(text) for text in self.options.arms or usual]
        fitting = [arm for arm in arms if (arm.structure == OWN) == (subject.folder is not None)]
        if not fitting:
            raise UsageError(
                f"none of the arms fits {subject.name}: a shape takes dense and the structures, "
                "a checkpoint takes hf-own and ours-own; give --arms of these"
            )
        return fitting

    def _case(
        self, models: Models, arms: Sequence[ArmName], context: int, batch: int
    ) -> list[DecodeRow]:
        """All arms at one context and batch, timed in turn, as many at once as memory takes."""
        dtype = self.options.dtype
        name = models.subject.name
        rows = {arm: DecodeRow(name, str(arm), context, batch, dtype) for arm in arms}
        waiting = list(arms)
        while waiting:
            together = waiting[: self._fitting(models, waiting, context, batch)]
            waiting = waiting[len(together) :]
            self._group(models, {arm: rows[arm] for arm in together}, context, batch)
            self._release()
        self._compare(list(rows.values()))
        return list(rows.values())

    def _fitting(self, models: Models, arms: Sequence[ArmName], context: int, batch: int) -> int:
        """How many of `arms` find room for their caches beside the weights."""
        if self.device.type != "cuda":
            return len(arms)
        size = 0
        for arm in arms:
            with suppress(torch.OutOfMemoryError):  # said again, and recorded, when its turn comes
                model = self._model(models, arm)
                held = context + self.options.steps + 1
                size = cache_bytes(model, held, batch, arm.cache == INT8)
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(self.device)[0] * RESERVE
        return max(int(free // size), 1) if size else len(arms)

    def _group(self, models: Models, rows: dict[ArmName, DecodeRow], context: int, batch: int) -> None:
        ready: dict[ArmName, HfArm | OursArm] = {}
        for arm, row in rows.items():
            with recorded(row):
                ready[arm] = self._ready(models, arm, row, context, batch)
        times: dict[ArmName, list[float]] = {arm: [] for arm in ready}
        for _ in range(self.options.rounds):
            for arm, samples in times.items():
                if rows[arm].status == OK:
                    with recorded(rows[arm]):
                        samples.append(timed(ready[arm], self.options.steps))
        for arm, samples in times.items():
            if rows[arm].status == OK:
                self._fill(rows[arm], samples)

    def _ready(
        self, models: Models, arm: ArmName, row: DecodeRow, context: int, batch: int
    ) -> HfArm | OursArm:
        """An arm whose results were found right and whose graphs are captured."""
        model, options = self._model(models, arm), self.options
        held = cache_bytes(model, context + options.steps // 2, batch, arm.cache == INT8)
        row.bytes = weight_bytes(model) + held
        ids = prompt(models.subject, model, batch, context)
        steps = max(options.steps, GREEDY if arm.structure == OWN else 1)
        if arm.runtime == HF:
            compiling = self.device.type == "cuda" if options.compiling is None else options.compiling
            made: HfArm | OursArm = HfArm(model, ids, steps, compiling)
        else:
            ops = options.ops
            if ops == "auto":
                ops = "triton" if self.device.type == "cuda" else "torch"
            made = OursArm(model, ids, steps, ops, arm.mode or options.mode, arm.cache)
            if (read := made.bytes_read()) > DEQUANTIZED * row.bytes:
                what = f"the decoder reads {read / row.bytes:.1f} times the bytes of the model"
                row.fail(FAILED, f"{what}: it does not take these layers as they are stored")
                return made
        self._check(row, arm, made, model)
        if row.status == OK:
            timed(made, options.steps)
        return made

    def _check(self, row: DecodeRow, arm: ArmName, made: HfArm | OursArm, model: Any) -> None:
        """Compare logits after one step and, for a checkpoint, greedy tokens."""
        fed = made.ids[:, 0].clone()
        made.prefill()
        found = made.step(fed).float().clone()
        expected = reference_logits(model, made.ids, fed)
        row.rel_error = float((found - expected).norm() / expected.norm())
        limit = LIMITS[torch.bfloat16 if arm.cache == INT8 else self.dtype]
        if not row.rel_error <= limit:
            row.fail(WRONG, f"logits differ by {row.rel_error:.2g}")
        elif arm.structure == OWN and arm.runtime != HF:
            plain = HfArm(model, made.ids, GREEDY, compiling=False)
            note = compare_tokens(row, made.greedy(GREEDY), plain, model, limit)
            if note:
                row.fail(WRONG, note)

    def _model(self, models: Models, arm: ArmName) -> Any:
        plain = arm.runtime == HF and arm.structure == "lowrank"
        return models.get(arm.structure, arm.kind, plain, arm.head)

    def _fill(self, row: DecodeRow, samples: list[float]) -> None:
        found = spread(samples)
        row.fill(found)
        row.steps, row.tokens_per_second = self.options.steps, row.batch * 1e3 / found.ms
        if self.copy_tbps is not None and row.bytes is not None:
            row.floor_ms = row.bytes / self.copy_tbps * 1e-9
            row.fraction = row.floor_ms / found.ms

    def _compare(self, rows: list[DecodeRow]) -> None:
        """Fill in `speedup` over the dense baseline, or over transformers on a checkpoint."""
        base = next((r.ms for r in rows if r.arm in (BASELINE, FOLDER_ARMS[0])), None)
        for row in rows:
            if base is not None and row.ms is not None:
                row.speedup = base / row.ms

    def measure_machine(self) -> None:
        """And how fast it copies."""
        super().measure_machine()
        self.report.machine["copy_tbps"] = None
        if self.device.type == "cuda":
            from blr.compressor.bench.ceilings import measure_ceilings

            torch.cuda.set_device(self.device.index or 0)
            self.progress.stage("measuring copy bandwidth")
            self.copy_tbps = measure_ceilings(self.device, ()).copy_tbps
            self.report.machine["copy_tbps"] = self.copy_tbps

    def _release(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.compiler.reset()  # compiled steps hold their models' graphs
            with suppress(RuntimeError):
                torch.cuda.empty_cache()


def compare_tokens(
    row: DecodeRow, found: list[list[int]], plain: HfArm, model: Any, limit: float
) -> str | None:
    """Fill in `equal_tokens`; what is wrong, if anything.

    Tokens may part where two logits of transformers are as near as the two paths' rounding: from
    there on both continuations are right.
    """
    right = plain.greedy(len(found[0]))
    row.equal_tokens = len(found[0])
    for ids, ours, theirs in zip(plain.ids, found, right, strict=True):
        same = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        if same is None:
            continue
        row.equal_tokens = min(row.equal_tokens, same)
        prefix = torch.cat([ids, ids.new_tensor(theirs[:same])])[None]
        logits = model(prefix, use_cache=False, logits_to_keep=1).logits[0, -1].float()
        gap = float(logits[theirs[same]] - logits[ours[same]])
        if gap > limit * float(logits.square().mean().sqrt()):
            return f"greedy tokens differ after {same}, by {gap:.2g} in the logits"
        row.note = f"greedy tokens part after {same} at a near tie (logits differ by {gap:.2g})"
    return None


def run_decode(options: DecodeOptions, progress: Progress) -> tuple[Report, int]:
    """Time everything that `options` name; the report, and the exit code.

    Raises UsageError or CapabilityError before anything is timed.
    """
    settings = {k: v for k, v in asdict(options).items() if v is not None}
    bench = DecodeBench(options, Report("bench decode", settings, kind=DecodeRow), progress)
    return bench.report, bench.run()
