"""The dense model's side of a comparison: the hidden states from which it predicts the tokens of a text.

They are all that must be kept to judge further outputs. With its head they give its logits again, to
the last bit, in a fraction of their bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from blr.compressor import __version__
from blr.compressor.base.disk import scratch_for, settle
from blr.compressor.base.progress import Progress
from blr.compressor.base.quoting import first_line
from blr.compressor.fitting.readout import DividedDecoder, Readout
from blr.compressor.workspace.journal import canonical_json

MOST_KEPT = 4 << 30  # bytes of the states of one text that are kept


def predicting(model: DividedDecoder, rows: Tensor, fresh: int) -> Tensor:
    """The states [m fresh, d] that predict the last `fresh` tokens of rows [m, w]."""
    return model.hidden(rows)[:, -fresh - 1 : -1].flatten(0, 1)


def kept_at(folder: Path, checkpoint: Path, *key: object) -> Path:
    """Where the states of a dense checkpoint lie that depend on `key`, too. Its files are known by their
    sizes and times."""
    files = sorted(path for path in checkpoint.iterdir() if path.is_file())
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    by = (__version__, torch.__version__, transformers.__version__)
    digest = hashlib.sha256(canonical_json([stats, by, key])).hexdigest()
    return folder / f"{digest}.safetensors"


@dataclass
class Kept:
    """States [n, d] that were read from a file, and their head."""

    hidden: Tensor
    head: Readout


class DenseStates:
    """States of the windows of a text of `tokens`, in their order: read from `path` where they lie, else
    computed by the model that `load` gives, and kept there. None: kept nowhere."""

    def __init__(
        self, load: Callable[[], DividedDecoder], path: Path | None, tokens: int, progress: Progress
    ) -> None:
        self.path, self.tokens, self.progress = path, tokens, progress
        self.kept = _read(path) if path is not None and path.is_file() else None
        self.model = load() if self.kept is None else None
        self.at, self.new = 0, list[Tensor]()

    def states(self, rows: Tensor, fresh: int) -> tuple[Tensor, Readout]:
        """What predicts the last `fresh` tokens of each row [m, w], and the head for it."""
        if self.model is not None:
            found = predicting(self.model, rows, fresh)
            self._keep(found)
            return found, self.model.head
        assert self.kept is not None
        head = self.kept.head = self.kept.head.to(rows.device)
        self.at += len(rows) * fresh
        return self.kept.hidden[self.at - len(rows) * fresh : self.at].to(rows.device), head

    def _keep(self, found: Tensor) -> None:
        """Hold states for the file, if all of them are few enough."""
        if self.path is not None and self.tokens * found[0].nbytes > MOST_KEPT:
            size, self.path = self.tokens * found[0].nbytes, None
            most = f"over {MOST_KEPT >> 30} GiB, which is the most; give a shorter text"
            self.progress.notes([f"the dense model's states are not kept: {size >> 20:,} MiB, {most}"])
        if self.path is not None:
            self.new.append(found.cpu())

    def write(self) -> None:
        """Keep the states that were computed; where that fails, a warning says so."""
        if self.model is None or self.path is None:
            return
        head = self.model.head
        tensors = {"hidden": torch.cat(self.new), "weight": head.weight, "bias": head.bias}
        held = {name: t.detach().cpu().contiguous() for name, t in tensors.items() if t is not None}
        scratch = scratch_for(self.path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            save_file(held, scratch)
            settle(scratch, self.path)
        except Exception as error:  # of the system, or of the library's own kind
            self.progress.warn(f"the dense model's states are not kept ({first_line(error, 160)})")
        finally:
            with suppress(OSError):
                scratch.unlink(missing_ok=True)


def _read(path: Path) -> Kept | None:
    """What lies at `path`; None for a file that is no such one, which is then made anew."""
    try:
        found = load_file(path)
        return Kept(found["hidden"], Readout(found.get("weight"), found.get("bias")))
    except Exception:  # of whatever another has written there
        return None
