"""Computes blocks in slices, so that the tensors they make meanwhile fit BLR_TRANSIENT. A block takes a
few sequences at a time, an MLP or a norm some tokens, and attention within one long sequence some heads:
the module's own `forward` is called with a part of its input. Heads are made from the ranks of queries,
keys and values, by functions in the place of the attention's projections."""

from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from blr.compressor.modeling.extended import Extension, extend, same, with_children
from blr.compressor.modeling.layers import PROJECTIONS, StructuredLinear
from blr.compressor.modeling.ranks import OfRanks, RankRequest, ranked
from blr.compressor.modeling.settings import warn_once
from blr.kernels.common.transient import chunks, tokens_within, transient_bytes

NORM_BYTES = 8  # of a feature in a root-mean-square norm: two copies in float32
BESIDE = 3  # copies of a block's input that live beside its attention: normed, attended, summed
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q_lin", "k_lin", "v_lin"))
LAST = ("o_proj", "out_proj", "out_lin")  # what families call the layer behind the heads
WIDTHS = ("head_dim", "attention_head_size")
KNOWN = {"hidden_states", "attention_mask", "position_embeddings", "position_ids", "cache_position"}
TRIED = 4  # tokens that tell whether heads can be computed apart
CLOSE = 2e-2  # of their norm, in any dtype

Given = dict[str, object]  # arguments of an attention by name


class TokenSlices(Extension):
    """Mixin before a module that computes token by token. token_features: numbers that it holds for one
    token. token_itemsize: bytes of each; 0: as of its input."""

    token_features: int
    token_itemsize: int

    def forward(self, *args: object, **kwargs: object) -> object:
        x = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(x, Tensor) or (limit := limit_of(x)) is None:
            return super().forward(*args, **kwargs)
        width = self.token_features * (self.token_itemsize or x.element_size())
        return by_tokens(self, super().forward, x, width, limit)


