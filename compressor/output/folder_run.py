"""The course of every command that makes a folder: open, plan, work, write, check, commit.

`compress`, `heal` and `export` open the workspace of their output, plan from headers, and give a
`FolderRun` their work; it goes through the rest, or finishes what a killed run had all but committed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from blr.compressor.base import process_environment as environment
from blr.compressor.base.errors import UsageError
from blr.compressor.base.progress import Progress
from blr.compressor.recipe.settings import RunSettings
from blr.compressor.workspace.ownership import check_apart
from blr.compressor.workspace.workspace import Workspace

if TYPE_CHECKING:
    from blr.compressor.base.processes import Processes
    from blr.compressor.output.check import OutputCheck
    from blr.compressor.output.files import FolderContents
    from blr.compressor.output.loss_messages import CheckFacts


@contextmanager
def opened(
    output: Path, settings: RunSettings, *reads: Path, alone: bool = False
) -> Iterator[Workspace]:
    """Open the workspace of a run that reads the folders `reads`; only the first process enters it.

    `alone`: the run is of this process only. Raises OutputError as `check_apart` and `Workspace`,
    UsageError for pickles with several processes.
    """
    for folder in reads:
        check_apart(output, folder)
    if settings.allow_pickle and environment.count() > 1 and not alone:
        raise UsageError("--allow-pickle is for one process; convert the weights to safetensors first")
    first = alone or environment.is_first()
    how = {"overwrite": settings.overwrite, "restart": settings.restart}
    workspace = Workspace(output, **how, visiting=not first)
    with workspace if first else nullcontext():
        if settings.allow_pickle:
            workspace.claim()
        yield workspace


class FolderRun(ABC):
    """One run in an open workspace, in each of its processes; the first one writes.

    `processes` import torch, so they are made once headers are checked. `checked` is set at the end.
    """

    workspace: Workspace
    progress: Progress
    processes: Processes
    checked: CheckFacts | None = None

    @abstractmethod
    def estimate(self) -> int:
        """The most bytes on disk that the run takes."""

    @abstractmethod
    def fingerprint(self) -> dict[str, object]:
        """The settings that a run must share to go on with another's work."""

    @abstractmethod
    def prepare(self, first: bool) -> None:
        """Check everything that needs no weights, and announce the steps."""

    @abstractmethod
    def digest(self) -> str:
        """SHA-256 over all input."""

    @abstractmethod
    def make_check(self) -> OutputCheck:
        """The check of the output; the model to compare with runs now."""

    @abstractmethod
    def work(self, read: str) -> FolderContents | None:
        """The contents of the folder; None in all processes but the first."""

    @abstractmethod
    def facts(self, read: str) -> Mapping[str, object]:
        """The manifest's account of the input."""

    def run(self, first: bool = True) -> None:
        """Make the folder, or finish what a killed run had all but committed."""
        fingerprint = self.fingerprint() if first else {}  # names what cannot be read
        with self.workspace.room(self.estimate() if first else 0, check=first):
            if first:
                self.workspace.open(fingerprint)
            from blr.compressor.modeling import register

            register()
            self.prepare(first)
            with self.progress.timed("reading"):
                read = self.digest() if first else ""
            done = first and self.workspace.finished(read)
            read, done = self.processes.told((read, done))
            if not done:
                self.produce(read)
            self.processes.leave()

    def produce(self, read: str, check: OutputCheck | None = None) -> None:
        """Work, write, check and commit. `read` is the digest of the input; `check` may be given."""
        if self.processes.first and check is None:
            check = self.make_check()
        contents = self.work(read)
        self.processes.leave()
        if contents is not None and check is not None:
            from blr.compressor.output import files

            files.write_whole(self, self.workspace.partial, contents, check, read)
            self.workspace.commit()
            self.checked = check.facts
