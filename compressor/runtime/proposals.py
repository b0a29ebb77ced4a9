"""What proposes tokens to a decoder: a smaller model, or the text so far."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from blr.compressor.runtime.decoder import MAX_BATCH, Decoder
from blr.compressor.runtime.sampling import Sampler
from blr.kernels.decode.gemv.segments import Run, in_turn

BANDWIDTH, LAUNCH = 3.9e12, 3.5e-6  # bytes a second and seconds a launch, of an H200
LIKELY, LOOKED_UP = 0.8, 0.3  # shares of drafts that are believed to be accepted, before any was

# Of the last two tokens of each row and the slot of the last [3, B], the drafts' number, how tokens are
# chosen and noise [drafts + 1, B, vocab]: tokens [drafts, B], and the probabilities they were drawn by
# [drafts, B, vocab], None for greedy ones.
Propose = Callable[[Tensor, int, Sampler, Tensor | None], tuple[Tensor, Tensor | None]]


class SmallModel:
    """Proposes what a smaller model's `decoder` says. seconds: about how long a token takes on a GPU.
    believed: the share of tokens that is accepted, before any was."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.seconds, self.believed = seconds_of(decoder), LIKELY

    def read(self, input_ids: Tensor, lengths: Tensor | None) -> None:
        """Take a prompt, as `Decoder.prefill`."""
        self.decoder.prefill(input_ids, lengths)
        repeat_starts(self.decoder)

    def bind(self, rows: int, bucket: int) -> Propose:
        """What proposes tokens to `rows` rows in contexts of up to `bucket` slots."""
        phases = self.decoder.plan.phases
        of = partial(self.decoder.launches, rows, bucket, phases)
        return partial(self._propose, of(2), of())

    def note(self, at: Tensor, chosen: Tensor) -> None:
        """Nothing to note: its cache has what it proposed."""

    def _propose(
        self,
        first: list[Run],
        step: list[Run],
        moving: Tensor,
        drafts: int,
        sampler: Sampler,
        noise: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Its first pass has the last two tokens: after a round without a rejected draft, its cache
        lacks the one before the last."""
        state, (before, last, at), rows = self.decoder.state, moving, moving.shape[1]
        state.tokens[: 2 * rows] = torch.cat((before, last))
        state.pos[: 2 * rows] = torch.cat((at - 1, at))
        in_turn(first)
        tokens: list[Tensor] = []
        likely: list[Tensor] = []
        for index in range(drafts):
            begin = 0 if index else rows
            if index:
                state.tokens[:rows] = tokens[-1]
                state.pos[:rows] = (at + index).clamp(max=self.decoder.context - 1)
                in_turn(step)
            if noise is None:
                tokens.append(state.tokens[begin : begin + rows].clone())
                continue
            likely.append(sampler.distribution(state.buffers["logits"][begin : begin + rows]))
            tokens.append((likely[-1] / noise[index]).argmax(-1))
        return torch.stack(tokens), torch.stack(likely) if likely else None


class Lookup:
    """Proposes what followed the last two tokens before, else the last one (n-gram lookup), for a
    decoder of the same batch, context and vocabulary."""

    def __init__(self, decoder: Decoder) -> None:
        size = decoder.batch, decoder.context + MAX_BATCH  # room for what is chosen behind the context
        self.text = torch.zeros(size, dtype=torch.int64, device=decoder.model.device)
        self.vocabulary = decoder.state.buffers["logits"].shape[1]
        self.seconds, self.believed = 0.0, LOOKED_UP

    def read(self, input_ids: Tensor, lengths: Tensor | None) -> None:
        rows, length = input_ids.shape
        self.text.fill_(-1)
        self.text[:rows, :length] = input_ids
        if lengths is not None:
            padded = torch.arange(length) < length - lengths.cpu()[:, None]
            self.text[:rows, :length].masked_fill_(padded.to(self.text.device), -1)

    def bind(self, rows: int, bucket: int) -> Propose:
        return partial(self._propose, self.text[:rows, :bucket])

    def note(self, at: Tensor, chosen: Tensor) -> None:
        """Take what the model chose [drafts + 1, B] behind the slots `at` [B]."""
        slots = at + 1 + torch.arange(len(chosen), device=at.device)[:, None]
        self.text[: len(at)].scatter_(1, slots.T, chosen.T)

    def _propose(
        self, text: Tensor, moving: Tensor, drafts: int, sampler: Sampler, noise: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Behind the last match in `text` [B, slots], and round again where that reaches its end."""
        before, last, at = (x[:, None] for x in moving)
        text.scatter_(1, at, last)
        slots = torch.arange(text.shape[1], device=text.device)
        alike = (text == last) & (slots < at)
        both = alike[:, 1:] & (text[:, :-1] == before)
        rank = alike * (slots + 1)
        rank[:, 1:] += both * len(slots)
        found = rank.argmax(1, keepdim=True)
        behind = torch.arange(drafts, device=text.device) % (at - found).clamp_min(1)
        tokens = text.gather(1, (found + 1 + behind).clamp(max=text.shape[1] - 1)).clamp_min(0).T
        return tokens, None if noise is None else one_hot(tokens, self.vocabulary).float()


def repeat_starts(decoder: Decoder) -> None:
    """Let passes of several tokens a row begin where each row does."""
    state, rows = decoder.state, decoder.rows
    times = len(state.start) // rows
    state.start[: rows * times] = state.start[:rows].repeat(times)


def seconds_of(decoder: Decoder) -> float:
    """About how long a token takes on a GPU; not measured: the same seed, the same tokens."""
    phases = decoder.plan.phases
    return sum(phase.bytes for phase in phases) / BANDWIDTH + LAUNCH * len(phases)
