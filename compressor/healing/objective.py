"""The loss of a decoder: the distance between the student's and the teacher's answers, summed over
tokens.

Logits are by far the largest tensors of a step. So they are made for a few thousand tokens at a time,
and the gradients with respect to hidden states and head are computed at once; this is the idea of fused
linear cross entropy (Liger, arXiv 2410.10989).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, log_softmax

from blr.compressor.base.errors import CapabilityError
from blr.compressor.base.exhaustion import raise_exhausted
from blr.compressor.healing.sharding import blocks_of
from blr.compressor.healing.student_and_teacher import TrainedPair
from blr.compressor.modeling.masks import unpacked
from blr.compressor.modeling.modeling_blr import DenseWeight
from blr.compressor.planning.training_sizes import CHUNK
from blr.compressor.recipe.heal_settings import HIDDEN, HealOptions
from blr.kernels.common.registration import ContextOf
from blr.kernels.training.losses import divergence_sum, relative_errors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Measure = Callable[[Tensor, Tensor | None, Tensor], Tensor]
HELD_BATCH = 8  # held-back windows that are run at once


def kl(student: Tensor, teacher: Tensor | None, _: Tensor) -> Tensor:
    """Σ KL(teacher ‖ student) in nats over rows of logits [n, v]. Only for `summed`: the
    gradient comes from the same kernel."""
    assert teacher is not None
    return divergence_sum(student, teacher, alone=True)


def kl_of_top(k: int) -> Measure:
    """`kl` over the teacher's k likeliest tokens, with all others together as one."""

    def measure(student: Tensor, teacher: Tensor | None, _: Tensor) -> Tensor:
        assert teacher is not None
        log_p, log_q = (log_softmax(x, -1, dtype=torch.float32) for x in (teacher, student))
        log_p, chosen = log_p.topk(min(k, teacher.shape[-1] - 1), -1)
        log_q = log_q.gather(-1, chosen)
        rest_p, rest_q = (1 - x.exp().sum(-1) for x in (log_p, log_q))
        rest_p, rest_q = rest_p.clamp_min(1e-9), rest_q.clamp_min(1e-9)
        rest = rest_p * (rest_p.log() - rest_q.log())
        return (log_p.exp() * (log_p - log_q)).sum() + rest.sum()

    return measure


def variation(student: Tensor, teacher: Tensor | None, _: Tensor) -> Tensor:
    """Σ total variation between both: the share of a draft's tokens that its model rejects."""
    assert teacher is not None
    return (student.float().softmax(-1) - teacher.float().softmax(-1)).abs().sum() / 2


def lm(student: Tensor, _: Tensor | None, targets: Tensor) -> Tensor:
    """Σ −log q of the text's next tokens [n]."""
    return cross_entropy(student.float(), targets, reduction="sum")


@dataclass
class Readout:
    """The output head: `weight` [v, d], in whose dtype it computes, and `bias` [v]. Without a weight
    the hidden states are logits already."""

    weight: Tensor | None
    bias: Tensor | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, v] of `hidden` [n, d]."""
        if self.weight is None:
            return hidden
        return linear(hidden.to(self.weight.dtype), self.weight, self.bias)


class Replies:
    """A causal language model, divided into hidden states and a head. A model that scales or caps its
    logits is run whole, and its logits stand for hidden states. `blocks`: theirs may be asked for."""

    def __init__(self, model: PreTrainedModel, probe: Tensor, blocks: bool = True) -> None:
        self.model, self.body = model, model.base_model
        self._outputs: list[Tensor] | None = None  # of the blocks, while they are recorded
        for block in blocks_of(model) if blocks else ():
            block.register_forward_hook(self._note)
        with torch.no_grad():
            whole = model(probe, use_cache=False).logits
            self.plain = self._fits(probe, whole)

    @torch.no_grad()
    def _fits(self, probe: Tensor, whole: Tensor) -> bool:
        head = self.model.get_output_embeddings()
        if not isinstance(getattr(head, "weight", None), Tensor) or self.body is self.model:
            return False  # no head, or one that is not one matrix
        try:
            hidden = self.body(probe, use_cache=False).last_hidden_state
            return torch.equal(head(hidden.to(head.weight.dtype)).float(), whole.float())
        except Exception as error:  # of a body that takes or gives other things than the model
            raise_exhausted(error)
            return False

    @property
    def head(self) -> Readout:
        """What turns the hidden states of `run` into logits."""
        if not self.plain:
            return Readout(None)
        module = self.model.get_output_embeddings()
        weight = module.weight
        if isinstance(weight, DenseWeight):  # itself no function of the factors that are trained
            weight = module.composed()
        return Readout(weight, getattr(module, "bias", None))

    def run(self, ids: Tensor, states: bool = False) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The states that enter the head [m, w, d], and, if `states` is set, the outputs of all blocks,
        the last one normed."""
        model, outputs = self.body if self.plain else self.model, list[Tensor]()
        self._outputs = outputs if states else None
        try:
            with unpacked():
                out = model(ids, use_cache=False)
        finally:
            self._outputs = None  # a pass that ran out of memory must not keep any
        if not self.plain:
            return out.logits, tuple(outputs)
        return out.last_hidden_state, (*outputs[:-1], out.last_hidden_state) if outputs else ()

    def _note(self, block: object, given: object, output: Tensor) -> None:
        """Record a block's output; transformers cannot for a model that is divided over processes."""
        if self._outputs is not None:
            self._outputs.append(output[0] if isinstance(output, tuple | list) else output)


