"""Blocks computed in slices, so that what they make on the way fits BLR_TRANSIENT.

A block takes a few sequences at a time (`RowSlices`), an MLP or a norm some tokens (`TokenSlices`), and
attention within one long sequence some heads (`head_slices.py`). Each calls the module's own `forward`
with a part of its input and writes the results side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from blr.compressor.modeling.extended import Extension, extend
from blr.compressor.modeling.layers import PROJECTIONS, StructuredLinear
from blr.kernels.common.transient import bound_for, chunks, tokens_within

NORM_BYTES = 8  # of a feature in a root-mean-square norm: two copies in float32
BESIDE = 3  # copies of a block's input that live beside its attention: normed, attended, summed


class TokenSlices(Extension):
    """Mixin before a module that computes token by token. token_features: numbers that it holds for one
    token. token_itemsize: bytes of each, 0: its input's."""

    token_features: int
    token_itemsize: int

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As of the module, [..., d]."""
        compute: Any = super().forward  # type: ignore[misc]
        limit = None if kwargs or len(args) != 1 else limit_of(args[0])
        if limit is None:
            return compute(*args, **kwargs)
        width = self.token_features * (self.token_itemsize or args[0].element_size())
        return by_tokens(self, compute, args[0], width, limit)


class RowSlices(Extension):
    """Mixin before a block of transformers, whose first argument is [B, T, d]. block_features,
    feed_forward_features: numbers that a token takes in it, and in `feed_forward_chunk`."""

    block_features: int
    feed_forward_features: int

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As of the block."""
        compute: Any = super().forward  # type: ignore[misc]
        x: Any = args[0] if args else kwargs.get("hidden_states")
        limit = limit_of(x) if self.block_features else None
        if (
            limit is None
            or x.dim() != 3
            or len(x) < 2
            or not _has_rows((args, *kwargs.values()), len(x))
        ):
            return compute(*args, **kwargs)
        at_once = max(limit // max(x[0].nbytes // x.shape[-1] * self.block_features, 1), 1)
        known = at_once < len(x) and _has_rows((*args, *kwargs.values()), len(x))
        if not known or is_hooked(self):
            return compute(*args, **kwargs)
        made = _by_rows(compute, args, kwargs, x, at_once)
        if made is None:  # its result is not one tensor: no use to try again
            self.block_features = 0
            return compute(*args, **kwargs)
        return made

    def feed_forward_chunk(self: Any, attention_output: Tensor) -> object:
        """As of blocks of BERT's kind, which have their MLP in this method; no others call it."""
        compute: Any = super().feed_forward_chunk  # type: ignore[misc]
        if (limit := limit_of(attention_output)) is None:
            return compute(attention_output)
        width = self.feed_forward_features * attention_output.element_size()
        return by_tokens(self, compute, attention_output, width, limit)


def limit_of(x: object) -> int | None:
    """Bytes that may be taken on the way from hidden states `x`. None where a module computes them
    whole: with gradients, in a trace, and where there is no bound."""
    if type(x) is not Tensor or torch.is_grad_enabled() or x.dim() < 2:
        return None
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return None
    return bound_for(x)


def is_hooked(module: nn.Module) -> bool:
    """Whether somebody looks at what modules inside make, who expects each to be called once."""
    inside = (each for each in module.modules() if each is not module)
    return any(each._forward_hooks or each._forward_pre_hooks for each in inside)


def by_tokens(
    module: nn.Module, compute: Callable[[Tensor], Any], x: Tensor, width: int, limit: int
) -> object:
    """``compute(x)`` of some tokens at a time. width: bytes that one takes on the way."""
    tokens = x.shape[:-1].numel()
    at_once = tokens_within(limit, width)
    if tokens <= at_once or is_hooked(module):
        return compute(x)
    rows, out = x.reshape(1, tokens, x.shape[-1]), None
    for start, stop in chunks(tokens, at_once):
        part = compute(rows[:, start:stop])
        if out is None:
            out = part.new_empty((1, tokens, part.shape[-1]))
        out[:, start:stop] = part
        del part  # before the next one is made
    assert out is not None
    return out.view(*x.shape[:-1], -1)


def _by_rows(compute: Any, args: Any, kwargs: Any, x: Tensor, at_once: int) -> Tensor | None:
    """The result of `compute` of some rows at a time; None if it is not a tensor of as many rows."""
    out: Tensor | None = None
    for start, stop in chunks(len(x), at_once):
        named = {name: _rows(each, start, stop, len(x)) for name, each in kwargs.items()}
        part = compute(*_rows(args, start, stop, len(x)), **named)
        if not isinstance(part, Tensor) or part.shape[:1] != (stop - start,):
            return None
        if out is None:
            out = part.new_empty((len(x), *part.shape[1:]))
        out[start:stop] = part
        del part
    return out


def _has_rows(argument: object, batch: int) -> bool:
    """Whether it is known which rows of an argument belong to which of `batch` sequences. Of a cache it
    is not: a block appends to it once. Nor of angles [T, d] of positions, when T is the batch."""
    if isinstance(argument, Tensor):
        if argument.dim() < 2:
            return argument.shape != (batch,)
        mine = len(argument) == batch and (argument.dim() > 2 or not argument.is_floating_point())
        return mine or len(argument) == 1
    if isinstance(argument, tuple):
        return all(_has_rows(each, batch) for each in argument)
    return argument is None or isinstance(argument, bool | int | float | str)


def _rows(argument: Any, start: int, stop: int, batch: int) -> Any:
    if isinstance(argument, Tensor):
        return argument[start:stop] if argument.dim() > 1 and len(argument) == batch else argument
    if isinstance(argument, tuple):
        return tuple(_rows(each, start, stop, batch) for each in argument)
    return argument


def bound_norms(model: nn.Module) -> None:
    """Let the root-mean-square norms of `model`, which hold their input twice in float32, compute some
    tokens at a time."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if type(module).__name__.endswith("RMSNorm") and isinstance(weight, Tensor):
            _by_tokens(module, NORM_BYTES * weight.shape[-1], 1)


def bound_blocks(model: nn.Module) -> None:
    """Let the blocks of `model` that have structured layers, and the MLPs in them, compute in slices."""
    for block in _blocks(model):
        for module in block.modules():
            bound_mlp(module)
        held: Any = block
        held.feed_forward_features = _widened(getattr(block, "intermediate", block))
        width, made = _attention(block)
        held.block_features = BESIDE * width + max(made, _whole_middle(block))
        extend(block, RowSlices)


def bound_mlp(module: nn.Module) -> None:
    """Let a module compute some tokens at a time if it is an MLP."""
    if _is_mlp(module):
        _by_tokens(module, _widened(module), 0)


def sizes(layer: nn.Module) -> tuple[int, int]:
    """Inputs and outputs of a linear layer of any kind, zeros for other modules."""
    found = [getattr(layer, name, 0) for name in ("in_features", "out_features", "nx", "nf")]
    return int(found[0] or found[2]), int(found[1] or found[3])


def _by_tokens(module: Any, features: int, itemsize: int) -> None:
    extend(module, TokenSlices)
    module.token_features, module.token_itemsize = features, itemsize


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        structured = (isinstance(each, StructuredLinear) for each in module.modules())
        if isinstance(module, GradientCheckpointingLayer) and any(structured):
            yield module


def _is_mlp(module: nn.Module) -> bool:
    """Whether a module computes token by token, from a structured layer that widens to one that narrows:
    there is nothing with parameters in it but linear layers, and none of an attention."""
    children = dict(module.named_children())
    linear = all(sizes(each)[0] or next(each.parameters(), None) is None for each in children.values())
    narrows = any(inputs > outputs for inputs, outputs in map(sizes, children.values()))
    return linear and narrows and not children.keys() & PROJECTIONS and _widened(module) > 0


def _widened(module: nn.Module) -> int:
    """Numbers that the structured layers of a module widen a token to, and an activation of these."""
    made = [
        layer.out_features
        for name, layer in module.named_children()
        if isinstance(layer, StructuredLinear) and 2 * layer.out_features >= 3 * layer.in_features
        if name not in PROJECTIONS
    ]
    return sum(made) + max(made, default=0)


def _attention(block: nn.Module) -> tuple[int, int]:
    """Numbers of a token that the attention of a block is given, and that it makes: queries, keys,
    values and one of them rotated."""
    named = {name.rpartition(".")[2]: sizes(layer) for name, layer in block.named_modules()}
    made = [named[name] for name in named if name in PROJECTIONS] or [(0, 0)]
    return made[0][0], sum(outputs for _, outputs in made) + max(outputs for _, outputs in made)


def _whole_middle(block: nn.Module) -> int:
    """Numbers of a token in the widest MLP of a block that is not computed in slices of its own."""
    if hasattr(block, "feed_forward_chunk"):
        return 0
    return max(_widened(each) for each in block.modules() if not isinstance(each, TokenSlices))
