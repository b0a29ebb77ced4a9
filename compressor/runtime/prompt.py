"""Reads prompts into the static cache by the model's own modules. Short ones run as CUDA graphs of a few
lengths, for the host takes longer to call the modules than a GPU to compute them."""

from contextlib import suppress
from functools import partial

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_utils import PreTrainedModel

from blr.compressor.modeling.cuda_graphs import (
    Capture,
    ForwardGraphs,
    captured_if_faster,
    unmasked,
    unpacked,
)
from blr.compressor.modeling.settings import cache_name
from blr.compressor.runtime.failures import BatchError
from blr.compressor.runtime.memory import StaticKV

CHUNK = 512  # tokens of a row that pass through the layers together where memory is short
WHOLE = 8192  # tokens of all rows that do on a GPU; of longer prompts half as many at a time
CAPTURED = 2048  # tokens of all rows up to which the host may be what a pass waits for
GRAPHS = 96  # shapes of prompts kept at once: all that `graph_shape` gives for up to 16 rows
LEAST = 16  # tokens that the lengths of graphs lie apart, a quarter of a power of two where that is more


def left_padded(input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A prompt [B, T] with the padding of every row on its left, and its lengths [B]. Raises BatchError
    for a mask of another shape, an empty row, or a hole inside a row."""
    if attention_mask is None:
        return input_ids, None
    if attention_mask.shape != input_ids.shape:
        found, expected = list(attention_mask.shape), list(input_ids.shape)
        raise BatchError(f"an attention mask of shape {found}: expected that of the prompt, {expected}")
    mask = attention_mask.bool()
    lengths = mask.sum(-1)
    first = mask.int().argmax(-1)
    slot = torch.arange(mask.shape[1], device=mask.device)
    runs = (slot >= first[:, None]) & (slot < (first + lengths)[:, None])
    if not torch.equal(runs, mask) or bool((lengths == 0).any()):
        raise BatchError("an attention mask with holes or empty rows: expected padding at the ends only")
    shift = mask.shape[1] - lengths - first  # to the right
    rolled = (slot - shift[:, None]) % mask.shape[1]
    return input_ids.gather(1, rolled), lengths


class Prompts:
    """Passes prompts through the layers of `model`, whose keys and values go to `kv`. A graph may have
    more tokens and rows than its prompt: no token of the prompt sees those behind its end, and later
    tokens overwrite their slots in the cache. capture: as of `ForwardGraphs`; None: no graphs."""

    def __init__(self, model: PreTrainedModel, kv: StaticKV, capture: Capture | None) -> None:
        self.model, self.kv = model, kv
        self.graphs = None if capture is None else ForwardGraphs(capture, GRAPHS)

    def take(self, input_ids: Tensor, start: Tensor) -> Tensor:
        """Pass tokens [B, T] through; returns the normalized hidden states [B, H] of the last slot.
        start: [B] on the CPU, the first slot of each row that is not padding."""
        padding = start.to(input_ids.device) if int(start.max()) > 0 else None
        found = None
        with suppress(torch.OutOfMemoryError):
            found = self._replayed(input_ids, padding)
        return self._whole(input_ids, padding) if found is None else found

    def _replayed(self, input_ids: Tensor, padding: Tensor | None) -> Tensor | None:
        """Pass tokens through by a graph; None where there is none for so many tokens."""
        rows, length = input_ids.shape
        most_rows, context = self.kv.data.shape[2], self.kv.data.shape[4]
        shape = graph_shape(rows, length, most_rows, context)
        if self.graphs is None or shape is None:
            return None
        last = torch.full((1,), length - 1, device=input_ids.device)
        given: tuple[Tensor, ...] = (_filled(input_ids, shape), last)
        inside = unmasked
        if padding is not None:
            given, inside = (*given, _filled(padding, shape[:1])), unpacked
        found = self.graphs.replayed(self._at_once, (given, {}), inside)
        return None if found is None else found[:rows]

    def _at_once(self, input_ids: Tensor, last: Tensor, padding: Tensor | None = None) -> Tensor:
        """The hidden states [B, H] of slot `last` (a tensor of one) of tokens that pass together."""
        hidden = self._chunk(input_ids, padding, self.kv.for_prefill(len(input_ids)), 0)
        return hidden.index_select(1, last)[:, 0]

    def _whole(self, input_ids: Tensor, padding: Tensor | None) -> Tensor:
        """Pass a prompt through without graphs, as much at once as there is memory for."""
        rows, length = input_ids.shape
        if self._on_gpu(input_ids):
            most = WHOLE if rows * length <= WHOLE else WHOLE // 2
            with suppress(torch.OutOfMemoryError):
                return self._in_chunks(input_ids, padding, max(most // rows, CHUNK))
            torch.cuda.empty_cache()
        return self._in_chunks(input_ids, padding, CHUNK)

    @staticmethod
    def _on_gpu(tensor: Tensor) -> bool:
        return tensor.is_cuda

    def _in_chunks(self, input_ids: Tensor, padding: Tensor | None, step: int) -> Tensor:
        cache, hidden = self.kv.for_prefill(len(input_ids)), input_ids
        for begin in range(0, input_ids.shape[1], step):
            hidden = self._chunk(input_ids[:, begin : begin + step], padding, cache, begin)
        return hidden[:, -1]

    def _chunk(self, input_ids: Tensor, padding: Tensor | None, cache: Cache, begin: int) -> Tensor:
        """The hidden states [B, T, H] of tokens from slot `begin` on, after those in the cache."""
        end = begin + input_ids.shape[1]
        slot, mask = torch.arange(end, device=input_ids.device), None
        positions = slot[None, begin:]
        if padding is not None:
            positions = (positions - padding[:, None]).clamp_min(0)
            mask = (slot >= padding[:, None]).long()
        base = self.model.get_decoder()
        given = {"input_ids": input_ids, "attention_mask": mask, "position_ids": positions}
        hidden: Tensor = base(**given, **{cache_name(base): cache}, use_cache=True).last_hidden_state
        return hidden


def capture_on(device: torch.device) -> Capture | None:
    """The function that captures passes on a GPU in graphs that share memory; None on a CPU."""
    if device.type != "cuda":
        return None
    return partial(captured_if_faster, pool=torch.cuda.graph_pool_handle())


def graph_shape(rows: int, length: int, most_rows: int, context: int) -> tuple[int, int] | None:
    """The rows and tokens of the graph for a prompt; None where the prompt is too long for one. Tokens
    are the next of lengths that lie a quarter apart, rows the next power of two, neither more than the
    cache has."""
    step = max(LEAST, 1 << max((length - 1).bit_length() - 3, 0))
    tokens = min(-(-length // step) * step, context)
    wide = min(1 << (rows - 1).bit_length(), most_rows)
    return (wide, tokens) if wide * tokens <= CAPTURED else None


def _filled(t: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Pad `t` with zeros at the end of every axis to `shape`."""
    room = t.new_zeros(shape)
    room[tuple(slice(size) for size in t.shape)] = t
    return room
