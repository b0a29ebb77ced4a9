"""Settings that all commands share which write a folder."""

from dataclasses import KW_ONLY, dataclass, replace
from typing import Annotated, Self

from blr.compressor.recipe.option import Limits
from blr.compressor.workspace.shards import DEFAULT_SHARD_BYTES


@dataclass(frozen=True)
class RunSettings:
    """How a run reads and writes. The output records `source_name` and `revision`; `max_shard_size` is
    in bytes.

    Options:
        threads: Compute with this many CPU threads. [OMP_NUM_THREADS, or all free cores]
        max_shard_size: Largest file of weights, as 500MB or 5GB.
        revision: Branch, tag or commit on the hub. [main]
        overwrite: Replace an output folder that blr wrote.
        restart: Discard the work of an interrupted run, and start again.
        allow_pickle: Read weights from pytorch_model.bin, too.
        check: Run the output and measure its loss before it appears.
        force: Write the output even if it loses over 1 nat a token.
        offline: Read nothing from the network.
    """

    source_name: str
    _: KW_ONLY
    threads: Annotated[int, Limits(1, 1024)] | None = None
    max_shard_size: int = DEFAULT_SHARD_BYTES
    revision: str | None = None
    overwrite: bool = False
    restart: bool = False
    allow_pickle: bool = False
    check: bool = True
    force: bool = False
    offline: bool = False

    def named(self, name: str, revision: str | None) -> Self:
        """The same settings for a model that was found under another name."""
        return replace(self, source_name=name, revision=revision)


@dataclass(frozen=True)
class CompressSettings(RunSettings):
    """How a compression runs. `calibration` names a text file or data set; `heal` is how many minutes
    training takes after the fits.

    Options:
        device: Compute on auto, cpu, cuda or cuda:N.
        for_draft: Choose the form that makes the best draft of the model on --gpu, and heal it for that.
    """

    for_draft: bool = False
    calibration: str | None = None
    heal: float | None = None
    device: str = "auto"