class _Chunked(torch.autograd.Function):
    """Σ measure over rows in chunks, whose gradients are computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: ContextOf[list[torch.dtype | None]], hidden: Tensor, weight: Tensor | None,
        bias: Tensor | None, theirs: Callable[[slice], Tensor | None],
        targets: Tensor, measure: Measure,
    ) -> Tensor:  # fmt: skip
        given = (hidden, weight, bias)
        wanted = [x for x in given if x is not None and x.requires_grad]
        wide = {id(x): x.dtype if x is hidden else torch.float32 for x in wanted}  # sums over chunks
        gradients = {id(x): torch.zeros_like(x, dtype=wide[id(x)]) for x in wanted}
        total = hidden.new_zeros((), dtype=torch.float32)
        for at in chunks(hidden, weight):
            with torch.enable_grad():
                part = hidden[at].detach().requires_grad_(hidden.requires_grad)
                w, b = _leaf(weight), _leaf(bias)
                loss = measure(Readout(w, b).logits(part), theirs(at), targets[at])
            pairs = zip(given, (part, w, b), strict=True)
            leaves = {id(x): leaf for x, leaf in pairs if leaf is not None and id(x) in gradients}
            found = torch.autograd.grad(loss, list(leaves.values()))
            for key, gradient in zip(leaves, found, strict=True):
                whole = gradients[key]
                (whole[at] if key == id(hidden) else whole).add_(gradient)
            total += loss.detach()
        ctx.save_for_backward(*(gradients.get(id(x)) for x in given))
        ctx.more = [None if x is None else x.dtype for x in given]
        return total

    @staticmethod
    def backward(ctx: ContextOf[list[torch.dtype | None]], g: Tensor) -> tuple[object, ...]:
        found = [
            None if x is None else (x * g).to(dtype)
            for x, dtype in zip(ctx.saved_tensors, ctx.more, strict=True)
        ]
        return (*found, None, None, None)


def _leaf(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().requires_grad_(x.requires_grad)


def chunks(hidden: Tensor, weight: Tensor | None) -> list[slice]:
    """Rows of hidden states [n, d] in parts of about `CHUNK` logits each."""
    width = hidden.shape[1] if weight is None else weight.shape[0]
    size = max(CHUNK // width, 1)
    return [slice(n, n + size) for n in range(0, len(hidden), size)]


def summed(
    hidden: Tensor,
    head: Readout,
    teacher: tuple[Tensor, Readout] | None,
    targets: Tensor,
    measure: Measure,
) -> Tensor:
    """Σ measure(student's logits, teacher's logits, targets) over rows; differentiable."""

    def theirs(at: slice) -> Tensor | None:
        if teacher is None:
            return None
        with torch.no_grad():
            return teacher[1].logits(teacher[0][at])

    if not torch.is_grad_enabled():
        parts = [
            measure(head.logits(hidden[at]), theirs(at), targets[at])
            for at in chunks(hidden, head.weight)
        ]
        return torch.stack(parts).sum()
    return _Chunked.apply(hidden, head.weight, head.bias, theirs, targets, measure)


def missed_states(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> Tensor:
    """`relative_errors` of states [m, w, d]: summed over tokens, averaged over blocks."""
    pairs = zip(ours, theirs, strict=True)
    return torch.stack([relative_errors(mine, wanted).sum() for mine, wanted in pairs]).mean()


@dataclass(frozen=True)
class Merit:
    """Nats a token on held-back windows: KL from the teacher, and the loss of student and teacher."""

    kl: float
    student: float
    teacher: float

    def judged(self, loss: str) -> float:
        """The number that training minimizes: the divergence, or the loss on the text."""
        return self.kl if loss == "kl" else self.student


@dataclass(frozen=True)
class DraftMerit(Merit):
    """`Merit` of a draft, and the share of its tokens that the teacher rejects."""

    variation: float

    def judged(self, loss: str) -> float:
        """The share rejected."""
        return self.variation


class Objective:
    """The loss of windows [m, w], summed over tokens but the first `idle` of each."""

    def __init__(self, pair: TrainedPair, options: HealOptions, probe: Tensor, idle: int = 0) -> None:
        self.student = Replies(pair.student, probe)
        self.teacher = Replies(pair.teacher, probe)
        self.options, self.device, self.idle = options, pair.device, idle
        top = kl if options.top_k is None else kl_of_top(options.top_k)
        self.measure = {"kl": top, "lm": lm, "variation": variation}[options.loss]
        self.weight = self._weight(probe)
        if options.compile:
            self.measure = torch.compile(self.measure, dynamic=False)
        self._kept: dict[tuple[int, int], Tensor] = {}

    def scored(self, window: int) -> int:
        """The tokens of a window that the loss sums over."""
        return window - 1 - self.idle

    @torch.no_grad()
    def _weight(self, probe: Tensor) -> float:
        """The weight of the distance between the blocks' outputs; 0 if both models' blocks differ.
        Raises CapabilityError if they differ and a weight was asked for."""
        if not self.options.matches_states:
            return 0.0
        asked = HIDDEN if self.options.hidden is None else self.options.hidden
        states = [answers.run(probe, True)[1] for answers in (self.student, self.teacher)]
        ours, theirs = ([getattr(state, "shape", ()) for state in found] for found in states)
        if ours and ours == theirs and all(shape[:2] == probe.shape for shape in ours):
            return asked
        if self.options.hidden is None:
            return 0.0
        raise CapabilityError(
            f"--hidden {asked:g}: expected blocks whose outputs are alike in both models, found "
            f"{len(ours)} and {len(theirs)} outputs, not of one shape; leave it out"
        )

    def __call__(self, windows: Tensor) -> Tensor:
        windows = windows.to(self.device, non_blocking=True)
        states = self.weight > 0
        hidden, ours = self.student.run(windows, states)
        teacher: tuple[Tensor, Readout] | None = None
        theirs: tuple[Tensor, ...] = ()
        if states or self.options.loss != "lm":
            with torch.no_grad():
                dense, theirs = self.teacher.run(windows, states)
            teacher = self._predicting(dense), self.teacher.head
        hidden, targets = self._predicting(hidden), self._targets(windows)
        loss = summed(hidden, self.student.head, teacher, targets, self.measure)
        if states:
            loss = loss + self.weight * missed_states(ours, theirs)
        return loss

    @torch.no_grad()
    def merit(self, held: Tensor) -> Merit:
        """The merit of windows `held` [h, w]. The teacher's hidden states are kept from call to call."""
        drafts = self.options.loss == "variation"
        totals = torch.zeros(3 + drafts, dtype=torch.float64)
        for n in range(0, len(held), HELD_BATCH):
            windows = held[n : n + HELD_BATCH].to(self.device)
            targets, head = self._targets(windows), self.student.head
            hidden = self._predicting(self.student.run(windows)[0])
            dense = self._kept.get((id(held), n))
            if dense is None:
                dense = self._predicting(self.teacher.run(windows)[0])
                if self.teacher.plain:  # logits would be too large to keep
                    self._kept[id(held), n] = dense
            wanted = dense, self.teacher.head
            found = [
                summed(hidden, head, wanted, targets, kl),
                summed(hidden, head, None, targets, lm),
                summed(wanted[0], self.teacher.head, None, targets, lm),
            ]
            found += [summed(hidden, head, wanted, targets, variation)] if drafts else []
            totals += torch.stack(found).double().cpu()
        figures = (totals / (held.shape[0] * self.scored(held.shape[1]))).tolist()
        return DraftMerit(*figures) if drafts else Merit(*figures)

    def _predicting(self, hidden: Tensor) -> Tensor:
        """The states that predict a token: [m, w, d] -> [m scored(w), d]."""
        return hidden[:, self.idle : -1].flatten(0, 1)

    def _targets(self, windows: Tensor) -> Tensor:
        return windows[:, 1 + self.idle :].flatten()
