"""Generates with a model of transformers by one CUDA graph a token, which runs the phases of `plan.py`.
The prompt goes through the model's own modules (`prompt.py`); each new token is chosen on the device and
fed back there. All modes are deterministic: the order of every sum does not depend on timing."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from time import perf_counter
from typing import TypeVar, cast

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from blr.compressor.checkpoint.context import context_of
from blr.compressor.runtime.bind import Binder
from blr.compressor.runtime.failures import (
    CACHES,
    MODES,
    OPS,
    BatchError,
    ContextError,
    Turn,
    UnsupportedError,
)
from blr.compressor.runtime.memory import DecoderState, bucket_of
from blr.compressor.runtime.phases import make_plan
from blr.compressor.runtime.plan import Phase
from blr.compressor.runtime.prompt import Prompts, capture_on, left_padded
from blr.compressor.runtime.sampling import Collector, Sampler, check_logits
from blr.kernels.common.available import has_triton, interpreted, supports_pdl
from blr.kernels.common.capturing import Captured, own_stream
from blr.kernels.common.placing import on_gpu
from blr.kernels.decode.gemv.segments import Run, in_turn

MAX_BATCH = 16  # rows, up to which stages were measured
Method = TypeVar("Method", bound=Callable[..., object])


def _on_own_gpu(method: Method) -> Method:
    """Run a method with the decoder's GPU as the current one, for graphs, streams and launches."""

    @wraps(method)
    def run(self: Decoder, *args: object, **kwargs: object) -> object:
        with on_gpu(self.state.tokens.device):
            return method(self, *args, **kwargs)

    return cast(Method, run)


