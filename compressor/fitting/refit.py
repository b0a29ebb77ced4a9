"""Refits one block towards the dense block's output, and all blocks together in the last pass.

Processes share out the parts of a batch; the result does not depend on how many processes there are.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from blr.compressor.base.device import tensor_cores
from blr.compressor.base.errors import CapabilityError
from blr.compressor.base.processes import Processes, sum_in_order
from blr.compressor.base.progress import LAST
from blr.compressor.fitting.block_passes import Batch, alike, run_block, window_rows
from blr.compressor.fitting.blocks import BlockModel
from blr.compressor.fitting.factorize import layer_seed
from blr.compressor.fitting.student import FitRun, train_and_keep
from blr.compressor.fitting.trainer import CapturedPasses, Rate, TrainedSet, TrainingLoop, forget
from blr.compressor.modeling.modeling_blr import Experts
from blr.compressor.planning.training_sizes import (
    HELD_BACK,
    LAST_SHARE,
    last_pass_bytes,
    logit_parts,
    refit_parts,
)
from blr.compressor.structures.latent import Trained
from blr.compressor.structures.linalg import add_ridge, cholesky
from blr.compressor.workspace.journal import layer_key
from blr.kernels.training.losses import divergence_sum

RATE = 0.01  # a step, relative to a tensor's root mean square
PACKED_RATE = 0.005  # the same where some tensors are rounded
FINISH_RATE = 0.003  # the same in the last pass
WARM_UP = 0.05  # share of the steps in which the rate rises
Errors = tuple[float, float]  # before and after
RIDGE = 0.01  # added to the output metric, relative to its mean diagonal
FINISH = 6  # to be raised when the last pass's results change


class Refitting(TrainingLoop):
    """Trains the parameters `trained` of `block` in place, as BRECQ (arXiv 2102.05426) does. A step is
    one batch. The best epoch on held-back windows is kept, the start included.

    The `student` states of `batches` enter the block; `targets` are the dense outputs [m, w, d] of this
    process's batches, by number; `metric` is the Fisher information [d, d] of the output, which weights
    the error (None: plain squares); `rate` is relative to a tensor's root mean square.
    """

    def __init__(
        self,
        block: nn.Module,
        trained: Sequence[Trained],
        processes: Processes,
        batches: list[Batch],
        targets: dict[int, Tensor],
        metric: Tensor | None,
        rate: float | None = None,
    ) -> None:
        what = TrainedSet({str(n): part for n, part in enumerate(trained)})
        rate = rate or (PACKED_RATE if what.banks else RATE)
        self.device = next(iter(what.masters.values())).device
        rates = rates_of([*what.masters.values()], what.shares, rate, what.stacks)
        super().__init__(what, rates, self.device)
        self.block, self.processes, self.parameters = block, processes, what.parameters
        counts = (module.count for module in block.modules() if isinstance(module, Experts))
        self.experts = max(counts, default=1)  # a graph would compute all of them for each token
        self.batches, self.targets = batches, targets
        self.root = None if metric is None else _root(metric.to(self.device))
        held = list(range(0, len(batches), HELD_BACK)) if len(batches) >= 4 else []
        self.train_on = [n for n in range(len(batches)) if n not in held]
        self.graph: CapturedPasses | None = None
        graphed = self.device.type == "cuda" and self.experts == 1
        self.captured = alike(batches) if graphed else [False] * len(batches)
        self.held = held or self.train_on

    def run(self, epochs: int, seed: int, advance: Callable[[int], None] = lambda _: None) -> Errors:
        """Train for `epochs`, in an order that follows from `seed`, and keep the best epoch. `advance`
        is called at the start of each. Returns the error on held-back batches before and after."""
        order, count = torch.Generator().manual_seed(seed), len(self.train_on)
        drawn = [torch.randperm(count, generator=order).tolist() for _ in range(epochs)]
        self.order, self.advance = [self.train_on[n] for epoch in drawn for n in epoch], advance
        for parameter in self.parameters:
            parameter.requires_grad_()
        self.what.publish()
        self.consider()
        before = self.state.best
        self.train()
        for parameter in self.parameters:
            parameter.requires_grad_(False)
        return before, self.state.best

    def is_over(self) -> bool:
        return self.state.step == len(self.order)

    def factor(self) -> float:
        """The share of the rates for the next step: a linear rise, then a linear fall."""
        step, steps = self.state.step, len(self.order)
        rise = max(1, round(WARM_UP * steps))
        return min(1.0, (step + 1) / rise) * max(0.0, 1 - step / max(steps, 1))

    def backward(self) -> None:
        epoch, done = divmod(self.state.step, len(self.train_on))
        if not done:
            self.advance(epoch)
        with tensor_cores(self.device):
            self._gradients(self.order[self.state.step])
        self.what.collect()

    def after_step(self) -> None:
        if self.state.step % len(self.train_on) == 0:
            self.consider()

    @torch.no_grad()
    def judge(self) -> float:
        """The mean error of the held-back batches, each computed by the process that owns it."""
        mine = {}
        with tensor_cores(self.device):
            for n in filter(self.processes.owns, self.held):
                batch = self.batches[n]
                mine[n] = float(self._loss(batch, batch.student, self.targets[n], batch.tokens))
        found = self.processes.merged(mine)
        return sum(found[n] for n in self.held) / len(self.held)

    def _gradients(self, n: int) -> None:
        """Leave the gradients of batch `n`'s mean error in the parameters, summed over processes."""
        source, batch = self.processes.owner(n), self.batches[n]
        student = self.processes.shared(batch.student if self.processes.owns(n) else None, source)
        target = self.processes.shared(self.targets.get(n), source)
        parts = self._parts(batch)
        windows = torch.arange(len(batch.mask)).tensor_split(parts)

        def part(at: int) -> dict[str, Tensor]:
            if parts > 1 or not self._replayed(n, student, target):
                rows = windows[at].to(student.device) if parts > 1 else slice(None)
                forget(self.parameters)
                some = window_rows(batch, windows[at])
                self._loss(some, student[rows], target[rows], batch.tokens).backward()
            found = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
            return {"all": torch.cat([gradient.flatten() for gradient in found])}

        total = sum_in_order(self.processes, parts, part, ["all"])["all"]
        sizes = [parameter.numel() for parameter in self.parameters]
        for parameter, found in zip(self.parameters, total.split(sizes), strict=True):
            parameter.grad = found.view_as(parameter)

    def _parts(self, batch: Batch) -> int:
        """The number of parts in which a batch is taken, by the amount of work for each expert."""
        trained = sum(parameter.numel() for parameter in self.parameters)
        return refit_parts(batch.mask.numel(), trained / self.experts, len(batch.mask))

    def _replayed(self, n: int, student: Tensor, target: Tensor) -> bool:
        """Compute a batch's gradients by a CUDA graph; False where that is not possible."""
        if not self.captured[n]:
            return False
        batch = self.batches[n]

        def passes(student: Tensor, target: Tensor) -> None:
            self._loss(batch, student, target, batch.tokens).backward()

        try:
            self.graph = self.graph or CapturedPasses(passes, self.parameters, student, target)
        except RuntimeError:  # the model does something that no graph can hold
            self.captured = [False] * len(self.batches)
            return False
        self.graph(student, target)
        return True

    def _loss(self, batch: Batch, student: Tensor, target: Tensor, tokens: int) -> Tensor:
        """The error of a batch's tokens, divided by `tokens`."""
        out = run_block(self.block, student.to(self.device), batch)
        missed = batch.rows(out - target.to(self.device))
        if self.root is not None:
            missed = missed @ self.root
        return missed.square().sum() / tokens


