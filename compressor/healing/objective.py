"""The losses of healing: the distance between student and teacher, of decoders and of encoders."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy, linear, log_softmax
from transformers import PreTrainedModel

from blr.compressor.base.errors import CapabilityError
from blr.compressor.base.exhaustion import raise_exhausted
from blr.compressor.healing.student_and_teacher import TrainedPair, blocks_of
from blr.compressor.loading.sentences import Sentences
from blr.compressor.modeling.cuda_graphs import unpacked
from blr.compressor.modeling.modeling_blr import DenseWeight
from blr.compressor.planning.training_sizes import CHUNK
from blr.compressor.recipe.settings import HIDDEN, HealOptions
from blr.kernels.common.registration import ContextOf
from blr.kernels.training.losses import divergence_sum, relative_errors

Measure = Callable[[Tensor, Tensor | None, Tensor], Tensor]
HELD_BATCH, HELD_SENTENCES = 8, 32  # held-back windows and sentences that are run at once
STATES_WEIGHT = 1.0  # default weight of an encoder's hidden states
PADDING = -1  # fills rows of tokens behind the end of a sentence


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
    """Σ measure over rows in chunks, whose gradients are computed in the forward pass (as Liger's fused
    linear cross entropy, arXiv 2410.10989): logits are by far the largest tensors of a step."""

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
        kept = zip(ctx.saved_tensors, ctx.more, strict=True)
        found = (None if x is None else (x * g).to(dtype) for x, dtype in kept)
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

    if torch.is_grad_enabled():
        return _Chunked.apply(hidden, head.weight, head.bias, theirs, targets, measure)
    places = chunks(hidden, head.weight)
    parts = [measure(head.logits(hidden[at]), theirs(at), targets[at]) for at in places]
    return torch.stack(parts).sum()


def missed_states(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> Tensor:
    """`relative_errors` of states [m, w, d]: summed over tokens, averaged over blocks."""
    pairs = zip(ours, theirs, strict=True)
    return torch.stack([relative_errors(mine, wanted).sum() for mine, wanted in pairs]).mean()


class Objective:
    """The loss of windows [m, w], summed over tokens but the first `idle` of each. Training minimizes
    the `figure` of its merit."""

    def __init__(self, pair: TrainedPair, options: HealOptions, probe: Tensor, idle: int = 0) -> None:
        self.student = Replies(pair.student, probe)
        self.teacher = Replies(pair.teacher, probe)
        self.options, self.device, self.idle = options, pair.device, idle
        top = kl if options.top_k is None else kl_of_top(options.top_k)
        self.measure = {"kl": top, "lm": lm, "variation": variation}[options.loss]
        self.figure = "student" if options.loss == "lm" else options.loss
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
    def merit(self, held: Tensor) -> dict[str, float]:
        """Figures of windows `held` [h, w], nats a token: "kl" from the teacher, the losses of "student"
        and "teacher"; of drafts also "variation", the share of tokens that the teacher rejects. The
        teacher's hidden states are kept from call to call."""
        names = ["kl", "student", "teacher", *["variation"] * (self.figure == "variation")]
        totals = torch.zeros(len(names), dtype=torch.float64)
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
                summed(*wanted, None, targets, lm),
            ]
            if "variation" in names:
                found.append(summed(hidden, head, wanted, targets, variation))
            totals += torch.stack(found).double().cpu()
        figures = totals / (held.shape[0] * self.scored(held.shape[1]))
        return dict(zip(names, figures.tolist(), strict=True))

    def _predicting(self, hidden: Tensor) -> Tensor:
        """[m, w, d] -> [m scored(w), d]."""
        return hidden[:, self.idle : -1].flatten(0, 1)

    def _targets(self, windows: Tensor) -> Tensor:
        return windows[:, 1 + self.idle :].flatten()


class Embedding:
    """The loss of an encoder, summed over sentences: 1 − cosine of the embeddings that `head` makes,
    plus `weight` times the relative error of the blocks' outputs. Training minimizes the `figure` of its
    merit."""

    figure = "distance"

    def __init__(self, pair: TrainedPair, head: Sentences, weight: float | None) -> None:
        self.pair, self.head = pair, head
        self.weight = STATES_WEIGHT if weight is None else weight

    @staticmethod
    def scored(window: int) -> int:
        """The number of terms that a row adds to the loss: its one sentence."""
        return 1

    def __call__(self, rows: Tensor) -> Tensor:
        """The loss of `rows` [m, w] of token ids and padding; differentiable."""
        distance, states = self._distances(rows)
        return distance.sum() + self.weight * states.sum()

    @torch.no_grad()
    def merit(self, held: Tensor) -> dict[str, float]:
        """Means over sentences: "distance" of the embeddings, and the error of the hidden "states"."""
        parts = [self._distances(rows) for rows in held.split(HELD_SENTENCES)]
        means = [torch.cat(found).double().mean().item() for found in zip(*parts, strict=True)]
        return dict(zip(("distance", "states"), means, strict=True))

    def _distances(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """For each sentence [m] the distance of its embedding and the error of its hidden states."""
        ids, mask = self._inputs(rows)
        ours = self._run(self.pair.student, ids, mask)
        with torch.no_grad():
            theirs = self._run(self.pair.teacher, ids, mask)
        found, wanted = (self.head.embed(states[-1].float(), mask) for states in (ours, theirs))
        real, missed = mask.float(), []  # ‖h − h'‖² / ‖h'‖², the mean over tokens and blocks
        for mine, dense in zip(ours[1:], theirs[1:], strict=True):
            missed.append((relative_errors(mine, dense) * real).sum(-1) / real.sum(-1))
        return 1 - cosine_similarity(found, wanted, dim=-1), torch.stack(missed).mean(0)

    def _inputs(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids and their mask; on a CPU without columns that are padding in all rows."""
        if rows.device.type == "cpu" and self.pair.device.type == "cpu":
            rows = rows[:, : int((rows != PADDING).sum(1).max())]
        rows = rows.to(self.pair.device, non_blocking=True)
        mask = (rows != PADDING).long()
        return rows.clamp_min(0), mask

    @staticmethod
    def _run(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        out = model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        return (*out.hidden_states[:-1], out.last_hidden_state)