class RowSlices(Extension):
    """Mixin before a block of transformers, whose first argument is [B, T, d]. block_features,
    feed_forward_features: numbers that a token takes in it, and in `feed_forward_chunk`."""

    block_features: int
    feed_forward_features: int

    def forward(self, *args: object, **kwargs: object) -> object:
        compute = super().forward
        x = args[0] if args else kwargs.get("hidden_states")
        limit = limit_of(x) if self.block_features else None
        if limit is None or not isinstance(x, Tensor) or x.dim() != 3 or len(x) < 2:
            return compute(*args, **kwargs)
        at_once = max(limit // max(x[0].nbytes // x.shape[-1] * self.block_features, 1), 1)
        known = at_once < len(x) and _has_rows((*args, *kwargs.values()), len(x))
        if not known or is_hooked(self):
            return compute(*args, **kwargs)
        batch = len(x)

        def some(start: int, stop: int) -> object:
            named = {name: _rows(each, start, stop, batch) for name, each in kwargs.items()}
            return compute(*(_rows(each, start, stop, batch) for each in args), **named)

        made = _in_parts(some, batch, at_once)
        if made is None:  # its result is not one tensor: no use to try again
            self.block_features = 0
            return compute(*args, **kwargs)
        return made

    def feed_forward_chunk(self, attention_output: Tensor) -> object:
        """The MLP of blocks of BERT's kind, which have it in this method; no others call it."""
        native: Any = super()
        if (limit := limit_of(attention_output)) is None:
            return native.feed_forward_chunk(attention_output)
        width = self.feed_forward_features * attention_output.element_size()
        return by_tokens(self, native.feed_forward_chunk, attention_output, width, limit)


def limit_of(x: object) -> int | None:
    """How many bytes a module may take for its own tensors, given hidden states `x`. None where it is to
    compute them whole: with gradients, in a trace, and where there is no bound."""
    if type(x) is not Tensor or torch.is_grad_enabled() or x.dim() < 2:
        return None
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return None
    return transient_bytes(x.device.type)


def is_hooked(module: nn.Module) -> bool:
    """Whether a module inside has hooks, which expect one call for each of the whole."""
    inside = (each for each in module.modules() if each is not module)
    return any(each._forward_hooks or each._forward_pre_hooks for each in inside)


def by_tokens(
    module: nn.Module, compute: Callable[[Tensor], Tensor], x: Tensor, width: int, limit: int
) -> Tensor:
    """``compute(x)``, for some tokens at a time. width: bytes that a token takes meanwhile."""
    tokens = x.shape[:-1].numel()
    at_once = tokens_within(limit, width)
    if tokens <= at_once or is_hooked(module):
        return compute(x)
    rows = x.reshape(1, tokens, x.shape[-1])
    out = _in_parts(lambda start, stop: compute(rows[:, start:stop])[0], tokens, at_once)
    assert out is not None
    return out.view(*x.shape[:-1], -1)


def _in_parts(compute: Callable[[int, int], object], count: int, at_once: int) -> Tensor | None:
    """``compute(start, stop)`` for some of `count` rows at a time; None if a result has other rows."""
    out: Tensor | None = None
    for start, stop in chunks(count, at_once):
        part = compute(start, stop)
        if not isinstance(part, Tensor) or part.shape[:1] != (stop - start,):
            return None
        if out is None:
            out = part.new_empty((count, *part.shape[1:]))
        out[start:stop] = part
        del part  # before the next one is made
    return out


def _has_rows(argument: object, batch: int) -> bool:
    """Whether it is known which rows of an argument belong to which of `batch` sequences. It is not for
    a cache, which a block appends to once, nor for angles [T, d] of positions when T is the batch."""
    if isinstance(argument, Tensor):
        if argument.dim() < 2:
            return argument.shape != (batch,)
        mine = len(argument) == batch and (argument.dim() > 2 or not argument.is_floating_point())
        return mine or len(argument) == 1
    if isinstance(argument, tuple):
        return all(_has_rows(each, batch) for each in argument)
    return argument is None or isinstance(argument, bool | int | float | str)


def _rows(argument: object, start: int, stop: int, batch: int) -> object:
    if isinstance(argument, Tensor):
        return argument[start:stop] if argument.dim() > 1 and len(argument) == batch else argument
    if isinstance(argument, tuple):
        return tuple(_rows(each, start, stop, batch) for each in argument)
    return argument


def bound_norms(model: nn.Module) -> None:
    """Let root-mean-square norms, which hold their input twice in float32, take few tokens at a time."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if type(module).__name__.endswith("RMSNorm") and isinstance(weight, Tensor):
            _by_tokens(module, NORM_BYTES * weight.shape[-1], 1)


def bound_blocks(model: nn.Module) -> None:
    """Let the blocks of `model` that have structured layers, and the MLPs in them, compute in slices."""
    for block in _blocks(model):
        for module in filter(_is_mlp, list(block.modules())):
            _by_tokens(module, _widened(module), 0)
        width, made = _attention(block)
        features = BESIDE * width + max(made, _whole_middle(block))
        extended = extend(block, RowSlices)
        extended.block_features = features
        extended.feed_forward_features = _widened(getattr(block, "intermediate", block))


def sizes(layer: nn.Module) -> tuple[int, int]:
    """Inputs and outputs of a linear layer of any kind, zeros for other modules."""
    found = [getattr(layer, name, 0) for name in ("in_features", "out_features", "nx", "nf")]
    return int(found[0] or found[2]), int(found[1] or found[3])


def _by_tokens(module: nn.Module, features: int, itemsize: int) -> None:
    extended = extend(module, TokenSlices)
    extended.token_features, extended.token_itemsize = features, itemsize


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        structured = (isinstance(each, StructuredLinear) for each in module.modules())
        if isinstance(module, GradientCheckpointingLayer) and any(structured):
            yield module


def _is_mlp(module: nn.Module) -> bool:
    """Whether a module is an MLP: from a structured layer that widens to one that narrows, with nothing
    else in it that has parameters but linear layers, none of them of an attention."""
    children = dict(module.named_children())
    linear = all(sizes(each)[0] or next(each.parameters(), None) is None for each in children.values())
    narrows = any(inputs > outputs for inputs, outputs in map(sizes, children.values()))
    return linear and narrows and not children.keys() & PROJECTIONS and _widened(module) > 0


def _widened(module: nn.Module) -> int:
    """How many numbers of a token the structured layers of a module widen it to, with an activation."""
    made = [
        layer.out_features
        for name, layer in module.named_children()
        if isinstance(layer, StructuredLinear) and 2 * layer.out_features >= 3 * layer.in_features
        if name not in PROJECTIONS
    ]
    return sum(made) + max(made, default=0)


def _attention(block: nn.Module) -> tuple[int, int]:
    """Numbers that a token has in the input of a block's attention, and in what this makes of it."""
    named = {name.rpartition(".")[2]: sizes(layer) for name, layer in block.named_modules()}
    made = [named[name] for name in named if name in PROJECTIONS] or [(0, 0)]
    return made[0][0], sum(outputs for _, outputs in made) + max(outputs for _, outputs in made)


def _whole_middle(block: nn.Module) -> int:
    """How many numbers a token has in the widest MLP of a block that is not computed in slices."""
    if hasattr(block, "feed_forward_chunk"):
        return 0
    return max(_widened(each) for each in block.modules() if not isinstance(each, TokenSlices))


class HeadSlices(Extension):
    """Mixin before an attention whose projections are of low rank. projections: names of those of
    queries, keys and values. last: that of the layer behind the heads, or None. key_heads: heads of
    keys; as many of queries, or more, share one. widening: numbers of queries, keys, values and the
    former two rotated, for each number of the input. apart: whether heads computed apart give the same
    as together; None before anybody has tried."""

    config: PreTrainedConfig
    projections: tuple[str, str, str]
    last: str | None
    key_heads: int
    widening: float
    apart: bool | None = None

    def forward(self, *args: object, **kwargs: object) -> object:
        """The native result; its attention weights are None where heads are computed apart."""
        x = args[0] if args else kwargs.get("hidden_states")
        limit = None if self.apart is False else limit_of(x)
        if limit is None or not isinstance(x, Tensor):
            return super().forward(*args, **kwargs)
        given = {**dict(zip(self._names(), args, strict=False)), **kwargs}
        plain = _is_plain(given) and ranked(self, *self.projections)
        taken = x.nbytes * self.widening if plain else 0
        if taken <= limit or is_hooked(self) or not self._can_part(given):
            return super().forward(*args, **kwargs)
        return self._behind(_attended(self, given, max(int(limit * self.key_heads / taken), 1))), None

    def _names(self) -> list[str]:
        return list(signature(self.native.forward).parameters)[1:]

    def _behind(self, heads: Tensor) -> Tensor:
        return heads if self.last is None else self.get_submodule(self.last)(heads)

    def _can_part(self, given: Given) -> bool:
        """Whether heads can be computed apart, tried on the first tokens at the first call."""
        if self.apart is None:
            few = {n: _first(each) for n, each in given.items() if n != "attention_mask"}
            few["attention_mask"] = None
            self.apart = self.config._attn_implementation != "eager" and self._agree(few)
        if not self.apart:
            kind = type(self).__name__
            warn_once(f"{kind} computes all heads at once: right, but above the bound of BLR_TRANSIENT")
        return self.apart

    def _agree(self, given: Given) -> bool:
        try:
            expected, found = super().forward(**given)[0], self._behind(_attended(self, given, 1))
            return bool((found - expected).norm() <= CLOSE * expected.norm())
        except (RuntimeError, TypeError, ValueError, IndexError):
            return False


def part_heads(model: nn.Module) -> None:
    """Let the attention of `model` compute some heads at a time where its projections have ranks."""
    for module in model.modules():
        width = next((getattr(module, name) for name in WIDTHS if hasattr(module, name)), None)
        for names in TOGETHER:
            if width and (layers := ranked(module, *names)):
                query, key, value = layers
                found = extend(module, HeadSlices)
                found.projections, found.key_heads = names, key.out_features // width
                found.last = next((name for name in LAST if hasattr(module, name)), None)
                made = 2 * query.out_features + 2 * key.out_features + value.out_features
                found.widening = made / query.in_features


def _attended(attention: HeadSlices, given: Given, at_once: int) -> Tensor:
    """What the layer behind an attention's heads reads, made by `at_once` key heads at a time."""
    x, mask = given["hidden_states"], given.get("attention_mask")
    assert isinstance(x, Tensor)
    layers = ranked(attention, *attention.projections)
    made = [layer(RankRequest(x)) for layer in layers]
    heads, out = attention.key_heads, x.new_empty((*x.shape[:-1], layers[0].out_features))
    behind = {attention.last: same} if attention.last else {}
    for start, stop in chunks(heads, at_once):
        spans = [(start * p.out_features // heads, stop * p.out_features // heads) for p in layers]
        parts = {
            name: partial(_outputs, product, ranks, *span)
            for name, (ranks, product), span in zip(attention.projections, made, spans, strict=True)
        }
        copy = with_children(attention, {**parts, **behind})
        some = {**given, "attention_mask": _of_heads(mask, start, stop, heads)}
        out[..., slice(*spans[0])] = super(HeadSlices, copy).forward(**some)[0]
    return out


def _outputs(product: OfRanks, ranks: Tensor, start: int, stop: int, x: Tensor) -> Tensor:
    """Stands for a projection: makes some of its outputs from ranks that are computed already."""
    return product.outputs(ranks, start, stop)


def _is_plain(given: Given) -> bool:
    """Whether an attention is given hidden states, a mask and positions alone: no cache."""
    if "hidden_states" not in given:
        return False
    more = (each for name, each in given.items() if name not in KNOWN)
    return all(each is None or isinstance(each, bool | int | float | str) for each in more)


def _first(argument: object) -> object:
    """The first `TRIED` tokens of the first sequence of [B, T, …]."""
    if isinstance(argument, tuple):
        return tuple(map(_first, argument))
    if not isinstance(argument, Tensor):
        return argument
    return argument[:1, :TRIED] if argument.dim() > 1 else argument[:TRIED]


def _of_heads(mask: object, start: int, stop: int, heads: int) -> object:
    """The part of a mask [B, H, T, T] for some heads; all of it where H is 1."""
    if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[1] == 1:
        return mask
    group = mask.shape[1] // heads
    return mask[:, start * group : stop * group]