def rates_of(
    masters: Sequence[Tensor], shares: Sequence[float], rate: float, stacks: Collection[int] = ()
) -> list[Rate]:
    """The rate of each master: `rate` times its root mean square times its share. Of those numbered
    `stacks`, [n, ...], the rates [n]."""
    sizes: list[Rate] = [*torch.stack([m.detach().square().mean().sqrt() for m in masters]).tolist()]
    for n in stacks:
        sizes[n] = masters[n].detach().flatten(1).square().mean(1).sqrt()
    return [rate * share * size for size, share in zip(sizes, shares, strict=True)]


def _root(metric: Tensor) -> Tensor:
    """The lower Cholesky factor of the metric with a small ridge, in float32."""
    metric = metric.double() / metric.diagonal().mean().clamp_min(1e-30)
    return cholesky(add_ridge(metric, RIDGE)).float()


def finish_blocks(run: FitRun, starts: list[Batch]) -> None:
    """Train the run's students together, keep the result in the journal, and take it into the run's
    results. `starts` enter the first block; `run.batches` hold what leaves the last dense one."""
    work, settings = run.work, [run.finish, FINISH]
    keys = [layer_key(finish=settings, prefix=run.prefix, block=s.index) for s in run.students]

    def train() -> Errors:
        trained = [part for student in run.students for part in student.trained]
        steps = Finishing(run, trained, starts, {n: batch.hidden for n, batch in run.mine.items()})
        seed = layer_seed(work.recipe.seed, "finish")
        with work.progress.layers(run.finish, LAST) as advance:
            return steps.run(run.finish, seed, lambda epoch: advance(f"epoch {epoch + 1}"))

    states = {n: starts[n].student for n in run.mine}
    train_and_keep(run, run.students, keys, states, "finish", train)
    run.prefix = layer_key(prefix=run.prefix, done=keys)


