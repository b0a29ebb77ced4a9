"""Gives a cache the ranks of an attention's keys and values, and makes those of all tokens from ranks.
Between its layer and the cache a key is normed, rotated, or both, in an order that families differ in.
The order is found by comparing with the keys that the attention's own `forward` makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from blr.compressor.modeling.extended import Extension, extend, with_children
from blr.compressor.modeling.fused import ROTATION, behind_renaming
from blr.compressor.modeling.rank_cache import FORMATS, Angles, Parts, RankCache, RankFormat, RankLayer
from blr.compressor.modeling.ranks import OfRanks, RankRequest, ranked

APART = ("k_proj", "v_proj")
KINDS = ("keys", "values")
JOINT = "c_attn"  # GPT-2's: queries, keys and values, as wide as each other
KEY_NORMS = ("k_norm", "k_layernorm", "key_layernorm")
ORDERS = (("norm", "rotate"), ("rotate", "norm"), ("norm",), ("rotate",), ())
CLOSE = 4  # units of the last place of the largest number, to which found keys are the same


class Made(NamedTuple):
    """How keys or values are made from ranks. parts: ranks of the new tokens, as a cache holds them.
    product, start, stop: the outputs start…stop of a product are the keys or values. dtype: of both."""

    parts: Parts
    product: OfRanks
    start: int
    stop: int
    dtype: torch.dtype


@dataclass
class RankStep:
    """What an attention makes of new tokens for a cache. angles: cosines and sines of their positions,
    None for an attention that is given none. made: how keys and values are made, by these two words."""

    attention: RankAttention
    angles: Angles | None
    format: RankFormat
    made: dict[str, Made] = field(default_factory=dict)

    def layers(self) -> dict[str, Callable[[Tensor], Tensor]]:
        """Functions to put in the place of the attention's layers: they also keep the ranks."""
        names = projections(self.attention)
        return {n: self._joint if n == JOINT else partial(self._apart, n) for n in names}

    def _apart(self, name: str, x: Tensor) -> Tensor:
        (layer,) = ranked(self.attention, name)
        ranks, product = layer(RankRequest(x))
        kind = "keys" if name == APART[0] else "values"
        return self._keep(kind, self.format.pack(ranks), product, (0, layer.out_features), x.dtype)

    def _joint(self, x: Tensor) -> Tensor:
        (layer,) = ranked(self.attention, JOINT)
        ranks, product = layer(RankRequest(x))
        width = layer.out_features // 3
        y, whole = [product.outputs(ranks, 0, width)], self.format.pack(ranks)
        for kind, start in (("keys", width), ("values", 2 * width)):
            if (found := product.part(start, start + width)) is None:
                y.append(self._keep(kind, whole, product, (start, start + width), x.dtype))
            else:
                parts = self.format.pack(ranks[..., found[1], :])
                y.append(self._keep(kind, parts, found[0], (0, width), x.dtype))
        return torch.cat(y, -1)

    def _keep(
        self, kind: str, parts: Parts, product: OfRanks, span: tuple[int, int], dtype: torch.dtype
    ) -> Tensor:
        self.made[kind] = Made(parts, product, *span, dtype)
        return self._new(kind)

    def _new(self, kind: str) -> Tensor:
        return self._flat(kind, self.made[kind].parts)

    def _flat(self, kind: str, parts: Parts) -> Tensor:
        """Keys or values of `parts` as their layer gives them; new tensors, for models write."""
        made = self.made[kind]
        return made.product.outputs(self.format.unpack(parts, made.dtype), made.start, made.stop)

    def explains(self, keys: Tensor, values: Tensor) -> bool:
        """Whether keys and values [B, H, t, D] follow from the layers by a known order of steps."""
        if len(self.made) < 2 or len(keys.shape) != 4:
            return False
        known = self.attention.key_orders
        if known is None and not _close(_heads(self._new("values"), values.shape[-1]), values):
            return False
        if known is None or len(known) > 1:  # one token at the first position is not rotated
            flat = self._new("keys")
            fits = [o for o in known or ORDERS if _fits(self.attention, o, flat, self.angles, keys)]
            self.attention.key_orders = tuple(fits) or known
        return bool(self.attention.key_orders)

    def all_of(self, held: RankLayer) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, T, D] of all tokens that a cache holds."""
        keys, values = (self._flat(kind, of.held) for kind, of in zip(KINDS, held.stores, strict=True))
        angles = None if held.rotation is None else held.rotation.held
        assert self.attention.key_orders  # of an attention that was explained
        order = self.attention.key_orders[0]
        return ordered(self.attention, order, keys, angles), _heads(values, self.attention.head_dim)


class RankAttention(Extension):
    """Mixin before an attention whose keys and values are of low rank. key_orders: the `ORDERS` by which
    its keys may be made, as far as is known; None before any keys were seen."""

    head_dim: int
    key_orders: tuple[tuple[str, ...], ...] | None = None

    def forward(self, *args: object, **kwargs: object) -> object:
        """The native result. A `RankCache` among the arguments is given ranks."""
        cache = next((each for each in kwargs.values() if isinstance(each, RankCache)), None)
        number = getattr(self, "layer_idx", getattr(self, "layer_id", 0))
        held = None if cache is None else cache.layers[number]
        x = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(held, RankLayer) or held.is_initialized or not isinstance(x, Tensor):
            return super().forward(*args, **kwargs)
        angles = kwargs.get("position_embeddings")
        step = RankStep(self, angles if _are_angles(angles) else None, FORMATS[held.kind])
        if _is_watched(self, x):
            _make_whole(step, held, x)
            return super().forward(*args, **kwargs)
        held.step = step
        return super(RankAttention, with_children(self, step.layers())).forward(*args, **kwargs)


def keep_ranks(model: nn.Module) -> None:
    """Let the attention of `model` give ranks to caches, where its keys and values have some."""
    for module in model.modules():
        layers = ranked(module, *projections(module))
        if layers and hasattr(module, "head_dim"):
            extend(module, RankAttention)
            for layer in layers:
                layer.cached = True


def projections(attention: nn.Module) -> tuple[str, ...]:
    return (JOINT,) if JOINT in attention._modules else APART


def ordered(
    attention: RankAttention, order: tuple[str, ...], flat: Tensor, angles: Angles | None
) -> Tensor:
    """Keys [B, H, T, D] from the outputs [B, T, H·D] of their layer, by one of `ORDERS`. Raises
    TypeError or AttributeError for a step that this attention has not."""
    norm: Any = next((getattr(attention, name) for name in KEY_NORMS if hasattr(attention, name)), None)
    width = attention.head_dim
    if order[:1] == ("norm",) and norm.weight.shape[-1] == flat.shape[-1] != width:
        flat, order = norm(flat), order[1:]  # of all heads together
    keys = flat.unflatten(-1, (-1, width))
    for name in order:
        keys = norm(keys) if name == "norm" else _rotated(attention, keys, angles)
    return keys.transpose(1, 2)


def _rotated(attention: RankAttention, keys: Tensor, angles: Angles | None) -> Tensor:
    """Keys [B, T, H, D] rotated by the function of the model's own file, some families' in part."""
    if angles is None:
        raise TypeError("this attention is given no angles")
    rotate = behind_renaming(attention.native.forward).__globals__[ROTATION]
    alone = rotate.__code__.co_argcount == 3  # GPT-J's: of one tensor, pairs of features by one angle
    turned, rest = keys.tensor_split([angles[0].shape[-1] * (1 + alone)], -1)
    if alone:
        turned = rotate(turned, *angles)
    else:
        turned = turned.transpose(1, 2)
        turned = rotate(turned[:, :1], turned, *angles)[1].transpose(1, 2)
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


def _fits(
    attention: RankAttention, order: tuple[str, ...], flat: Tensor, angles: Angles | None, keys: Tensor
) -> bool:
    try:
        return _close(ordered(attention, order, flat, angles), keys)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        return False  # it has no norm, or is given no angles


def _close(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    most = CLOSE * torch.finfo(found.dtype).eps * expected.abs().max()
    return bool((found - expected).abs().max() <= most)


def _are_angles(given: object) -> TypeGuard[Angles]:
    return isinstance(given, tuple) and len(given) == 2 and all(each.dim() == 3 for each in given)


def _heads(flat: Tensor, width: int) -> Tensor:
    return flat.unflatten(-1, (-1, width)).transpose(1, 2)


def _is_watched(attention: nn.Module, x: Tensor) -> bool:
    """Whether keys and values must be whole: for gradients, traces, autocast, hooks and adapters."""
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if torch.is_grad_enabled() or traced or torch.is_autocast_enabled(x.device.type):
        return True
    layers = ranked(attention, *projections(attention))
    return not layers or any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)


@torch.no_grad()
def _make_whole(step: RankStep, held: RankLayer, x: Tensor) -> None:
    """From here on let a cache that holds ranks hold whole keys and values of the same tokens."""
    if held.length and ranked(step.attention, *projections(step.attention)):
        for layer in step.layers().values():
            layer(x[:, :0])  # for the products alone
        held.hold_whole(*step.all_of(held))
