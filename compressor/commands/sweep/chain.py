"""What is done for one point: compress, evaluate, keep what was found. Its commands are processes of
their own, of several points at once, each on the GPU that is least busy."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from blr.compressor.base import process_environment as environment
from blr.compressor.base.errors import BlrError, InputError, kind_of_error
from blr.compressor.checkpoint.extras import REPORT
from blr.compressor.checkpoint.regular import read_end
from blr.compressor.commands.judged import Judged
from blr.compressor.commands.sweep.folder import ANEW, Folder, OutputReport, read_judgement
from blr.compressor.output.report import tensor_bytes
from blr.compressor.workspace.strict_json import read_kept

VISIBLE = "CUDA_VISIBLE_DEVICES"
PAUSE = 0.1  # seconds between two looks at what runs
LAST = 10.0  # seconds that killed ones are waited for: one in the kernel's hands may not end
SAID = "blr: error: "
SAID_WITHIN = 1 << 16  # bytes at the end of a log


@dataclass(frozen=True)
class Command:
    """A line of `blr` and where its results and its talk go."""

    arguments: tuple[str, ...]
    out: Path
    log: Path


def start(command: Command, environ: dict[str, str], alive: int) -> subprocess.Popen[bytes]:
    """Start a command, which ends when the other end of the pipe `alive` does."""
    with _own(command.out, os.O_TRUNC) as out, _own(command.log, os.O_APPEND) as log:
        return environment.start(command.arguments, alive, environ, stdout=out, stderr=log)


def _own(path: Path, how: int) -> BinaryIO:
    """Open a file of the sweep for writing, without following a link or waiting on a FIFO."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | how
    return os.fdopen(os.open(path, flags, 0o666), "wb")


def slots(device: str, jobs: int) -> list[dict[str, str]]:
    """The environment of each process that runs at once: `jobs` on every GPU."""
    if device not in ("auto", "cuda"):
        return [{} for _ in range(jobs)]
    import torch

    given = [name for name in os.environ.get(VISIBLE, "").split(",") if name]
    names = given or [str(n) for n in range(torch.cuda.device_count())]
    return [{VISIBLE: name} for _ in range(jobs) for name in names] or [{} for _ in range(jobs)]


def run_chains(chains: Sequence[PointChain], places: Sequence[dict[str, str]]) -> None:
    """Run all chains to their ends, in their order, one at a time in each of `places`."""
    waiting, free = list(chains), list(places)
    running: dict[subprocess.Popen[bytes], tuple[PointChain, dict[str, str]]] = {}
    alive, ours = os.pipe()  # whose first end is at its end when this process is
    try:
        while waiting or running:
            ready = [(waiting.pop(0), free.pop(0)) for _ in range(min(len(waiting), len(free)))]
            time.sleep(PAUSE * bool(running))
            for process in [each for each in running if each.poll() is not None]:
                chain, place = running.pop(process)
                chain.ended(process.poll() or 0)
                ready.append((chain, place))
            for chain, place in ready:
                if (command := chain.command()) is None:
                    free.append(place)
                else:
                    running[start(command, place, alive)] = chain, place
    finally:
        _end(running)
        os.close(ours)
        os.close(alive)


def _end(running: Mapping[subprocess.Popen[bytes], tuple[PointChain, object]]) -> None:
    """Kill the commands that still run when an error ends the sweep."""
    for process, (chain, _) in running.items():
        process.kill()
        chain.stopped()
    until = time.monotonic() + LAST
    while any(process.poll() is None for process in running) and time.monotonic() < until:
        time.sleep(PAUSE)


