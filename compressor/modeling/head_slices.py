"""Attention some heads at a time, of queries, keys and values that are made from their ranks.

For a long sequence these three are the widest tensors of a block; their ranks take half of that or
less. The attention's own `forward` is called for every few heads, with functions in the place of its
projections that give these heads alone.
"""

from __future__ import annotations

from inspect import signature
from typing import Any, NamedTuple

from torch import Tensor, nn

from blr.compressor.modeling.extended import Extension, extend, with_children
from blr.compressor.modeling.ranks import OfRanks, RankRequest, have_ranks
from blr.compressor.modeling.settings import warn_once
from blr.compressor.modeling.slices import is_hooked, limit_of
from blr.kernels.common.transient import chunks

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q_lin", "k_lin", "v_lin"))
LAST = ("o_proj", "out_proj", "out_lin")  # what families call the layer behind the heads
WIDTHS = ("head_dim", "attention_head_size")
KNOWN = {"hidden_states", "attention_mask", "position_embeddings", "position_ids", "cache_position"}
TRIED = 4  # tokens that tell whether heads can be computed apart
CLOSE = 2e-2  # of their norm, in any dtype


class HeadSlices(Extension):
    """Mixin before an attention whose projections are of low rank.

    projections: names of those of queries, keys and values. last: that of the layer behind the heads, or
    None. key_heads: heads of keys; as many of queries, or more, share one. widening: numbers of queries,
    keys, values and the former two rotated, for each of the input. apart: whether heads computed apart
    are what they are together; None while nobody has tried.
    """

    projections: tuple[str, str, str]
    last: str | None
    key_heads: int
    widening: float
    apart: bool | None = None

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As of the attention; its weights are None where heads are computed apart."""
        compute: Any = super().forward  # type: ignore[misc]
        limit = limit_of(args[0] if args else kwargs.get("hidden_states"))
        if limit is None or self.apart is False:
            return compute(*args, **kwargs)
        given = _named(self, args, kwargs)
        plain = _is_plain(given) and have_ranks(self, *self.projections)
        taken = given["hidden_states"].nbytes * self.widening if plain else 0
        if taken <= limit or is_hooked(self) or not self._can_part(compute, given):
            return compute(*args, **kwargs)
        heads = _attended(self, compute, given, max(int(limit * self.key_heads / taken), 1))
        return heads if self.last is None else getattr(self, self.last)(heads), None

    def _can_part(self: Any, compute: object, given: dict[str, Any]) -> bool:
        """Whether heads are right by themselves: compared once, of a few tokens that no mask hides."""
        if self.apart is None:
            few = {n: _first(each) for n, each in given.items() if n != "attention_mask"}
            few |= {"attention_mask": None}
            self.apart = self.config._attn_implementation != "eager" and _agree(self, compute, few)
        if not self.apart:
            kind = type(self).__name__
            warn_once(f"{kind} computes all heads at once: right, but above the bound of BLR_TRANSIENT")
        return bool(self.apart)


def part_heads(model: nn.Module) -> None:
    """Let the attention of `model` compute some heads at a time where its projections have ranks."""
    for module in model.modules():
        found: Any = module
        width = next((getattr(module, name) for name in WIDTHS if hasattr(module, name)), None)
        for names in TOGETHER:
            if width and have_ranks(module, *names):
                query, key, value = [getattr(found, name) for name in names]
                extend(module, HeadSlices)
                found.projections, found.key_heads = names, key.out_features // width
                found.last = next((name for name in LAST if hasattr(module, name)), None)
                made = 2 * query.out_features + 2 * key.out_features + value.out_features
                found.widening = made / query.in_features


def _attended(attention: Any, compute: Any, given: dict[str, Any], at_once: int) -> Tensor:
    """What an attention gives to the layer behind its heads, `at_once` heads of keys at a time."""
    x: Tensor = given["hidden_states"]
    layers = [getattr(attention, name) for name in attention.projections]
    made = [layer(RankRequest(x)) for layer in layers]
    heads, out = attention.key_heads, x.new_empty((*x.shape[:-1], layers[0].out_features))
    behind = {attention.last: _same} if attention.last else {}
    for start, stop in chunks(heads, at_once):
        spans = [(start * p.out_features // heads, stop * p.out_features // heads) for p in layers]
        parts = {
            name: _Outputs(ranks, product, *span)
            for name, (ranks, product), span in zip(attention.projections, made, spans, strict=True)
        }
        some = {**given, "attention_mask": _of_heads(given.get("attention_mask"), start, stop, heads)}
        out[..., slice(*spans[0])] = compute.__func__(
            with_children(attention, {**parts, **behind}), **some
        )[0]
    return out


class _Outputs(NamedTuple):
    """In the place of a projection: some of its outputs, for an input whose ranks are there."""

    ranks: Tensor
    product: OfRanks
    start: int
    stop: int

    def __call__(self, x: Tensor) -> Tensor:
        return self.product.outputs(self.ranks, self.start, self.stop)


def _same(x: Tensor) -> Tensor:
    return x


def _agree(attention: Any, compute: Any, given: dict[str, Any]) -> bool:
    try:
        expected = compute(**given)[0]
        found = _attended(attention, compute, given, 1)
        found = found if attention.last is None else getattr(attention, attention.last)(found)
        return bool((found - expected).norm() <= CLOSE * expected.norm())
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False


def _named(attention: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name."""
    names = list(signature(attention.native.forward).parameters)[1:]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _is_plain(given: dict[str, Any]) -> bool:
    """Whether there is nothing but hidden states, a mask and positions: no cache, no other's states."""
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


def _of_heads(mask: Tensor | None, start: int, stop: int, heads: int) -> Tensor | None:
    """Of a mask [B, H, T, T]; of all heads where H is 1."""
    if mask is None or mask.dim() != 4 or mask.shape[1] == 1:
        return mask
    group = mask.shape[1] // heads
    return mask[:, start * group : stop * group]
