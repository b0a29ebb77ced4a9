"""The last pass of a fit: all blocks together, trained to give the dense model's distributions.

What every block's refit leaves is an error of its own output; which of it the loss feels is known only
behind the last block. So at the end the factors, packed weights, scales and norms of all blocks move
together against KL(dense ‖ compressed) of the next token on the text of the calibration: the dense
side is there as the final hidden states that the fit has carried along, so no second model is held.
The steps are those of a block's refit, and so are the held-back windows that choose the epoch.
Source: the idea of an end-to-end pass after blocks is EfficientQAT's (arXiv 2407.11062).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blr.compressor.base.errors import CapabilityError
from blr.compressor.base.progress import LAST
from blr.compressor.fitting.block_passes import Batch, Blocks, run_block
from blr.compressor.fitting.blocks import BlockModel
from blr.compressor.fitting.factorize import layer_seed
from blr.compressor.fitting.refit import Refit, Refitting
from blr.compressor.fitting.student import Run, train_and_keep
from blr.compressor.planning.training_sizes import LAST_SHARE, last_pass_bytes, logit_parts
from blr.compressor.structures.latent import Trained
from blr.compressor.workspace.journal import layer_key
from blr.kernels.training.divergence.op import divergence_sum

FINISH = 5  # raise it when the results change
RATE = 0.003  # of a tensor's root mean square, a step


def finish_blocks(run: Run, starts: list[Batch]) -> None:
    """Train the run's students together, keep what comes out in the journal, and take it as the results.

    Args:
        starts: of every batch, the states that enter the first block; `run.batches` hold those that
            leave the last of the dense model.
    """
    work, settings = run.work, [run.finish, FINISH]
    keys = [
        layer_key(finish=settings, prefix=run.prefix, block=student.index) for student in run.students
    ]

    def train() -> Refit:
        with work.progress.layers(run.finish, LAST) as advance:
            return _train(run, starts, lambda epoch: advance(f"epoch {epoch + 1}"))

    states = {n: starts[n].student for n in run.mine}
    train_and_keep(run, run.students, keys, states, "finish", train)
    run.prefix = layer_key(prefix=run.prefix, done=keys)


def _train(run: Run, starts: list[Batch], advance: Any) -> Refit:
    trained = [part for student in run.students for part in student.trained]
    targets = {n: batch.hidden for n, batch in run.mine.items()}
    steps = Finishing(run, trained, starts, targets)
    return steps.run(run.finish, layer_seed(run.work.recipe.seed, "finish"), advance)


class Finishing(Refitting):
    """Moves what is `trained` of all blocks; errors are nats a token."""

    def __init__(
        self, run: Run, trained: list[Trained], starts: list[Batch], targets: dict[int, Tensor],
        rate: float = RATE,
    ) -> None:  # fmt: skip
        self.model = run.model
        blocks = Blocks([student.block for student in run.students])
        super().__init__(blocks, trained, run.work.processes, starts, targets, None, rate)

    def _parts(self, batch: Batch) -> int:
        """So many that the logits of one are no more than `LOGITS` bytes."""
        return logit_parts(batch.mask.numel() * logit_bytes(self.model), len(batch.mask))

    def _loss(self, batch: Batch, student: Tensor, target: Tensor, tokens: int) -> Tensor:
        """KL of the batch's predictions, as its share in a mean over those of so many `tokens`."""
        out = batch.predicting(run_block(self.block, student.to(self.device), batch))
        with torch.no_grad():
            dense = self.model.logits(batch.predicting(target.to(self.device)))
        share = 1 - batch.idle / batch.mask.shape[1]
        return divergence_sum(self.model.logits(out), dense) / (tokens * share)


def logit_bytes(model: BlockModel) -> int:
    """Of one token, in float32."""
    head: Any = model.model.get_output_embeddings()
    return 4 * int(head.weight.shape[0])


def finish_epochs(asked: int | None, usual: int, model: BlockModel, batches: list[Batch]) -> int:
    """How many there are to be: those `asked` for, else `usual` on a GPU that has the room.

    Raises CapabilityError: they are asked for, but the model has no logits, or the GPU not the room.
    """
    if asked == 0 or (asked is None and model.device.type != "cuda"):
        return 0
    if not model.model.can_generate():
        if asked:
            raise CapabilityError(
                f"{model.source.folder}: --finish is for a model that predicts tokens; leave it out"
            )
        return 0
    needed, room = _bytes(model, batches), _room(model.device)
    if needed > room and asked:
        raise CapabilityError(
            f"--finish trains all blocks at once, which takes {needed / 1e9:,.0f} GB; {model.device} "
            f"has {room / 1e9:,.0f} to give; leave it out, and heal afterwards"
        )
    return (usual if asked is None else asked) * (needed <= room)


def _room(device: torch.device) -> float:
    if device.type != "cuda":
        return float("inf")
    return LAST_SHARE * torch.cuda.get_device_properties(device).total_memory


def _bytes(model: BlockModel, batches: list[Batch]) -> float:
    """Predicted."""
    tokens = max(batch.mask.numel() for batch in batches)
    weights = sum(p.numel() for p in model.blocks.parameters())
    widths = sum(sum(p.shape) for p in model.blocks.parameters() if p.dim() == 2)
    return last_pass_bytes(weights, widths, tokens, logit_bytes(model))
