"""Decodes many samples at once with a cache that is written in place, on a GPU by CUDA graphs.

A model decodes this way only if that gives the logits of the model as it is (`can_be_static`).
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from blr.compressor.base.exhaustion import exhausted, raise_exhausted
from blr.compressor.modeling.settings import cache_name
from blr.kernels.common.capturing import Captured
from blr.kernels.common.placing import on_gpu

BUCKET = 64  # slots whose tokens share a graph
DEVICES = ("cuda",)  # kinds of devices where writing in place pays
SAME = 0.05  # largest relative distance of equal logits; bfloat16 alone causes .01
TRIED = 2  # samples that a model is tried with
PACKED = "blr_packed_heads"  # name of `_attend` in transformers' table of attention functions
PROBED = 8  # samples whose probabilities are compared with a graph's


class SlotPlace:
    """The slots of a pass: it writes to `positions` [t] (int64, on the device) and reads the first
    `reach`."""

    def __init__(self, positions: Tensor, reach: int) -> None:
        self.positions, self.reach = positions, reach


class Slots(CacheLayerMixin):
    """One layer of a cache in buffers [m, h, length, d]. Its length is a tensor on the device: a number
    of the host would be the same in every replay of a graph."""

    is_compileable = False
    is_sliding = False

    def __init__(self, place: SlotPlace, length: int) -> None:
        super().__init__()
        self.place, self.length = place, length

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Fill the buffers with zeros: hidden slots do not count unless they hold a NaN."""
        self.keys, self.values = (
            new.new_zeros((*new.shape[:2], self.length, new.shape[3]))
            for new in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values [m, h, t, d]. Returns views of the slots that the pass reads."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        self.keys.index_copy_(2, self.place.positions, key_states)
        self.values.index_copy_(2, self.place.positions, value_states)
        return self.keys[:, :, : self.place.reach], self.values[:, :, : self.place.reach]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of slots that a mask covers, and the first one's number."""
        return self.place.reach, 0

    def get_seq_length(self) -> Any:
        """The number of slots written before this pass, as a tensor."""
        return self.place.positions[0]

    def get_max_length(self) -> int:
        return self.length


class StaticReader:
    """Reads `rows` samples of up to `length` tokens with `model`.

    Keys and values lie in buffers that are as long as a sample. A token attends to the first slots, up
    to the next multiple of BUCKET, and a mask hides those that are not written yet: one graph serves
    every token of a bucket. `captures`: single tokens are read by CUDA graphs. The first token of a
    bucket is read without, so that libraries are set up; at the second the graph is captured; at the
    third it is compared with the model itself, and a difference switches graphs off.
    """

    def __init__(self, model: PreTrainedModel, rows: int, length: int, captures: bool) -> None:
        self.model, self.rows, self.length, self.captures = model, rows, length, captures
        device = model.device
        self.token = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.place, self.filled = SlotPlace(self.position, length), 0
        count = len(DynamicCache(config=model.config).layers)
        slots = Cache(layers=[Slots(self.place, length) for _ in range(count)])
        self.cache = {cache_name(model): slots}
        self.placed = "position_ids" in signature(model.forward).parameters
        self.probabilities: Tensor | None = None
        self.graphs: dict[int, Captured] = {}
        self.seen: Counter[int] = Counter()  # tokens read in a bucket
        self.pool: object = None

    def restart(self) -> None:
        """Begin other samples; slots stay hidden until they are written again."""
        self.filled = 0

    def read(self, fresh: Tensor) -> Tensor:
        """Read tokens `fresh` [rows, t]. Returns probabilities [rows, v] (float32) of the next token,
        in a buffer that the caller may change and the next call overwrites. Raises
        torch.OutOfMemoryError."""
        self._begin(fresh)
        if fresh.shape[1] == 1:
            self.token.copy_(fresh)
            self._next()
        else:
            self._pass(fresh)
        assert self.probabilities is not None
        return self.probabilities

    def logits(self, fresh: Tensor) -> Tensor:
        """Read tokens `fresh` without graphs. Returns logits [rows, v] in the model's dtype."""
        self._begin(fresh)
        return self._logits(fresh)

    def _begin(self, fresh: Tensor) -> None:
        """Choose the slots of a pass: a single token reads whole buckets, a prompt what is written with
        it."""
        begin, self.filled = self.filled, self.filled + fresh.shape[1]
        if fresh.shape[1] == 1:
            self.place.positions = self.position.fill_(begin)
            self.place.reach = min(-(-self.filled // BUCKET) * BUCKET, self.length)
        else:
            self.place.positions = torch.arange(begin, self.filled, device=fresh.device)
            self.place.reach = self.filled

    def _logits(self, ids: Tensor) -> Tensor:
        """Logits [rows, v] of tokens whose slots are chosen. The mask is added to the scores: every
        kind of attention takes that, and transformers does not change a mask of four dimensions."""
        place, dtype = self.place, self.model.dtype
        hidden = torch.arange(place.reach, device=ids.device) > place.positions[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=ids.device)
        mask = mask.masked_fill_(hidden, torch.finfo(dtype).min)[None, None]
        given = {"position_ids": place.positions[None]} if self.placed else {}
        asked: dict[str, object] = {**given, **self.cache, "use_cache": True, "logits_to_keep": 1}
        with packed_heads(self.model):
            found: Tensor = self.model(input_ids=ids, attention_mask=mask, **asked).logits
        return found[:, -1]

    def _pass(self, ids: Tensor) -> None:
        logits = self._logits(ids)
        if self.probabilities is None:
            self.probabilities = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        torch.softmax(logits.float(), -1, out=self.probabilities)

    def _next(self) -> None:
        """Read `token` at `position`, by a graph if there is one."""
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
        """Capture a graph; after a failure no graphs are used."""
        try:
            self.pool = self.pool or torch.cuda.graph_pool_handle()
            with on_gpu(self.model.device):
                self.graphs[reach] = Captured(partial(self._pass, self.token), pool=self.pool)
        except Exception as error:  # whatever a model does meanwhile
            self._give_up()
            if said := exhausted(error):
                raise torch.OutOfMemoryError(said) from error

    def _judge(self) -> None:
        """Compare the graph's result with the model's own, which writes the same keys and values
        again."""
        assert self.probabilities is not None
        found = self.probabilities[:PROBED].clone()
        self._pass(self.token)
        if not distance(_log(found), _log(self.probabilities[:PROBED])) < SAME:
            self._give_up()

    def _give_up(self) -> None:
        self.captures = False
        self.graphs.clear()


class StaticReading:
    """Keeps a model's reader from batch to batch. As a context it frees buffers and graphs at the
    end."""

    def __init__(self, model: PreTrainedModel, length: int) -> None:
        self.model, self.length = model, length
        self.allowed: bool | None = None  # None: not tried yet
        self.held: StaticReader | None = None

    @property
    def rows(self) -> int | None:
        """The number of samples that the kept reader reads."""
        return None if self.held is None else self.held.rows

    def reader(self, rows: int) -> StaticReader | None:
        """A reader at the start of `rows` samples; None if the model cannot be read in place."""
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
        """Free the memory; that of graphs goes back to the driver, for nobody else could use it."""
        if self.held is not None:
            self.held = None
            if self.model.device.type == "cuda":
                torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()


def can_be_static(model: PreTrainedModel, length: int) -> bool:
    """Whether `model` attends to all earlier tokens, up to `length`, and gives the same logits from
    buffers. It is tried at the start of the first bucket and of the last whole one, where most slots
    are hidden. Raises torch.OutOfMemoryError."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(vocabulary, (TRIED, length), generator=torch.Generator().manual_seed(0))
    ids = ids.to(model.device)
    try:
        layers = DynamicCache(config=model.config).layers  # transformers would keep all tokens in each
        whole = all(
            type(layer) is DynamicLayer or getattr(layer, "sliding_window", 0) >= length
            for layer in layers
        )
        return length > 1 and bool(layers) and whole and _tried(model, ids)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model raises at a cache or a mask that it does not take
        raise_exhausted(error)
        return False


@torch.inference_mode()
def _tried(model: PreTrainedModel, ids: Tensor) -> bool:
    rows, length = ids.shape
    reader = StaticReader(model, rows, length, captures=False)
    last = max((length - 1) // BUCKET - 1, 0) * BUCKET + 1
    for position in sorted({1, last}):
        if reader.filled < position:
            reader.logits(ids[:, reader.filled : position])
        found = reader.logits(ids[:, position : position + 1])
        asked: dict[str, object] = {"use_cache": False, "logits_to_keep": 1}
        expected = model(input_ids=ids[:, : position + 1], **asked).logits[:, -1]
        if found.shape != expected.shape or not distance(found, expected) < SAME:
            return False
    return True


@contextmanager
def packed_heads(model: PreTrainedModel) -> Iterator[None]:
    """While active, SDPA attends by `_attend`: given a mask, most releases of transformers copy the
    keys for every token if there are fewer key heads than query heads."""
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
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, **_: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """Outputs [m, t, h, d] for queries [m, h, t, d]. A single token's heads that share a key are rows
    of one product."""
    m, h, t, d = query.shape
    shared = h // key.shape[1]
    if t > 1 and shared > 1:  # prompts are short
        key, value = (states.repeat_interleave(shared, 1) for states in (key, value))
    rows = query.reshape(m, key.shape[1], shared, d) if t == 1 else query
    out = scaled_dot_product_attention(rows, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(m, h, t, -1).transpose(1, 2).contiguous(), None


def _log(probabilities: Tensor) -> Tensor:
    """Logits up to a constant in each sample."""
    return probabilities.clamp_min(1e-30).log()


def distance(found: Tensor, expected: Tensor) -> Tensor:
    """The relative distance of logits, without what all of a sample have in common: softmax does not
    see that."""
    found, expected = (x.float() - x.float().mean(-1, keepdim=True) for x in (found, expected))
    return (found - expected).norm() / expected.norm().clamp_min(1e-9)