@dataclass
class PointChain:
    """The commands that make one point of a sweep: `compress` (None: the dense model) and `evaluate` are
    their options. `failure` and `code` tell of a failed command, `spent` are seconds of all runs."""

    folder: Folder
    name: str
    model: str
    compress: tuple[str, ...] | None
    evaluate: tuple[str, ...]
    keep: bool = False
    failure: str = ""
    code: int = 0
    begun: Callable[[str], None] = lambda name: None
    began: float = 0.0
    done: int = 0
    spent: float = 0.0

    def command(self) -> Command | None:
        """The next one, None where the point is done or has failed."""
        if self.failure or self.done == 2:
            return None
        if self.done == 0:
            self.begun(self.name)
            self.spent = self.folder.spent(self.name)
            output = self.folder.output(self.name)
            if self.compress is not None and not self.folder.is_written(self.name):
                made = ("compress", self.model, *self.compress, "--force")  # it is judged here
                return self._command((*made, "-o", str(output), "--format", "json"))
            self.done = 1
        checkpoint = self.model if self.compress is None else str(self.folder.output(self.name))
        return self._command(("eval", checkpoint, *self.evaluate, "--format", "json"))

    def ended(self, code: int) -> None:
        """Note the end of the command. Raises the error of the dense model's."""
        self.stopped()
        self.done += 1
        found = read_judgement(self._out)
        if code:
            self.code, self.failure = code, found.error or self._last_words(code)
            if self.compress is None:
                raise kind_of_error(code)(f"the dense model cannot be judged: {self.failure}")
        elif self.done == 2:
            self._keep(found)

    def stopped(self) -> None:
        """Note what the command took, which another run of the sweep may not take again."""
        self.spent += time.monotonic() - self.began
        self.folder.write(f"logs/{self.name}.spent.json", {"seconds": self.spent})

    def tidy(self) -> None:
        """Remove the checkpoint of a point that is done, unless it was made to be kept."""
        record = self.folder.record(self.name)
        if self.compress is not None and record is not None and not record.kept:
            self.folder.tidy(self.name)

    def missing(self) -> bool:
        """Whether it is to be made: its record, or the checkpoint to be kept, is missing."""
        if self.folder.record(self.name) is None:
            return True
        return self.keep and self.compress is not None and not self.folder.is_written(self.name)

    @property
    def _out(self) -> Path:
        return self.folder.log(self.name).with_suffix(".out")

    def _command(self, arguments: tuple[str, ...]) -> Command:
        self.began = time.monotonic()
        return Command(arguments, self._out, self.folder.log(self.name))

    def _keep(self, found: Judged) -> None:
        """Write the record of the point, or note why there is none; raises for the dense model."""
        try:
            self.folder.write(f"points/{self.name}.json", self._record(found))
        except BlrError as error:
            if self.compress is None:
                raise
            self.code, self.failure = error.exit_code, str(error)
        else:
            self.tidy()

    def _last_words(self, code: int) -> str:
        lines = read_end(self.folder.log(self.name), SAID_WITHIN).splitlines()
        said = [line.removeprefix(SAID) for line in lines if line.startswith(SAID)]
        ended = f"exit code {code}" if code > 0 else f"ended by signal {-code}"
        return f"{said[-1] if said else 'it said nothing'} ({ended})"

    def _record(self, found: Judged) -> dict[str, object]:
        """Raises InputError for what the commands have not written so."""
        if not found.perplexities:
            raise InputError(f"{self._out}: found no perplexity of `blr eval`; {ANEW}")
        record: dict[str, object] = {"perplexities": [text.perplexity for text in found.perplexities]}
        if self.compress is not None:
            output = self.folder.output(self.name)
            report = read_kept(output / REPORT, OutputReport, ANEW, InputError)
            if report is None:
                raise InputError(f"{output}: found no {REPORT}; expected it of `blr compress`; {ANEW}")
            stored = sum(map(tensor_bytes, output.glob("*.safetensors")))
            far = [text.against.kl for text in found.perplexities if text.against]
            record |= {"bits": report.totals.bits, "bytes": stored, "kl": [kl.mean for kl in far if kl]}
        spent = {"seconds": round(self.spent, 1), "kept": self.keep}
        return record | spent | {"digest": self.folder.made.get(self.name, "")}


def command_line(model: str, options: tuple[str, ...], name: str) -> str:
    """What makes a point, to be typed."""
    return shlex.join(["blr", "compress", model, *options, "-o", name])
