"""What is minimized: the distance of the student's answers from the teacher's, summed over tokens.

Logits are the largest tensors of a step by far. They are made for a few thousand tokens at a time,
and what the backward pass needs of them (the gradient of the hidden states and of the head) is
computed at once; the idea is that of fused linear cross entropy (Liger, arXiv 2410.10989).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, log_softmax

from blr.compressor.healing.dense_weights import blocks_of
from blr.compressor.healing.settings import CHUNK
from blr.compressor.modeling.masks import unpacked
from blr.compressor.modeling.modeling_blr import DenseWeight
from blr.kernels.training.distance.op import relative_errors
from blr.kernels.training.divergence.op import divergence_sum

Measure = Callable[[Tensor, Tensor | None, Tensor], Tensor]


def kl(student: Tensor, teacher: Tensor | None, _: Tensor) -> Tensor:
    """Σ KL(teacher ‖ student) in nats over rows of logits [n, v]; a measure of `summed`, which takes
    its gradient by itself."""
    assert teacher is not None
    return divergence_sum(student, teacher, alone=True)


def kl_of_top(k: int) -> Measure:
    """`kl` of the teacher's k likeliest tokens and of all others together as one."""

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


def lm(student: Tensor, _: Tensor | None, targets: Tensor) -> Tensor:
    """Σ −log q of the text's own next tokens [n]."""
    return cross_entropy(student.float(), targets, reduction="sum")


@dataclass
class Head:
    """The output head: `weight` [v, d] and `bias` [v] or None; no weight where hidden states are the
    logits already. It computes in the weight's dtype: Mamba's last norm gives float32."""

    weight: Tensor | None
    bias: Tensor | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, v] of `hidden` [n, d]."""
        if self.weight is None:
            return hidden
        return linear(hidden.to(self.weight.dtype), self.weight, self.bias)


class Answers:
    """A causal language model as hidden states and a head, so that logits can be made in parts.

    A model that does more than multiply (scaled or capped logits) is run whole, and its logits stand
    for the hidden states.
    """

    def __init__(self, model: Any, probe: Tensor) -> None:
        self.model, self.body = model, model.base_model
        self._outputs: list[Tensor] | None = None  # of the blocks, while they are wanted
        for block in blocks_of(model):
            block.register_forward_hook(self._note)
        with torch.no_grad():
            whole = model(probe, use_cache=False).logits
            self.plain = self._fits(probe, whole)

    @torch.no_grad()
    def _fits(self, probe: Tensor, whole: Tensor) -> bool:
        head = self.model.get_output_embeddings()
        if not isinstance(getattr(head, "weight", None), Tensor) or self.body is self.model:
            return False  # no head, or one that is not one matrix
        hidden = self.body(probe, use_cache=False).last_hidden_state
        return torch.equal(head(hidden.to(head.weight.dtype)).float(), whole.float())

    @property
    def head(self) -> Head:
        """What turns the hidden states of `run` into logits."""
        if not self.plain:
            return Head(None)
        module = self.model.get_output_embeddings()
        weight = module.weight
        if isinstance(weight, DenseWeight):  # itself no function of the factors that are trained
            weight = module.composed()
        return Head(weight, getattr(module, "bias", None))

    def run(self, ids: Tensor, states: bool = False) -> tuple[Tensor, tuple[Tensor, ...]]:
        """What enters the head [m, w, d]; with `states` what leaves every block, too; of the last one
        that is what enters the head, normed."""
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

    def _note(self, block: Any, given: Any, output: Any) -> None:
        """A forward hook; transformers does not know the blocks of a model that is shared out."""
        if self._outputs is not None:
            self._outputs.append(output[0] if isinstance(output, tuple | list) else output)


class _Chunked(torch.autograd.Function):
    """Σ measure over rows, its gradients taken on the way."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor | None, bias: Tensor | None, theirs: Any,
        targets: Tensor, measure: Measure,
    ) -> Tensor:  # fmt: skip
        given = (hidden, weight, bias)
        wanted = [x for x in given if x is not None and x.requires_grad]
        gradients = {id(x): torch.zeros_like(x, dtype=_wide(x, hidden)) for x in wanted}
        total = hidden.new_zeros((), dtype=torch.float32)
        for at in _chunks(hidden, weight):
            with torch.enable_grad():
                part = hidden[at].detach().requires_grad_(hidden.requires_grad)
                w, b = _leaf(weight), _leaf(bias)
                loss = measure(Head(w, b).logits(part), theirs(at), targets[at])
            pairs = zip(given, (part, w, b), strict=True)
            leaves = {id(x): leaf for x, leaf in pairs if leaf is not None and id(x) in gradients}
            found = torch.autograd.grad(loss, list(leaves.values()))
            for key, gradient in zip(leaves, found, strict=True):
                whole = gradients[key]
                (whole[at] if key == id(hidden) else whole).add_(gradient)
            total += loss.detach()
        ctx.save_for_backward(*(gradients.get(id(x)) for x in given))
        ctx.dtypes = [None if x is None else x.dtype for x in given]
        return total

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        found = [
            None if x is None else (x * g).to(dtype)
            for x, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*found, None, None, None)


def _leaf(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().requires_grad_(x.requires_grad)


def _wide(x: Tensor, hidden: Tensor) -> torch.dtype:
    """Sums over chunks are kept in float32; each row of `hidden` is of one chunk."""
    return x.dtype if x is hidden else torch.float32


def _chunks(hidden: Tensor, weight: Tensor | None) -> list[slice]:
    width = hidden.shape[1] if weight is None else weight.shape[0]
    size = max(CHUNK // width, 1)
    return [slice(n, n + size) for n in range(0, len(hidden), size)]


def summed(
    hidden: Tensor, head: Head, teacher: tuple[Tensor, Head] | None, targets: Tensor, measure: Measure
) -> Tensor:
    """Σ measure(student's logits, teacher's, targets) over rows, differentiable.

    Args:
        hidden: [n, d] of the student. teacher: its hidden states [n, d'] and head, None if unused.
        targets: [n] token ids.
    """

    def theirs(at: slice) -> Tensor | None:
        if teacher is None:
            return None
        with torch.no_grad():
            return teacher[1].logits(teacher[0][at])

    if not torch.is_grad_enabled():
        parts = [
            measure(head.logits(hidden[at]), theirs(at), targets[at])
            for at in _chunks(hidden, head.weight)
        ]
        return torch.stack(parts).sum()
    return _Chunked.apply(hidden, head.weight, head.bias, theirs, targets, measure)


def missed_states(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> Tensor:
    """Σ over tokens of `relative_errors`, mean over the blocks' outputs; states [m, w, d]."""
    pairs = zip(ours, theirs, strict=True)
    return torch.stack([relative_errors(mine, wanted).sum() for mine, wanted in pairs]).mean()
