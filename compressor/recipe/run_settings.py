"""What every command that writes a folder is told beside what the folder shall hold."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Annotated, Self

from blr.compressor.recipe.option import Option
from blr.compressor.workspace.shards import DEFAULT_SHARD_BYTES

DEVICE = Option("auto, cpu, cuda or cuda:N.")
OFFLINE = Option("Never open a socket.")
REVISION = Option("Branch, tag or commit on the hub.", "main")
RESTART = Option("Discard what an interrupted run left.")
THREADS = Option(
    "CPU threads to compute with.",
    "OMP_NUM_THREADS, or the cores that affinity and quota leave",
    least=1,
    most=1024,
)


@dataclass(frozen=True)
class RunSettings:
    """How a run reads and writes. `source_name` and `revision` are recorded in the output;
    `max_shard_size` is in bytes."""

    source_name: str
    _: KW_ONLY
    threads: Annotated[int | None, THREADS] = None
    max_shard_size: Annotated[int, Option("Largest shard, as 500MB or 5GB.", typed="5GB")] = (
        DEFAULT_SHARD_BYTES
    )
    revision: Annotated[str | None, REVISION] = None
    overwrite: Annotated[bool, Option("Replace an output folder that blr wrote.")] = False
    restart: Annotated[bool, RESTART] = False
    allow_pickle: Annotated[bool, Option("Read pytorch_model.bin (weights only).")] = False
    check: Annotated[
        bool, Option("Run what was written, and measure its loss, before it is committed.")
    ] = True
    force: Annotated[bool, Option("Write what loses over 1 nat a token of a decoder, too.")] = False
    offline: Annotated[bool, OFFLINE] = False

    def named(self, name: str, revision: str | None) -> Self:
        """The same for a model found under another name."""
        return replace(self, source_name=name, revision=revision)


@dataclass(frozen=True)
class CompressSettings(RunSettings):
    """How a compression runs. `calibration` names a text file or data set, `heal` are minutes of
    training after the fits."""

    calibration: str | None = None
    heal: float | None = None
    device: Annotated[str, DEVICE] = "auto"
