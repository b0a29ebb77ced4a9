"""Decodes many samples at once with a cache that is written in place, on a GPU by CUDA graphs.

transformers' own cache is copied whole for every token, and the host calls a model's modules for longer
than a GPU computes them. Here keys and values lie in buffers of a sample's full length. A token attends
to the first slots of them, as many as the next multiple of BUCKET, and a mask hides those that are not
written yet: one graph serves every token of a bucket. It begins at the keys' projections and ends at
probabilities; tokens are drawn behind it, and the host waits for none of them.

A model decodes so only where that gives the logits of the model as it is (`can_be_static`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from blr.compressor.base.exhaustion import exhausted, raise_exhausted
from blr.compressor.modeling.cache_names import cache_name
from blr.kernels.common.capturing import Captured
from blr.kernels.common.placing import on_gpu

BUCKET = 64  # slots: tokens that share a graph
DEVICES = ("cuda",)  # kinds of devices where a cache in place pays
SAME = 0.05  # relative distance of two ways' logits; bfloat16's is some .01
TRIED = 2  # samples that a model is tried with
PACKED = "blr_packed_heads"  # of transformers' table of attention functions
PROBED = 8  # samples whose probabilities by a graph are compared


class SlotPlace:
    """Where a pass writes and reads: `positions` [t] (int64, on the device), slots of its tokens, and
    `reach`, how many slots it reads."""

    def __init__(self, positions: Tensor, reach: int) -> None:
        self.positions, self.reach = positions, reach


class Slots(CacheLayerMixin):
    """A layer of transformers' cache in buffers [m, h, length, d]. Its length is told by the device,
    as of the static cache: a number of the host's would be the same in every replay of a graph."""

    is_compileable = False
    is_sliding = False

    def __init__(self, place: SlotPlace, length: int) -> None:
        super().__init__()
        self.place, self.length = place, length

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Zeros: a hidden slot counts for nothing unless it holds a NaN."""
        self.keys, self.values = (
            new.new_zeros((*new.shape[:2], self.length, new.shape[3]))
            for new in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [m, h, t, d] each; returns views of the slots that the pass reads."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        self.keys.index_copy_(2, self.place.positions, key_states)
        self.values.index_copy_(2, self.place.positions, value_states)
        return self.keys[:, :, : self.place.reach], self.values[:, :, : self.place.reach]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the slots that a mask covers."""
        return self.place.reach, 0

    def get_seq_length(self) -> Any:
        """Slots written before this pass, a tensor of one number."""
        return self.place.positions[0]

    def get_max_length(self) -> int:
        return self.length


