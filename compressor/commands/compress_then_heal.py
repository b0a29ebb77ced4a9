"""Healing in the run that compressed the model: in its workspace, the dense source as the teacher."""

from __future__ import annotations

from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from blr.compressor.base.progress import CHECKING, READING, WRITING, Progress
from blr.compressor.checkpoint.source import Source
from blr.compressor.commands.heal import HealRun
from blr.compressor.exporting.origin import Checkpoint, open_checkpoint
from blr.compressor.healing.summary import HealSummary
from blr.compressor.planning.forecast_healing import kept_bytes
from blr.compressor.recipe.heal_settings import SELF, HealOptions, check_options, healing_steps
from blr.compressor.recipe.run_settings import CompressSettings
from blr.compressor.workspace.workspace import Workspace

if TYPE_CHECKING:
    from blr.compressor.base.processes import Processes
    from blr.compressor.output.check import OutputCheck
    from blr.compressor.output.loss import Text
    from blr.compressor.planning.forecast_time import Compression
    from blr.compressor.recipe.schema import Recipe


class Healing:
    """The training after a compression of `source`. Raises BlrError, before any work, for a model
    that cannot be healed or a text that is too short."""

    def __init__(self, source: Source, settings: CompressSettings) -> None:
        from blr.compressor.healing.data import reading_of

        self.teacher = Checkpoint(source, {}, compressed=False)
        self.options = options_of(settings)
        self.reading = reading_of(self.teacher, self.options)
        self.reading.texts(self.options, briefly=True)

    def held(self) -> Text | None:
        """What neither fits nor training read of the text of a decoder."""
        return self.reading.held(self.options, self.teacher.source)

    def run(
        self,
        folder: Path,
        check: OutputCheck | None,
        read: str,
        workspace: Workspace,
        progress: Progress,
        processes: Processes,
    ) -> HealSummary:
        """Train the compressed checkpoint in `folder` and make the output, which must pass `check` in
        the first process; `read` is the digest of all that the compression read."""
        started = monotonic()
        student = open_checkpoint(folder)
        place = processes, workspace, progress
        run = HealRun(student, self.teacher, self.options, *place, self.reading)
        run.teacher_digest = read  # it is all that the compression reads
        run.produce(read, check)
        return run.summary(monotonic() - started)


def options_of(settings: CompressSettings) -> HealOptions:
    """What `blr heal` would be asked for the same as a compression (`compress.Settings`)."""
    text = settings.calibration
    return check_options(
        HealOptions(
            source_name=settings.source_name,
            teacher_name=settings.source_name,
            revision=settings.revision,
            data=() if text is None or text == SELF else (text,),
            minutes=settings.heal,
            device=settings.device,
            max_shard_size=settings.max_shard_size,
            offline=settings.offline,
        )
    )


def steps_of(settings: CompressSettings, recipe: Recipe, device: str) -> list[str]:
    """The steps of a compression on a kind of device, with those of the healing behind it."""
    from blr.compressor.fitting.engine import expected

    steps = [READING, *expected(recipe, settings.calibration, device), WRITING, CHECKING]
    return steps + (healing_steps(options_of(settings)) if settings.heal else [])


def disk_beside(sized: Compression, settings: CompressSettings) -> int:
    """Bytes on disk that a healing takes beside its compression: what that gives, and its own state."""
    layers, source = sized.plan.layers, sized.source
    whole = sum(entry.nbytes for entry in source.entries.values())
    files = sum(path.stat().st_size for path in source.extra_files().values())
    specs = {planned.layer.module: planned.spec for planned in layers}
    compressed = whole - sized.bytes + sum(planned.bits for planned in layers) // 8
    return compressed + files + kept_bytes(specs, source.entries, options_of(settings))
