"""Trains a student until the budget is spent; held-back windows judge it from time to time.

The passes of a step are made in parts that fit in memory, on a GPU as CUDA graphs.
"""

import math
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from blr.compressor.base import stopping
from blr.compressor.base.errors import CapabilityError, NumericsError
from blr.compressor.base.processes import Processes
from blr.compressor.base.progress import HEALING, Progress
from blr.compressor.base.quoting import first_line
from blr.compressor.fitting.trainer import CapturedPasses, TrainingLoop
from blr.compressor.healing.data import Data
from blr.compressor.healing.objective import Embedding, Objective
from blr.compressor.healing.state import State, load_state, save_state
from blr.compressor.healing.student_and_teacher import TrainedPair, checkpoint_blocks, compile_blocks
from blr.compressor.recipe.settings import HealOptions
from blr.compressor.workspace.journal import Journal

EVALUATIONS = 10  # in a run, besides the first one
LOGGED = 100  # lines of metrics in a run
SMALL = 0.02  # root mean square that is assumed of a tensor of zeros, as many biases are
STEP = 1.1  # rates are rounded to its powers, so that one kernel moves tensors of about the same size
HELD_ON_CPU = 16  # windows of a text that judge a decoder on a CPU: all 64 take as long as ten steps


class Trainer(TrainingLoop):
    """Trains `pair` on `data`; `run` leaves the parameters that were best on held-back windows. The
    state is kept in a journal under a key (`place`); `tell` gets every logged line as it comes."""

    state: State

    def __init__(
        self, pair: TrainedPair, data: Data, options: HealOptions, processes: Processes,
        place: tuple[Journal, str], tell: Callable[[dict[str, Any]], None], progress: Progress,
    ) -> None:  # fmt: skip
        sizes, fused = pair.sizes(processes), pair.device.type == "cuda"
        super().__init__(pair, rounded_rates(options.rate, sizes, pair.shares), "cpu", fused)
        self.pair, self.data, self.options = pair, data, options
        self.processes, self.saved_at, self.progress, self.tell = processes, place, progress, tell
        if options.checkpointing:
            checkpoint_blocks(pair.student)
        stream = data.parts[0].stream
        self.objective: Objective | Embedding
        if pair.sentences is not None:
            self.objective = Embedding(pair, pair.sentences, options.hidden)
        else:
            probe = stream.held[:1, :64].to(pair.device)
            self.objective = Objective(pair, options, probe, stream.idle)
        most = HELD_ON_CPU if pair.device.type == "cpu" and pair.sentences is None else None
        self.held = {part.name: part.stream.held[:most] for part in data.parts}
        if options.compile:
            compile_blocks(pair.student)
            compile_blocks(pair.teacher)
        scored = data.batch * self.objective.scored(data.window)
        most = -(-data.batch // processes.count)
        self.passes = Passes(pair, self.objective, scored, most, options.micro, progress)
        self.total = options.steps or (options.epochs and data.steps(options.epochs)) or 0
        self.meter = Meter(pair.device)
        self.state = State()
        self.speeds: list[float] = []  # tokens a second, at every logged line of this run

    def run(self) -> State:
        """Train until the budget is spent or nothing improves. Raises NumericsError if the loss is not
        finite, CapabilityError if a single window does not fit in memory."""
        self._resume()
        self.started = self.saved = monotonic()
        self.earlier = self.state.seconds
        self.spent = self._share()  # of the budget
        if self.state.values is None:
            self.consider()
            self.state.before = self.state.best_merits
        with self.progress.training(HEALING, self.spent) as self.show, stopping.holding():
            self.train()
        return self.state

    def _share(self) -> float:
        if self.total:
            return self.state.step / self.total
        return self.state.seconds / (60 * (self.options.minutes or 1))

    def _resume(self) -> None:
        found = load_state(*self.saved_at, self.pair)
        names = [part.name for part in self.data.parts]
        if found is not None:
            found[0].rename(names)
        if found is None or not found[0].judged(names):
            self.state.texts = names
            return
        self.state, masters, moments = found
        self.pair.restore(masters)
        self.optimizer.load([moments.get(name, {}) for name in self.pair.masters])
        self.meter.total += self.state.loss_sum
        self.meter.steps = self.state.loss_steps
        self.progress.say(f"resumed at step {self.state.step}, trained for {self.state.seconds:.0f} s")

    def free(self) -> None:
        self.passes.graphs.clear()
        super().free()

    def is_over(self) -> bool:
        return self.state.done

    def factor(self) -> float:
        half = 0.5 / self.total if self.total else 1e-6
        return schedule(self.spent + half, self.options.warmup)

    def backward(self) -> None:
        rows = self.data.take(self.state.step)[self.processes.rank :: self.processes.count]
        loss = self.processes.sum(self.passes(rows))
        self.processes.sum_gradients(self.pair.kept_whole())
        norm = self.pair.norm(self.processes)
        torch.nn.utils.clip_grads_with_norm_(self.pair.masters.values(), self.options.clip, norm)
        self.last = loss, norm

    def after_step(self) -> None:
        """Log, evaluate and save when it is time."""
        self._check()
        self.meter.add(*self.last, self.data.tokens)
        self.state.seconds = self.earlier + monotonic() - self.started
        before = self.spent
        now_late = monotonic() - self.saved >= 60 * self.options.save_minutes
        agreed = self.processes.agreed(self._share(), now_late, stopping.waiting())
        self.spent, late, stop = agreed
        if math.floor(self.spent * LOGGED) > math.floor(before * LOGGED):
            loss, speed = self.meter.read()
            self.speeds.append(speed)
            self._log({"loss": loss}, tokens_per_second=speed)
            self.show(self.spent, f"loss {loss:.4f}, {speed:,.0f} tokens/s")
        if math.floor(self.spent * EVALUATIONS) > math.floor(before * EVALUATIONS):
            self.consider()
        patience = self.options.patience
        stale = patience is not None and self.state.worse >= patience
        self.state.done = self.spent >= 1 or stale
        if late or stop or self.state.done:
            with stopping.holding(False):  # a disk may hang
                self._save()
        if stop:
            stopping.leave(int(stop))

    def _check(self) -> None:
        """Raise NumericsError if the previous step failed; its figures have arrived by now."""
        if not self.meter.finite():
            raise NumericsError(
                f"the loss or its gradient is not finite at step {self.state.step}; lower --lr, now "
                f"{self.options.rate:g}, and pass --restart"
            )

    def _merits(self) -> dict[str, Any]:
        return {name: self.objective.merit(held) for name, held in self.held.items()}

    def _judged(self, merits: dict[str, Any]) -> float:
        """The number to minimize: the mean over all texts, each by its share of a batch. Raises
        NumericsError."""
        parts = [p.windows * merits[p.name][self.objective.figure] for p in self.data.parts]
        found = self.processes.agreed(sum(parts) / self.data.batch)[0]
        if not math.isfinite(found):
            raise NumericsError(
                f"the loss on held-back windows is not finite at step {self.state.step}; "
                + ("lower --lr and pass --restart" if self.state.step else "the model is damaged")
            )
        return found

    def judge(self) -> float:
        """The number to minimize, on held-back windows; the merits of every text are logged."""
        self._flush()
        self.merits = self._merits()
        found = self._judged(self.merits)
        self._log({"held": _rounded(self.merits)})
        return found

    def consider(self) -> bool:
        better = super().consider()
        self.state.worse = 0 if better else self.state.worse + 1
        if better:
            self.state.best_merits = _rounded(self.merits)
        return better

    def judge_written(self) -> None:
        """Judge the pair after rounding; where it is no better than the start, record the start."""
        merits, before = self._merits(), self.state.before
        if self.state.best_step and self._judged(merits) < self._judged(before):
            self.state.best_merits = _rounded(merits)
        else:
            self.state.best_step, self.state.best_merits = 0, before

    def _flush(self) -> None:
        self._check()
        self.meter.last.zero_()

    def _log(self, found: dict[str, Any], **speed: float) -> None:
        """Keep a line of what was `found`. Times are only told, so that the same steps write the same
        lines."""
        line: Any = {"step": self.state.step, "tokens": self.state.step * self.data.tokens, **found}
        self.state.log.append(line)
        self.tell({**line, "seconds": round(self.state.seconds, 2), **speed})

    def _save(self) -> None:
        self._flush()
        self.state.loss_sum, self.state.loss_steps = float(self.meter.total), self.meter.steps
        if self.processes.first or self.pair.slices:
            journal, key = self.saved_at
            save_state(journal, key, self.state, self.pair, self.optimizer, self.processes.first)
        self.processes.wait()
        self.saved = monotonic()


class Meter:
    """Loss and speed since the last logged line. The figures of a step are copied to the CPU in the
    background, so that reading those of the last one does not wait for the current one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.event = torch.cuda.Event() if device.type == "cuda" else None
        self.last = torch.zeros(2, pin_memory=self.event is not None)
        self._restart()

    def _restart(self) -> None:
        self.total = torch.zeros((), device=self.device)
        self.steps, self.tokens, self.at = 0, 0, monotonic()

    def add(self, loss: Tensor, norm: Tensor, tokens: int) -> None:
        self.last.copy_(torch.stack([loss, norm.detach().float()]), non_blocking=True)
        if self.event is not None:
            self.event.record()
        self.total += loss
        self.steps, self.tokens = self.steps + 1, self.tokens + tokens

    def finite(self) -> bool:
        """Whether the figures of the last step are finite."""
        if self.event is not None:
            self.event.synchronize()
        return bool(torch.isfinite(self.last).all())

    def read(self) -> tuple[float, float]:
        """The mean loss and the tokens a second since the last call."""
        loss = round(float(self.total) / max(self.steps, 1), 6)
        speed = round(self.tokens / max(monotonic() - self.at, 1e-9), 1)
        self._restart()
        return loss, speed


def _rounded(merits: dict[str, Any]) -> Any:
    return {name: {k: round(v, 6) for k, v in merit.items()} for name, merit in merits.items()}


def rounded_rates(rate: float, sizes: Iterable[float], shares: Iterable[float]) -> list[float]:
    """The rate of each master: `rate` times its root mean square times its share, rounded so that many
    are equal."""
    known = (share * (size or SMALL) for size, share in zip(sizes, shares, strict=True))
    return [rate * STEP ** round(math.log(each, STEP)) for each in known]


def schedule(done: float, warmup: float) -> float:
    """The share of the learning rate at `done` of the run: a linear rise, then half a cosine down."""
    if done < warmup:
        return done / warmup
    return 0.5 * (1 + math.cos(math.pi * min((done - warmup) / (1 - warmup), 1.0)))


class Passes:
    """Runs the forward and backward passes of a step, in parts that fit in memory. The masters of `pair`
    then have the gradients of the mean loss over `scored` tokens or sentences. A process has up to
    `most` windows of a step, and at first takes `micro` in a pass (None: all)."""

    def __init__(
        self, pair: TrainedPair, objective: Objective | Embedding, scored: int, most: int,
        micro: int | None, progress: Progress,
    ) -> None:  # fmt: skip
        self.pair, self.objective, self.scored = pair, objective, scored
        self.most, self.micro, self.progress = most, min(micro or most, most), progress
        self.graphs: dict[torch.Size, CapturedPasses] = {}
        self.captures = pair.device.type == "cuda" and not pair.slices

    def __call__(self, rows: Tensor) -> Tensor:
        """This process's share of the loss. Raises CapabilityError if one window does not fit."""
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
        """Try to capture the passes of parts of this shape; after a failure none is captured."""
        try:
            given = self.pair.parameters, part.to(self.pair.device)
            self.graphs[part.shape] = CapturedPasses(self._eager, *given)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # the model does something that no graph can hold
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