class StaticReader:
    """Reads `rows` samples of up to `length` tokens with `model`, a few at a time. captures: whether
    single tokens are read by CUDA graphs: the first of a bucket sets libraries up, at the second the
    graph is captured, at the third it must give what the modules give, or there are no graphs any
    more."""

    def __init__(self, model: Any, rows: int, length: int, captures: bool) -> None:
        self.model, self.rows, self.length, self.captures = model, rows, length, captures
        device = model.device
        self.token = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.place, self.filled = SlotPlace(self.position, length), 0
        self.cache = {cache_name(model): _cache(model, self.place, length)}
        self.placed = "position_ids" in signature(model.forward).parameters
        self.probabilities: Tensor | None = None
        self.graphs: dict[int, Any] = {}
        self.seen: Counter[int] = Counter()  # tokens read in a bucket
        self.pool: Any = None

    def restart(self) -> None:
        """Begin other samples: slots are hidden until they are written again."""
        self.filled = 0

    def read(self, fresh: Tensor) -> Tensor:
        """Read tokens `fresh` [rows, t]. Returns probabilities [rows, v] (float32) of the next token,
        which the next call overwrites and the caller may. Raises torch.OutOfMemoryError."""
        self._begin(fresh)
        if fresh.shape[1] == 1:
            self.token.copy_(fresh)
            self._next()
        else:
            self._pass(fresh)
        assert self.probabilities is not None
        return self.probabilities

    def logits(self, fresh: Tensor) -> Tensor:
        """The same without graphs: [rows, v] in the model's dtype."""
        self._begin(fresh)
        return self._logits(fresh)

    def _begin(self, fresh: Tensor) -> None:
        """Place a pass: a single token's reads whole buckets, a prompt's what is written with it."""
        begin, self.filled = self.filled, self.filled + fresh.shape[1]
        if fresh.shape[1] == 1:
            self.place.positions = self.position.fill_(begin)
            self.place.reach = min(-(-self.filled // BUCKET) * BUCKET, self.length)
        else:
            self.place.positions = torch.arange(begin, self.filled, device=fresh.device)
            self.place.reach = self.filled

    def _logits(self, ids: Tensor) -> Tensor:
        """Of tokens that are placed, [rows, v]. The mask is added to scores: all kinds of attention take
        that, and in four dimensions transformers asks it for nothing."""
        place, dtype = self.place, self.model.dtype
        hidden = torch.arange(place.reach, device=ids.device) > place.positions[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=ids.device)
        mask = mask.masked_fill_(hidden, torch.finfo(dtype).min)[None, None]
        given = {"position_ids": place.positions[None]} if self.placed else {}
        asked: dict[str, Any] = {**given, **self.cache, "use_cache": True, "logits_to_keep": 1}
        with packed_heads(self.model):
            found: Tensor = self.model(input_ids=ids, attention_mask=mask, **asked).logits
        return found[:, -1]

    def _pass(self, ids: Tensor) -> None:
        logits = self._logits(ids)
        if self.probabilities is None:
            self.probabilities = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        torch.softmax(logits.float(), -1, out=self.probabilities)

    def _next(self) -> None:
        """Read `token` at `position`, by a graph where there is one."""
        reach = self.place.reach
        if not self.captures:
            return self._pass(self.token)
        if self.seen[reach] == 1:
            self._capture(reach)
        if reach not in self.graphs:
            self._pass(self.token)
        else:
            self.graphs[reach]()
            if self.seen[reach] == 2:
                self._judge()
        self.seen[reach] += 1

    def _capture(self, reach: int) -> None:
        """What a graph cannot hold is read by the host's calls from then on."""
        try:
            self.pool = self.pool or torch.cuda.graph_pool_handle()
            with on_gpu(self.model.device):
                self.graphs[reach] = Captured(partial(self._pass, self.token), pool=self.pool)
        except Exception as error:  # whatever a model does meanwhile
            self._give_up()
            if said := exhausted(error):
                raise torch.OutOfMemoryError(said) from error

    def _judge(self) -> None:
        """Read the token again by the host's calls, which writes the same keys and values once more."""
        assert self.probabilities is not None
        found = self.probabilities[:PROBED].clone()
        self._pass(self.token)
        if not distance(_log(found), _log(self.probabilities[:PROBED])) < SAME:
            self._give_up()

    def _give_up(self) -> None:
        self.captures = False
        self.graphs.clear()


class StaticReading:
    """Keeps one model's reader from batch to batch; a context that frees its buffers and graphs."""

    def __init__(self, model: Any, length: int) -> None:
        self.model, self.length = model, length
        self.allowed: bool | None = None  # None: not tried yet
        self.held: StaticReader | None = None

    @property
    def rows(self) -> int | None:
        """Samples of the reader that is kept."""
        return None if self.held is None else self.held.rows

    def reader(self, rows: int) -> StaticReader | None:
        """A reader at the beginning of `rows` samples; None for a model that is read as it is."""
        if self.allowed is None:
            self.allowed = self.model.device.type in DEVICES and can_be_static(self.model, self.length)
        if not self.allowed:
            return None
        if self.held is None or self.held.rows != rows:
            self.free()
            on_cuda = self.model.device.type == "cuda"
            self.held = StaticReader(self.model, rows, self.length, captures=on_cuda)
        self.held.restart()
        return self.held

    def free(self) -> None:
        """Give the memory back, that of graphs to the driver: nobody else could use it."""
        if self.held is not None:
            self.held = None
            if self.model.device.type == "cuda":
                torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.free()


def can_be_static(model: Any, length: int) -> bool:
    """Whether `model` attends to all tokens before one, of up to `length`, and to those in buffers as
    to any: tried with a token at the beginning of the first bucket and of the last whole one, where most
    slots are hidden. Raises torch.OutOfMemoryError."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(vocabulary, (TRIED, length), generator=torch.Generator().manual_seed(0))
    ids = ids.to(model.device)
    try:
        return length > 1 and _attends_to_all(model, length) and _tried(model, ids)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model raises at a cache or a mask that it does not take
        raise_exhausted(error)
        return False


@torch.inference_mode()
def _tried(model: Any, ids: Tensor) -> bool:
    rows, length = ids.shape
    reader = StaticReader(model, rows, length, captures=False)
    last = max((length - 1) // BUCKET - 1, 0) * BUCKET + 1
    for position in sorted({1, last}):
        if reader.filled < position:
            reader.logits(ids[:, reader.filled : position])
        found = reader.logits(ids[:, position : position + 1])
        asked: dict[str, Any] = {"use_cache": False, "logits_to_keep": 1}
        expected = model(input_ids=ids[:, : position + 1], **asked).logits[:, -1]
        if found.shape != expected.shape or not distance(found, expected) < SAME:
            return False
    return True


def _attends_to_all(model: Any, length: int) -> bool:
    """Whether transformers would keep all of `length` tokens in every layer, and nothing else."""
    layers = DynamicCache(config=model.config).layers
    return bool(layers) and all(
        type(layer) is DynamicLayer or getattr(layer, "sliding_window", 0) >= length for layer in layers
    )


@contextmanager
def packed_heads(model: Any) -> Iterator[None]:
    """Meanwhile SDPA attends by `_attend`: with a mask, transformers (but for its newest releases)
    copies the keys of fewer heads than the queries' for every token."""
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    found = [c for c in configs.values() if getattr(c, "_attn_implementation", None) == "sdpa"]
    ALL_ATTENTION_FUNCTIONS.register(PACKED, _attend)
    try:
        for config in found:
            config._attn_implementation_internal = PACKED
        yield
    finally:
        for config in found:
            config._attn_implementation_internal = "sdpa"


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """[m, t, h, d] of queries [m, h, t, d]. Those of a token that share a key are rows of one head."""
    m, h, t, d = query.shape
    shared = h // key.shape[1]
    if t > 1 and shared > 1:  # prompts are short
        key, value = (states.repeat_interleave(shared, 1) for states in (key, value))
    rows = query.reshape(m, key.shape[1], shared, d) if t == 1 else query
    out = scaled_dot_product_attention(rows, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(m, h, t, -1).transpose(1, 2).contiguous(), None


def _cache(model: Any, place: SlotPlace, length: int) -> Cache:
    count = len(DynamicCache(config=model.config).layers)
    return Cache(layers=[Slots(place, length) for _ in range(count)])


def _log(probabilities: Tensor) -> Tensor:
    """Logits, but for what all of a sample have in common."""
    return probabilities.clamp_min(1e-30).log()


def distance(found: Tensor, expected: Tensor) -> Tensor:
    """Relative to what all logits have in common: softmax does not see that."""
    found, expected = (x.float() - x.float().mean(-1, keepdim=True) for x in (found, expected))
    return (found - expected).norm() / expected.norm().clamp_min(1e-9)