class Decoder:
    """Generates tokens with `model`, whose parameters it reads in place. One cache serves all calls, so
    threads that `generate` take turns.

    Args:
        model: a causal language model of transformers, on one device, in evaluation mode.
        batch: rows at most, 1 to 16. context: slots a row at most, prompt and new tokens together.
        mode: "graph" ("auto") replays one CUDA graph a token, captured for every number of rows and
            power of two of the context; "eager", and without a GPU, the phases run one by one; "token":
            as "graph", with all layers of the one row in one kernel (`whole.py`), whose tokens may
            be others than those of "graph" at near ties.
        ops: "triton" kernels, or "torch" for their references, on any device.
        tokens: of all rows at most that one pass computes (None: `batch`).
        cache: of keys and values, "whole" in the model's dtype or "int8" with a scale a token and head.

    Raises UnsupportedError for a model, mode, ops or device that it does not run; BatchError and
    ContextError for a size out of range.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        batch: int = 1,
        context: int,
        mode: str = "auto",
        ops: str = "triton",
        cache: str = CACHES[0],
        tokens: int | None = None,
    ) -> None:
        self.plan = make_plan(model)
        _check(model, tokens or batch, context, mode, ops, cache)
        self.model, self.batch, self.context, self.ops = model, batch, context, ops
        self.mode = "graph" if mode == "auto" else mode
        self.pdl = ops == "triton" and supports_pdl(model.device)  # kernels overlap with those before
        self.state = DecoderState(model, self.plan, batch, context, cache, tokens)
        captures = None if self.mode == "eager" or ops != "triton" else capture_on(model.device)
        self.whole = None
        if mode == "token":
            with _not_left_out():
                from blr.compressor.runtime.whole import Whole
            self.whole = Whole(self.plan, self.state)
        self.prompts = Prompts(model, self.state.kv, captures)
        self.rows = 0  # of the prompt that was taken last
        self.position = 0  # the slot of the next token, the same for all rows
        self._runs: dict[tuple[int, int], Run] = {}
        self._turn = Turn()

    @torch.no_grad()
    @_on_own_gpu
    def prefill(self, input_ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Forget what was decoded and read a prompt [B, T], padded on the left. Returns [B, vocab] in
        float32, the logits of the first new token. lengths: [B], tokens of each row at its end (default:
        T). Raises BatchError, ContextError: more rows or tokens than the decoder was made for;
        StalledError: steps before this call gave up waiting (mode "token")."""
        rows, length = input_ids.shape
        if not 1 <= rows <= self.batch or length == 0:
            raise BatchError(
                f"a prompt of {rows} rows of {length} tokens: expected 1 to {self.batch} rows of at "
                "least one token; split the prompt, or make the decoder with a larger batch"
            )
        self._check_room(length)
        self._check_whole()
        device = self.model.device
        lengths = torch.full((rows,), length) if lengths is None else lengths.cpu()
        if lengths.shape != (rows,) or int(lengths.min()) < 1 or int(lengths.max()) > length:
            raise BatchError(f"lengths {lengths.tolist()}: expected {rows} numbers from 1 to {length}")
        start = length - lengths
        self.state.start[:rows] = start.to(device)
        self.state.pos[:rows] = length
        hidden = self.prompts.take(input_ids.to(device), start)
        self.rows, self.position = rows, length
        logits = self.model.get_output_embeddings()(hidden).float()
        self.state.tokens[:rows] = logits.argmax(-1)
        return logits

    @torch.no_grad()
    @_on_own_gpu
    def step(self, tokens: Tensor) -> Tensor:
        """Feed `tokens` [B] after a `prefill` of B rows; returns the logits [B, vocab] in float32.
        Raises ContextError when the cache is full, BatchError for another number of rows."""
        if tokens.shape != (self.rows,) or self.rows == 0:
            expected = [self.rows] if self.rows else "a prompt before"
            raise BatchError(f"a step with tokens of shape {list(tokens.shape)}: expected {expected}")
        self.state.tokens[: self.rows] = tokens.to(self.model.device)
        self._advance()
        return self.state.buffers["logits"][: self.rows].clone()

    @torch.no_grad()
    @_on_own_gpu
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        stop_ids: Collection[int] = (),
        on_token: Callable[[int, int], None] | None = None,
    ) -> list[list[int]]:
        """Continue every row of a prompt [B, T]; returns the new tokens of each, its stop token last if
        it met one.

        Args:
            attention_mask: [B, T] of ones, and zeros all on the left or all on the right of a row.
            temperature, top_k, top_p: of `Sampler`. seed: of the draws.
            stop_ids: tokens that end a row. on_token: called with (row, token) as tokens arrive.

        Raises BatchError, ContextError: more rows or tokens than the decoder was made for; ValueError:
        sampling parameters out of range; NumericsError: logits that choose no token; BusyError: a call
        by `on_token` of this decoder's own; StalledError: the kernel gave up waiting (mode "token").
        """
        sampler = Sampler(temperature, top_k, top_p)
        if max_new_tokens < 1:
            raise BatchError(f"max_new_tokens {max_new_tokens}: expected at least 1")
        self._check_room(input_ids.shape[1] + max_new_tokens)
        with self._turn:
            logits = self.prefill(*left_padded(input_ids, attention_mask))
            collector = Collector(self.rows, max_new_tokens, stop_ids, on_token)
            return self.proceed(logits, sampler, collector, max_new_tokens, seed)

    def proceed(
        self, logits: Tensor, sampler: Sampler, collector: Collector, steps: int, seed: int
    ) -> list[list[int]]:
        """The tokens of at most `steps` steps after a prefill with these logits, until all rows end."""
        device = self.model.device
        generator = None if sampler.greedy else torch.Generator(device).manual_seed(seed)
        tokens = self.state.tokens[: self.rows]
        for step in range(steps):
            if step > 0:
                self._advance()
                logits = self.state.buffers["logits"][: self.rows]
            if not sampler.greedy:  # greedy tokens are there already
                tokens.copy_(sampler.choose(logits, generator))
            collector.push(tokens)
            if collector.done:
                break
        self._check_whole()
        check_logits(logits)  # what is not finite stays in the cache and so comes to the last
        return collector.finish()

    def bytes_of(self, phase: Phase) -> int:
        """The bytes that a token of every row reads in a phase, with the cache as it is."""
        rows = max(self.rows, 1)
        if phase.heads is not None:
            seen = min(self.position + 1, phase.heads.window or self.context)
            return seen * self.state.kv.bytes_a_slot(rows)
        return phase.bytes * (rows if phase.kind == "embed" else 1)

    @torch.no_grad()
    @_on_own_gpu
    def profile(self, steps: int = 20) -> list[tuple[str, float, int]]:
        """Time the phases after a `prefill`: (name, microseconds, bytes a token).

        The same phase of all layers is timed in a row, so that weights come from memory; its name has
        "*" for the layer, and the figures are of one layer. The last entry, "token", is a whole token.
        The decoder forgets what was decoded so far."""
        if self.rows == 0:
            raise BatchError("profile before any prompt: expected a prefill; call prefill first")
        groups: dict[str, list[Phase]] = defaultdict(list)
        for phase in self.plan.phases:
            groups[re.sub(r"^layer\.\d+\.", "layer.*.", phase.name)].append(phase)
        groups["token"] = self.plan.phases
        room = self.context - self.position - 2  # a whole token moves on by one slot each time
        if room < 1:
            raise ContextError("profile: the cache is full; expected room for two tokens at least")
        steps = min(steps, room)
        shape, measured = (self.rows, bucket_of(self.position + steps + 2)), []
        moved = self.state.tokens, self.state.pos
        kept = [t.clone() for t in moved]
        for name, phases in groups.items():
            count = 1 if name == "token" else len(phases)
            seconds = average(self.bind(*shape, phases), steps, moved[0].device)
            size = sum(map(self.bytes_of, phases)) // count
            measured.append((name, seconds * 1e6 / count, size))
            _put_back(moved, kept)
        self.rows = self.position = 0
        return measured

    def bind(self, rows: int, bucket: int, phases: Sequence[Phase]) -> Run:
        """One function that runs `phases` for `rows` rows in contexts of up to `bucket` slots: a CUDA
        graph on a GPU unless in mode "eager". They run once before; tokens and positions are put back
        then."""
        if self.whole is not None and phases is self.plan.phases:
            before, after = (self.launches(rows, bucket, part) for part in self.whole.ends)
            runs: list[Run] = [*before, self.whole, *after]
        else:
            runs = self.launches(rows, bucket, phases)
        return self.captured(partial(in_turn, runs), [self.state.tokens, self.state.pos], runs)

    def launches(
        self, rows: int, bucket: int, phases: Sequence[Phase], tokens: int = 1, *, alone: bool = False
    ) -> list[Run]:
        """The functions that run `phases` for `tokens` tokens of each of `rows` rows. alone: the numbers
        of a token are those of a pass of one token a row, bit for bit."""
        like, on_gpu = rows if alone else rows * tokens, self.ops == "triton"
        like = max(like, self.plan.least_rows)
        return Binder(self.state, rows * tokens, bucket, on_gpu, self.pdl, tokens, like).bind_all(phases)

    def captured(self, once: Run, moved: Sequence[Tensor], held: object) -> Run:
        """`once` as `bind` gives it. moved: what it changes, put back. held: what must live as long."""
        if self.mode == "eager" or self.ops != "triton" or self.model.device.type != "cuda":
            return once
        kept = [t.clone() for t in moved]
        with own_stream():
            once()
        _put_back(moved, kept)
        return partial(_replay, Captured(once), held)

    def _advance(self) -> None:
        """Compute one token from those in the state, where it leaves logits and next tokens."""
        self._check_room(self.position + 1)
        key = (self.rows, bucket_of(self.position + 1))
        if key not in self._runs:
            self._runs[key] = self.bind(*key, self.plan.phases)
        self._runs[key]()
        self.position += 1

    def _check_whole(self) -> None:
        """Raises StalledError for steps whose kernel gave up; their logits are NaN."""
        if self.whole is not None:
            self.whole.check()

    def _check_room(self, tokens: int) -> None:
        if tokens > self.context:
            raise ContextError(
                f"{tokens} tokens: expected at most {self.context}; shorten the prompt, ask for fewer "
                "new tokens, or make the decoder with a larger context"
            )


