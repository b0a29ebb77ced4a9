"""What an output must pass before it is committed: it loads, and computes about what its source does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from blr.compressor.checkpoint.source import Source
from blr.compressor.errors import BlrError, OutputError
from blr.compressor.loading.trial import NO_CHECK, Trial, reading_trial
from blr.compressor.machine.exhaustion import raise_exhausted
from blr.compressor.output.doors import door_of
from blr.compressor.output.produce import Written
from blr.compressor.quoting import first_line, quote


class Check:
    """Compares the model in a written folder with the one that it was made from.

    Args:
        source: what the output is made from, dense or ours. It runs now, before any work.
        reload: checks that every tensor of a written folder finds its place; the files that it wrote.
        runs: whether to run them; otherwise `reload` is all.
        text: tokens [n, w] on which what a causal language model loses is measured, too.

    Raises:
        InputError, NumericsError: nothing can be said of what this model computes.
    """

    def __init__(
        self,
        source: Source,
        reload: Callable[[Path], Written],
        runs: bool = True,
        text: Tensor | None = None,
    ) -> None:
        self.reload = reload
        self.door = door_of(source)
        self.distance: float | None = None
        self.loss: float | None = None
        self.trial: Trial | None = None
        self.reading: Trial | None = None
        if runs:
            model = self.door.dense(source)
            self.trial = self.door.trial(model, source.folder)
            self.reading = reading_trial(model, text) if text is not None else None

    def __call__(self, folder: Path) -> Written:
        """Check `folder`; `distance` and `loss` say then how far its results are.

        Raises OutputError for a model that does not load or run, NumericsError for NaN or Inf.
        """
        written = self.reload(folder)
        if self.trial is not None:
            self.distance, self.loss = _measured(self.door.written, self.trial, self.reading, folder)
        return written

    @property
    def facts(self) -> dict[str, Any] | None:
        """What was run, and the relative distance of the results; None if nothing was. With it the
        loss in nats a token, where it was measured."""
        if self.trial is None or self.distance is None:
            return None
        found: dict[str, Any] = {"ran": self.trial.what, "distance": self.distance}
        if self.reading is not None:
            found |= {"read": self.reading.what, "loss": self.loss}
        return found


def _measured(
    load: Callable[[Path], Any], trial: Trial, reading: Trial | None, folder: Path
) -> tuple[float, float | None]:
    try:
        model = load(folder)
        distance = trial.distance(model, folder)
        return distance, reading.divergence(model, folder) if reading is not None else None
    except (BlrError, MemoryError):
        raise
    except Exception as error:  # a model may raise anything
        raise_exhausted(error)
        reason = first_line(error)
        found = f"what was written does not run ({quote(reason, 160)[1:-1]})"
        remedy = f"exclude the layer that this is about ({NO_CHECK})"
        raise OutputError(f"{folder}: {found}, expected it to as its source does; {remedy}") from error
