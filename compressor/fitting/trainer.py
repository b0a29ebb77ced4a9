"""The training loop of everything that is trained: one block's factors, all blocks, or a whole model."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from blr.compressor.structures.latent import Banks, LatentStack, PlainStack, Trained
from blr.kernels.common.capturing import Captured, own_stream

WARM_UP = 2  # eager passes before a capture
BETAS, EPS = (0.9, 0.95), 1e-8  # of Adam
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # torch's names of what Adam keeps of a master
Rate = float | Tensor
SCALES = ":scales"  # added to a parameter's name: the scales of its rounded numbers


class Adam:
    """Adam (arXiv 1412.6980) with a learning rate for every tensor, or [n] for one [n, ...]. `fused`:
    one GPU kernel moves all tensors of the same rate, which is slower if rates are many."""

    def __init__(self, masters: Sequence[Tensor], rates: Sequence[Rate], fused: bool = False) -> None:
        self.masters, self.fused = [m.detach() for m in masters], fused
        self.rates = [1.0 if isinstance(rate, Tensor) else rate for rate in rates]
        self.own = {n: rate for n, rate in enumerate(rates) if isinstance(rate, Tensor)}
        self.mean = [torch.zeros_like(master) for master in self.masters]
        self.square = [torch.zeros_like(master) for master in self.masters]
        self.steps = [0] * len(self.masters)

    @torch.no_grad()
    def move(self, gradients: Sequence[Tensor | None], factor: float) -> None:
        """Make one step at `factor` times the rates; tensors without a gradient stay."""
        alike: dict[tuple[float, int] | None, dict[int, Tensor]] = {}
        for n, gradient in enumerate(gradients):
            if gradient is not None:
                self.steps[n] += 1
                kind = (self.rates[n], self.steps[n]) if self.fused else None
                alike.setdefault(kind, {})[n] = gradient
        for some in alike.values():
            self._move(list(some), list(some.values()), factor)

    def _move(self, chosen: list[int], gradients: list[Tensor], factor: float) -> None:
        held = self.masters, self.mean, self.square
        masters, mean, square = ([tensors[n] for n in chosen] for tensors in held)
        (fast, slow), steps = BETAS, [self.steps[n] for n in chosen]
        rates = [self.rates[n] * factor for n in chosen]
        if self.fused:
            step = [torch.full((), float(steps[0]), device=masters[0].device)] * len(masters)
            torch._fused_adamw_(
                masters, gradients, mean, square, [], step, lr=rates[0], beta1=fast, beta2=slow, eps=EPS,
                weight_decay=0.0, amsgrad=False, maximize=False,
            )  # fmt: skip
            return
        torch._foreach_lerp_(mean, gradients, 1 - fast)
        torch._foreach_mul_(square, slow)
        torch._foreach_addcmul_(square, gradients, gradients, 1 - slow)
        below = torch._foreach_sqrt(square)
        torch._foreach_div_(below, [(1 - slow**step) ** 0.5 for step in steps])
        torch._foreach_add_(below, EPS)
        for n, each in zip(chosen, below, strict=True):
            if n in self.own:
                each /= self.own[n].view(-1, *[1] * (each.dim() - 1))
        starts = (1 - fast**step for step in steps)  # means start from zero
        moved = [-(rate / start) for rate, start in zip(rates, starts, strict=True)]
        torch._foreach_addcdiv_(masters, mean, below, moved)

    def moments(self) -> list[dict[str, Tensor]]:
        """What Adam keeps of every master, under torch's names."""
        counts = [torch.tensor(float(step)) for step in self.steps]
        kept = zip(counts, self.mean, self.square, strict=True)
        return [dict(zip(MOMENTS, found, strict=True)) for found in kept]

    def load(self, moments: Sequence[Mapping[str, Tensor]]) -> None:
        """Continue from the `moments` of another optimizer; a master without any starts anew."""
        for n, found in enumerate(moments):
            if found.keys() >= {*MOMENTS}:
                step, mean, square = (found[name] for name in MOMENTS)
                self.steps[n] = round(float(step))
                self.mean[n].copy_(mean)
                self.square[n].copy_(square)

    def free(self) -> None:
        """Free the moments; no step may follow."""
        self.mean.clear()
        self.square.clear()


