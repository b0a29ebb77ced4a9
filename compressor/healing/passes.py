"""Forward and backward passes of a step: in parts that fit memory, on a GPU as CUDA graphs."""

from __future__ import annotations

import torch
from torch import Tensor

from blr.compressor.base.errors import CapabilityError
from blr.compressor.base.progress import Progress
from blr.compressor.base.quoting import first_line
from blr.compressor.fitting.trainer import CapturedPasses
from blr.compressor.healing.embedding import Embedding
from blr.compressor.healing.objective import Objective
from blr.compressor.healing.student_and_teacher import Pair


class Passes:
    """Leaves the gradients of the mean loss in the masters of `pair`.

    Args:
        scored: tokens (or sentences) that the loss of a whole batch sums over, of all processes.
        most: windows of a step that a process has at most. micro: windows a pass, to begin with
            (None: all).
    """

    def __init__(
        self, pair: Pair, objective: Objective | Embedding, scored: int, most: int, micro: int | None,
        progress: Progress,
    ) -> None:  # fmt: skip
        self.pair, self.objective, self.scored = pair, objective, scored
        self.most, self.micro, self.progress = most, min(micro or most, most), progress
        self.graphs: dict[torch.Size, CapturedPasses] = {}
        self.captures = pair.device.type == "cuda" and not pair.slices

    def __call__(self, rows: Tensor) -> Tensor:
        """This process's share of the loss of a batch; `rows` are its windows.

        Raises CapabilityError when not even one window fits in memory.
        """
        while True:
            try:
                return self._run(rows)
            except torch.OutOfMemoryError:
                pass  # again outside of the handler, which keeps the failed pass's tensors alive
            self._make_room(rows.shape[1])

    def _run(self, rows: Tensor) -> Tensor:
        total = torch.zeros((), device=self.pair.device)
        parts = rows.split(self.micro)
        for part in parts:
            total += self._part(part)
            self.pair.collect()
        if self.pair.slices and len(parts) < -(-self.most // self.micro):
            self._eager(parts[0][:1], 0.0)  # others need this process's slices in their passes
            self.pair.collect()
        return total

    def _part(self, part: Tensor) -> Tensor:
        if not self.captures:
            return self._eager(part)
        if part.shape not in self.graphs and not self._capture(part):
            return self._eager(part)
        return self.graphs[part.shape](part)

    def _eager(self, part: Tensor, weight: float = 1.0) -> Tensor:
        loss = self.objective(part.to(self.pair.device)) * (weight / self.scored)
        loss.backward()
        return loss.detach()

    def _capture(self, part: Tensor) -> bool:
        """Whether the passes of a part of this shape could be captured; if not, none is any more."""
        try:
            given = self.pair.parameters, part.to(self.pair.device)
            self.graphs[part.shape] = CapturedPasses(self._eager, *given)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # whatever a model does that no graph can hold
            reason = first_line(error, 120)
            self.progress.notes([f"the training step is no CUDA graph, it runs slower ({reason})"])
            self.captures = False
            self.pair.forget()
        return self.captures

    def _make_room(self, window: int) -> None:
        self.graphs.clear()
        self.pair.forget()
        torch.cuda.empty_cache()
        if self.micro == 1 or self.pair.slices:  # the others have gone on: no pass is made again
            raise CapabilityError(
                f"{self.micro} windows of {window} tokens do not fit {self.pair.device}; "
                "lower --window or --batch, pass --checkpointing or take a larger GPU"
            )
        self.micro = max(1, self.micro // 2)
        self.progress.notes([f"out of memory: {self.micro} windows a pass from here on"])
