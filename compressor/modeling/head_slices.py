"""Attention some heads at a time, of queries, keys and values that are made from their ranks.

For a long sequence these three are the widest tensors of a block; their ranks take half of that or
less. The attention's own `forward` is called for every few heads, with functions in the place of its
projections that give these heads alone."""

from functools import partial
from inspect import signature

from torch import Tensor, nn
from transformers import PreTrainedConfig

from blr.compressor.modeling.extended import Extension, extend, same, with_children
from blr.compressor.modeling.ranks import OfRanks, RankRequest, ranked
from blr.compressor.modeling.settings import warn_once
from blr.compressor.modeling.slices import is_hooked, limit_of
from blr.kernels.common.transient import chunks

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q_lin", "k_lin", "v_lin"))
LAST = ("o_proj", "out_proj", "out_lin")  # what families call the layer behind the heads
WIDTHS = ("head_dim", "attention_head_size")
KNOWN = {"hidden_states", "attention_mask", "position_embeddings", "position_ids", "cache_position"}
TRIED = 4  # tokens that tell whether heads can be computed apart
CLOSE = 2e-2  # of their norm, in any dtype

Given = dict[str, object]  # arguments of an attention by name


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
    """Whether an attention is given nothing but hidden states, a mask and positions: no cache, no states
    of an encoder."""
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