class CapturedPasses(Captured):
    """A CUDA graph of `passes` on `inputs`, which leave gradients in `parameters`. The next replay
    overwrites these gradients. Raises RuntimeError if the passes cannot be captured."""

    def __init__(
        self, passes: Callable[..., object], parameters: Sequence[nn.Parameter], *inputs: Tensor
    ) -> None:
        self.parameters = parameters
        with own_stream():  # libraries set themselves up in the first passes
            for _ in range(WARM_UP):
                forget(parameters)
                passes(*inputs)
            forget(parameters)
        super().__init__(passes, *inputs)
        self.gradients = [parameter.grad for parameter in parameters]
        forget(parameters)

    def __call__(self, *inputs: Tensor) -> Any:
        found = super().__call__(*inputs)
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        return found


def forget(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        tensor.grad = None


class TrainedSet(Banks):
    """The trained parameters, by name. An optimizer moves their float32 copies, the `masters`, at the
    `shares` of its rate; `publish` rounds these into the model."""

    def __init__(self, trained: Mapping[str, Trained]) -> None:
        super().__init__(trained.values())  # banks move masters: first
        self.trained = dict(trained)
        self.masters: dict[str, Tensor] = {}
        self.shares: list[float] = []
        self.stacks: set[int] = set()  # masters that hold several, which have rates of their own
        for name, part in self.trained.items():
            for suffix, (master, share) in zip(("", SCALES), part.masters, strict=False):
                if isinstance(part, LatentStack | PlainStack):
                    self.stacks.add(len(self.masters))
                self.masters[name + suffix] = master
                self.shares.append(share)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that the model computes with."""
        return [part.parameter for part in self.trained.values()]

    def forget(self) -> None:
        forget((*self.parameters, *self.masters.values()))

    @torch.no_grad()
    def values(
        self, into: dict[str, Tensor] | None = None, device: torch.device | str = "cpu"
    ) -> dict[str, Tensor]:
        """Contiguous copies of the masters on `device`, by name; in the memory of `into` if given."""
        if into is None:
            into = {
                n: torch.empty(m.shape, dtype=m.dtype, device=device) for n, m in self.masters.items()
            }
        return {n: into[n].copy_(m) for n, m in self.masters.items()}

    @torch.no_grad()
    def restore(self, values: Mapping[str, Tensor]) -> None:
        """Set the masters to what `values` gave."""
        for name, master in self.masters.items():
            master.copy_(values[name])
        self.publish()


@dataclass
class Best:
    """The progress of a training: steps done, the best figure, its step and its masters."""

    step: int = 0
    best: float = float("inf")
    best_step: int = 0
    values: dict[str, Tensor] | None = None


class TrainingLoop:
    """Trains `what` at `rates`. A subclass defines gradients, length and what is minimized on held-back
    text. The best masters, the start included, are kept on `place` and restored at the end."""

    def __init__(
        self, what: TrainedSet, rates: Sequence[Rate], place: torch.device | str, fused: bool = False
    ) -> None:
        self.what, self.place = what, place
        self.optimizer = Adam(list(what.masters.values()), rates, fused)
        self.state = Best()
        self.kept: dict[str, Tensor] | None = None  # memory of this run for the best masters

    def train(self) -> None:
        """Train until `is_over`, then restore the best masters."""
        if self.state.values is None:
            self.consider()
        while not self.is_over():
            self.step()
            self.after_step()
        self.free()
        assert self.state.values is not None
        self.what.restore(self.state.values)

    def step(self) -> None:
        self.backward()
        self.optimizer.move([m.grad for m in self.what.masters.values()], self.factor())
        self.what.forget()
        self.what.publish()
        self.state.step += 1

    def consider(self) -> bool:
        """Judge the masters and keep a copy if they are the best so far; returns whether they are."""
        found = self.judge()
        better = self.state.values is None or found < self.state.best
        if better:
            self.state.best, self.state.best_step = found, self.state.step
            self.state.values = self.kept = self.what.values(self.kept, self.place)
        return better

    def is_over(self) -> bool:
        """Whether training has ended."""
        raise NotImplementedError

    def factor(self) -> float:
        """The share of the rates for the next step."""
        raise NotImplementedError

    def backward(self) -> None:
        """Leave the gradients of the next step in the masters."""
        raise NotImplementedError

    def judge(self) -> float:
        """The number that training minimizes, on held-back text."""
        raise NotImplementedError

    def after_step(self) -> None:
        """Called after each step."""

    def free(self) -> None:
        """Free the memory that only steps need."""
        self.optimizer.free()
