"""The healing of one checkpoint: check, read or write text, train, write, check, commit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from blr.compressor.base.device import device_name
from blr.compressor.base.errors import CapabilityError
from blr.compressor.base.processes import Processes
from blr.compressor.base.progress import READING, Progress
from blr.compressor.checkpoint.extras import METRICS
from blr.compressor.checkpoint.source import Source
from blr.compressor.exporting.origin import Checkpoint, open_checkpoint
from blr.compressor.healing import output as written
from blr.compressor.healing.data import (
    Data,
    Reading,
    batch_windows,
    make_data,
    own_tokens,
    reading_of,
    text_digests,
)
from blr.compressor.healing.state import State
from blr.compressor.healing.student_and_teacher import (
    Sharding,
    TrainedPair,
    check_shardable,
    load_pair,
    load_teacher,
    task_of,
    wants_sharding,
)
from blr.compressor.healing.summary import HealSummary
from blr.compressor.healing.teacher import check_teacher, first_loss, recorded_digest
from blr.compressor.healing.tracking import Tracking, check_tracker
from blr.compressor.healing.trained_parameters import check_has_kinds, check_takes_additions, growth
from blr.compressor.healing.trainer import Trainer
from blr.compressor.output.check import OutputCheck
from blr.compressor.output.files import FolderContents
from blr.compressor.output.folder_run import FolderRun, opened
from blr.compressor.planning.forecast_healing import GpuGroup, disk_bytes, predicted, words
from blr.compressor.planning.roofline import find_gpu
from blr.compressor.recipe.settings import HealOptions, check_options, healing_steps
from blr.compressor.text.own import OwnText, write_own_text
from blr.compressor.workspace.journal import canonical_json, headers_digest, layer_key, versions
from blr.compressor.workspace.scan import scan_source
from blr.compressor.workspace.shards import assign_shards
from blr.compressor.workspace.workspace import Workspace


def heal(
    folder: Path, teacher: Path, output: Path, options: HealOptions, progress: Progress
) -> HealSummary | None:
    """Write the compressed checkpoint in `folder` to `output`, trained to answer as `teacher`, resuming
    an earlier run. All processes train; the first writes and alone gets a summary. Raises BlrError."""
    started = monotonic()
    options = check_options(options)
    if options.track:
        check_tracker(options.track)
    with opened(output, options, folder, teacher) as workspace:
        processes, scratch = Processes(options.device), workspace.pickled
        progress = progress if processes.first else Progress(silent=True)
        student = open_checkpoint(folder, options.allow_pickle, scratch)
        dense = open_checkpoint(teacher, options.allow_pickle, scratch / "teacher")
        progress.notes(dense.source.notes())
        progress.notes(check_student(student, dense, options))
        reading = reading_of(dense, options)
        run = HealRun(student, dense, options, processes, workspace, progress, reading)
        run.run(processes.first)
    return run.summary(monotonic() - started) if processes.first else None


def check_student(student: Checkpoint, teacher: Checkpoint, options: HealOptions) -> list[str]:
    """Notes on a student. Raises BlrError if it is not of the teacher, or not trainable as asked."""
    told = check_teacher(student, teacher, options.force)
    written.check_told(student)
    if not options.lora:
        check_has_kinds(student, options.train)
        return told
    check_takes_additions(student, options.lora)
    return told + growth(student.specs.values(), options.lora)


@dataclass
class HealRun(FolderRun):
    """One healing, of texts as the teacher reads them. `state` and `told`, its account for the manifest,
    are set at its end. Raises UsageError for windows that make no batch."""

    checkpoint: Checkpoint
    teacher: Checkpoint
    options: HealOptions
    processes: Processes
    workspace: Workspace
    progress: Progress
    reading: Reading
    state: State | None = None
    packed: written.Packed = field(default_factory=dict)
    told: dict[str, object] = field(default_factory=dict)
    speeds: list[float] = field(default_factory=list)
    teacher_digest: str | None = None  # `scan_source`'s, once the teacher has been read
    doubted: bool = False  # whether the teacher may be another model than the student came from

    def __post_init__(self) -> None:
        self.texts = text_digests(self.options.files)
        batch_windows(self.options, self.reading, self.on_gpu, self.processes.count)

    @property
    def on_gpu(self) -> bool:
        return self.processes.device.type == "cuda"

    def prepare(self, first: bool) -> None:
        self.progress.expect(READING, *healing_steps(self.options))

    def make_check(self) -> OutputCheck:
        place = self.workspace.output, self.progress.warn
        return written.make_check(self.checkpoint, self.teacher, self.reading, self.options, *place)

    def work(self, read: str) -> FolderContents | None:
        if self.processes.first:
            self.workspace.claim({METRICS})
        self.teacher_digest, self.doubted = self.processes.told((self.teacher_digest, self.doubted))
        pair, data = self._train(read)
        return self._contents(pair, data, read) if self.processes.first else None

    def _train(self, read: str) -> tuple[TrainedPair, Data]:
        sharding = self._plan_sharding()
        teacher = load_teacher(self.teacher.source.folder, self.processes.device, task_of(self.teacher))
        data = self._data(teacher)
        kinds = self.options.train
        added = (self.options.lora, self.options.seed) if self.options.lora else None
        how = kinds, self.reading.sentences, added
        pair = load_pair(self.checkpoint.source.folder, teacher, *how, sharding)
        self.progress.notes(pair.left_out(kinds))
        key = layer_key(state=[read, data.digest])
        with self._tracked() as tell:
            place = self.workspace.journal, key
            trainer = Trainer(pair, data, self.options, self.processes, place, tell, self.progress)
            self.state, self.speeds = trainer.run(), trainer.speeds
        self.packed = written.round_layers(
            pair, self.checkpoint.source, data.take(0), trainer.judge_written
        )
        self.told = self._told(pair, data, trainer.objective.weight)
        return self._whole(pair, how) if sharding else pair, data

    def _whole(self, pair: TrainedPair, how: Any) -> TrainedPair:
        """A sharded pair, whole on the CPU in the first process."""
        values, dtype = pair.joined(pair.values()), str(pair.teacher.dtype).removeprefix("torch.")
        if not self.processes.first:
            return pair
        place = self.teacher.source.folder, torch.device("cpu")
        teacher = load_teacher(*place, task_of(self.teacher), dtype)
        found = load_pair(self.checkpoint.source.folder, teacher, *how)
        found.restore(values)
        return found

    def _plan_sharding(self) -> Sharding | None:
        """How both models are sharded, where that is asked for or memory demands it; else None."""
        self.options = replace(self.options, fsdp=wants_sharding(self.options, self.processes))
        if self.options.fsdp:
            check_shardable(self.checkpoint, self.processes)
        self._plan_memory()
        if not self.options.fsdp:
            return None
        check_shardable(self.checkpoint, self.processes)
        return Sharding(self.processes)

    def _plan_memory(self) -> None:
        """Announce what a GPU will hold, and decide on checkpointing and sharding if they are open.
        Raises CapabilityError if it does not fit."""
        device = self.processes.device
        if not self.on_gpu:
            return
        room = min(self.processes.gather(torch.cuda.mem_get_info(device)[0]))
        card = find_gpu("h200")  # its speed is not told: that of this one is measured in a moment
        group = GpuGroup(self.processes.count, bool(self.options.fsdp), room)
        found = predicted(self.teacher.source, self.checkpoint.specs, self.options, card, group)
        said = words(found, device_name(device), speed=False)
        if not found.fits:
            raise CapabilityError(said)
        self.progress.notes([said])
        micro = found.micro if found.sharded else self.options.micro
        kept, shared = found.checkpointing, found.sharded
        self.options = replace(self.options, checkpointing=kept, fsdp=shared, micro=micro)

    @contextmanager
    def _tracked(self) -> Iterator[Callable[[dict[str, object]], None]]:
        """Meanwhile a function that records each logged line in the folder and in a tracker."""
        name = self.options.track if self.processes.first else None
        tracking = Tracking(name or "", self.workspace.output.name, self.progress)

        def tell(line: dict[str, Any]) -> None:
            if self.doubted and line["step"] == 0:
                self.progress.notes(first_loss(line["held"], self.teacher.source.config))
            if self.processes.first:
                with open(self.workspace.partial / METRICS, "a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
            tracking.log(line)

        try:
            yield tell
        finally:
            tracking.finish()

    def _data(self, teacher: PreTrainedModel) -> Data:
        reading, journal, processes = self.reading, self.workspace.journal, self.processes
        if reading.window < self.options.window:
            self.progress.notes([f"windows of {reading.window} tokens, the model's most"])
        self.progress.notes(reading.shortened(self.options))
        share = processes.rank, processes.count

        def write(tokens: int, length: int) -> Tensor:
            digest = self.teacher_digest or self._scan(self.teacher.source)
            wanted = OwnText(tokens, length, self.options.seed, digest)
            how = wanted, journal, self.progress, share, processes.wait
            return write_own_text(teacher, reading.tokenizer, *how)

        parameters = self.teacher.source.parameters
        return make_data(reading, self.options, parameters, self.on_gpu, write)

    def _contents(self, pair: TrainedPair, data: Data, read: str) -> FolderContents:
        workspace, source, packed = self.workspace, self.checkpoint.source, self.packed
        assert self.state is not None
        better = pair if self.state.best_step else None  # else all tensors stay as they are
        place = workspace.journal, layer_key(output=[read, data.digest])
        trained = written.store_trained(better, self.checkpoint, *place, packed) if better else {}
        shards = assign_shards(written.slots(source, trained), self.options.max_shard_size)
        files = written.small_files(self.checkpoint, better, packed, self.told, self.state.log)
        return FolderContents(shards, workspace.journal.reader(source), files)

    def _told(self, pair: TrainedPair, data: Data, hidden: float) -> dict[str, object]:
        """The account of the training, in which the blocks' outputs weighed `hidden`."""
        state, options = self.state, self.options
        assert state is not None
        return {
            "teacher": options.teacher_name,
            "device": device_name(pair.device),
            "steps": state.step,
            "tokens": state.step * data.tokens,
            "parameters": pair.size,
            "best_step": state.best_step,
            "before": state.before,
            "after": state.best_merits,
            "shares": {part.name: part.windows / data.batch for part in data.parts},
            **{"train": options.trained(pair.kinds()), "rate": options.rate},
            **{"loss": options.loss if pair.sentences is None else "distance", "hidden": hidden},
            **{"seed": options.seed, "batch": data.tokens, "window": data.window},
        }

    def facts(self, read: str) -> dict[str, object]:
        earlier = self.checkpoint.manifest
        healed = {"name": self.options.source_name, "revision": self.options.revision}
        facts = {
            "source": earlier.get("source", healed),
            "recipe_sha256": earlier.get("recipe_sha256"),
            "fallbacks": earlier.get("fallbacks", []),
            "healed_from": healed,
            "teacher": {"name": self.options.teacher_name, "sha256": self.teacher_digest},
            **{"run": self.workspace.fingerprint, "input_sha256": read},
        }
        return json.loads(canonical_json(facts))

    def estimate(self) -> int:
        parameters = self.teacher.source.parameters
        tokens = own_tokens(self.options, self.reading, parameters, self.on_gpu)
        return disk_bytes(self.checkpoint.source, self.checkpoint.specs, self.options, tokens)

    def fingerprint(self) -> dict[str, object]:
        """Without the number of processes."""
        return {
            "source": headers_digest(self.checkpoint.source),
            "teacher": headers_digest(self.teacher.source),
            "texts": self.texts,
            "heal": {**self.options.fingerprint(), "device": self.processes.device.type},
            "versions": versions(),
        }

    def digest(self) -> str:
        """Of all but the texts, which the fingerprint holds."""
        found = [self._scan(checkpoint.source) for checkpoint in (self.checkpoint, self.teacher)]
        self.teacher_digest = found[1]
        self.doubted = found[1] != recorded_digest(self.checkpoint.source.folder)
        return hashlib.sha256(canonical_json(found)).hexdigest()

    def _scan(self, source: Source) -> str:
        return scan_source(source, "repair the checkpoint, or take another", self.progress).digest

    def summary(self, seconds: float) -> HealSummary:
        """The summary of this run; little of one that found its work done."""
        found = HealSummary(str(self.workspace.output), seconds=seconds, check=self.checked)
        if self.state is not None:
            found.trained_seconds = self.state.seconds
            found.tokens_per_second = median(self.speeds or [0.0])
            for name in ("steps", "tokens", "parameters", "best_step", "before", "after"):
                setattr(found, name, self.told[name])
        return found
