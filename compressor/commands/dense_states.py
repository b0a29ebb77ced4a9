"""The hidden states from which a dense model predicts the tokens of a text.

They are all that must be kept to judge further outputs. With its head they give its logits again, to
the last bit, in a fraction of their bytes.
"""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from blr.compressor import __version__
from blr.compressor.base.disk import scratch_for, settle
from blr.compressor.base.progress import Progress
from blr.compressor.base.quoting import first_line
from blr.compressor.healing.objective import Readout, Replies
from blr.compressor.workspace.journal import canonical_json

MOST_KEPT = 4 << 30  # bytes of the states of one text that are kept


def predicting(model: Replies, rows: Tensor, fresh: int) -> Tensor:
    """The states [m fresh, d] that predict the last `fresh` tokens of rows [m, w]."""
    return model.run(rows)[0][:, -fresh - 1 : -1].flatten(0, 1)


def kept_at(folder: Path, checkpoint: Path, *key: object) -> Path:
    """Where the states of a dense checkpoint lie that depend on `key`, too. Its files are known by their
    sizes and times."""
    files = sorted(path for path in checkpoint.iterdir() if path.is_file())
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    by = (__version__, torch.__version__, transformers.__version__)
    return folder / f"{hashlib.sha256(canonical_json([stats, by, key])).hexdigest()}.safetensors"


class DenseStates:
    """States of the windows of a text of `tokens`, in their order: read from `path` where they lie, else
    computed by the model that `load` gives, and kept there. None: kept nowhere."""

    def __init__(self, load: Callable[[], Replies], path: Path | None, tokens: int) -> None:
        self.path, self.tokens = path, tokens
        self.kept = _read(path) if path is not None else {}
        self.model = None if self.kept else load()
        self.at, self.new = 0, list[Tensor]()

    def states(self, rows: Tensor, fresh: int) -> tuple[Tensor, Readout]:
        """What predicts the last `fresh` tokens of each row [m, w], and the head for it."""
        if self.model is not None:
            found = predicting(self.model, rows, fresh)
            if self.path is not None and self.tokens * found[0].nbytes <= MOST_KEPT:
                self.new.append(found.cpu())
            return found, self.model.head
        self.kept = {name: tensor.to(rows.device) for name, tensor in self.kept.items()}
        self.at += len(rows) * fresh
        found = self.kept["hidden"][self.at - len(rows) * fresh : self.at]
        return found, Readout(self.kept.get("weight"), self.kept.get("bias"))

    def write(self, progress: Progress) -> None:
        """Keep the states that were computed; where that fails, a warning says so."""
        if self.model is None or self.path is None:
            return
        if not self.new:
            most = f"over {MOST_KEPT >> 30} GiB, which is the most; give a shorter text"
            return progress.notes([f"the dense model's states are not kept: {most}"])
        head, scratch = self.model.head, scratch_for(self.path)
        tensors = {"hidden": torch.cat(self.new), "weight": head.weight, "bias": head.bias}
        held = {name: t.detach().cpu().contiguous() for name, t in tensors.items() if t is not None}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            save_file(held, scratch)
            settle(scratch, self.path)
        except Exception as error:  # of the system, or of the library's own kind
            progress.warn(f"the dense model's states are not kept ({first_line(error, 160)})")
        finally:
            with suppress(OSError):
                scratch.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Tensor]:
    """What lies at `path`; nothing of a file that is no such one, which is then made anew."""
    try:
        found = load_file(path)
        return found if "hidden" in found else {}
    except Exception:  # of whatever another has written there
        return {}