class Finishing(Refitting):
    """Trains what is `trained` in all blocks together (EfficientQAT, arXiv 2407.11062): KL(dense ‖
    compressed) of the next token, in nats. Dense logits follow from the final states `targets`."""

    def __init__(
        self, run: FitRun, trained: list[Trained], starts: list[Batch], targets: dict[int, Tensor]
    ) -> None:
        self.model = run.model
        blocks = nn.ModuleList(student.block for student in run.students)
        super().__init__(blocks, trained, run.work.processes, starts, targets, None, FINISH_RATE)

    def _parts(self, batch: Batch) -> int:
        """How many parts a batch is taken in, so that the logits of one fit in `LOGITS` bytes."""
        return logit_parts(batch.mask.numel() * logit_bytes(self.model), len(batch.mask))

    def _loss(self, batch: Batch, student: Tensor, target: Tensor, tokens: int) -> Tensor:
        """KL(dense ‖ compressed) of predictions, summed and divided by those among `tokens`."""
        out = batch.predicting(run_block(self.block, student.to(self.device), batch))
        with torch.no_grad():
            dense = self.model.logits(batch.predicting(target.to(self.device)))
        share = 1 - batch.idle / batch.mask.shape[1]
        return divergence_sum(self.model.logits(out), dense) / (tokens * share)


def logit_bytes(model: BlockModel) -> int:
    """Bytes of one token's logits in float32."""
    head: Any = model.model.get_output_embeddings()
    return 4 * int(head.weight.shape[0])


def finish_epochs(asked: int | None, usual: int, model: BlockModel, batches: list[Batch]) -> int:
    """The epochs of the last pass: those `asked` for, else `usual` on a GPU with the room. Raises
    CapabilityError if epochs are asked for and the model has no logits, or the GPU not the room."""
    if asked == 0 or (asked is None and model.device.type != "cuda"):
        return 0
    if not model.model.can_generate():
        if asked:
            raise CapabilityError(
                f"{model.source.folder}: --finish is for a model that predicts tokens; leave it out"
            )
        return 0
    tokens = max(batch.mask.numel() for batch in batches)
    weights = sum(p.numel() for p in model.blocks.parameters())
    widths = sum(sum(p.shape) for p in model.blocks.parameters() if p.dim() == 2)
    needed, room = last_pass_bytes(weights, widths, tokens, logit_bytes(model)), _room(model.device)
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