@contextmanager
def _not_left_out() -> Iterator[None]:
    """Raises UnsupportedError for an import that a self-contained export leaves out."""
    try:
        yield
    except ImportError as error:
        raise UnsupportedError(
            "mode 'token': found a self-contained export, expected the installed package; export "
            "without --self-contained, or unset BLR_DECODE"
        ) from error


def _put_back(moved: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
    for tensor, value in zip(moved, kept, strict=True):
        tensor.copy_(value)


def _replay(captured: Captured, held: object) -> None:
    """Replay a graph. held: what was captured, kept because its tensors must stay where they are."""
    captured()


def _check(model: PreTrainedModel, batch: int, context: int, mode: str, ops: str, cache: str) -> None:
    for name, given, known in (("cache", cache, CACHES), ("mode", mode, MODES), ("ops", ops, OPS)):
        if given not in known:
            raise UnsupportedError(f"{name} {given!r}: expected one of {', '.join(known)}")
    runs = has_triton() and (model.device.type == "cuda" or interpreted())
    if ops == "triton" and not runs:
        raise UnsupportedError(
            f"ops 'triton' on {model.device}: expected a GPU with Triton; use 'torch'"
        )
    if not 1 <= batch <= MAX_BATCH:
        raise BatchError(f"batch {batch}: expected 1 to {MAX_BATCH}; decode in several batches")
    limit = context_of(model.config.to_dict())
    if not 1 <= context <= limit:
        raise ContextError(f"context {context}: expected 1 to the model's {limit}; lower it")


def average(run: Callable[[], object], steps: int, device: torch.device) -> float:
    """The mean seconds of `steps` calls of `run` on `device`, after one call that does not count."""
    run()
    if device.type != "cuda":
        begun = perf_counter()
        for _ in range(steps):
            run()
        return (perf_counter() - begun) / steps
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(steps):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / steps
