"""Structured models: native transformers models whose named layers are structured.

Shipped inside every checkpoint. ``BlrLlamaForCausalLM`` is ``LlamaForCausalLM`` that swaps
the layers listed in ``config.blr`` before its weights are loaded. Classes are made on demand
(`model_class`), for any architecture that transformers has.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from blr.compressor.modeling.attention import register_attention
from blr.compressor.modeling.cache_names import NAMES
from blr.compressor.modeling.classes import (
    NestedMixin,
    by_module,
    made_class,
    module_names,
    table_plan,
)
from blr.compressor.modeling.configuration_blr import PREFIX
from blr.compressor.modeling.float8 import prepare_float8
from blr.compressor.modeling.fused import fuse
from blr.compressor.modeling.fused_activation import fuse_activations
from blr.compressor.modeling.head_slices import part_heads
from blr.compressor.modeling.initial import initialize_layers
from blr.compressor.modeling.layers import prepare_layers
from blr.compressor.modeling.pairs import place_pairs
from blr.compressor.modeling.rank_attention import keep_ranks
from blr.compressor.modeling.rank_cache import rank_cache
from blr.compressor.modeling.settings import caches_ranks
from blr.compressor.modeling.shared_input import share_siblings
from blr.compressor.modeling.slices import bound_blocks, bound_norms
from blr.compressor.modeling.splitting import freeze_parts, split_layers, split_plan
from blr.compressor.modeling.table import replace_layers
from blr.kernels.fp8.reference import is_number

register_attention()


class StructuredModelMixin(NestedMixin):
    """Swaps the structured layers in, in the last step of a model's construction.

    `post_init` is where every transformers model ends its `__init__`, on the meta device while
    loading: the layers must be in place before it collects tied weights and parallel plans.
    """

    def post_init(self: Any) -> None:
        native: Any = super()
        if self.is_outermost:
            self._place_layers()
            bound_norms(self)
            fuse(self)
            fuse_activations(self)
            part_heads(self)
            bound_blocks(self)
            if caches_ranks(self.config) is not None:
                keep_ranks(self)
        native.post_init()
        if self.is_outermost:
            self._tp_plan = dict[
                str, str
            ]()  # until it is distributed: nobody else can split it by the native one

    def initialize_weights(self: Any) -> None:
        """As of transformers, and what the structured layers hold."""
        initialize_layers(self)  # first: then transformers marks all layers
        native: Any = super()
        native.initialize_weights()

    def _place_layers(self: Any) -> None:
        replace_layers(self, by_module(self, (self.config.blr or {}).get("layers", {})))
        place_pairs(self)

    def _apply(self: Any, fn: Any, recurse: bool = True) -> Any:
        """What every move and cast goes through; layers of one input that lie on a GPU share it."""
        native: Any = super()
        native._apply(fn, recurse)
        share_siblings(self)
        return self

    def save_pretrained(self: Any, *arguments: Any, **options: Any) -> Any:
        """As of transformers, with the layers as they are: a merged adapter has raised ranks, and a
        model of another class than was written may have no head."""
        table, modules = (self.config.blr or {}).get("layers", {}), dict(self.named_modules())
        for name, module in module_names(self, table).items():
            layer = modules.get(module)
            if layer is None:
                del table[name]
            elif hasattr(layer, "described"):
                table[name] = layer.described.to_dict()
        native: Any = super()
        return native.save_pretrained(*arguments, **options)

    def _prepare_cache_for_generation(
        self: Any, generation_config: Any, model_kwargs: dict[str, Any], *rest: Any, **options: Any
    ) -> Any:
        """As of transformers; the cache that it makes holds ranks if the checkpoint says so."""
        native: Any = super()
        made = [name for name in NAMES if model_kwargs.get(name) is None]  # not by whoever calls
        native._prepare_cache_for_generation(generation_config, model_kwargs, *rest, **options)
        if (kind := caches_ranks(self.config)) is None:
            return
        for name in made:
            if model_kwargs.get(name) is not None:
                model_kwargs[name] = rank_cache(model_kwargs[name], self.config, kind)

    def _get_dtype_plan(self: Any, dtype: Any) -> dict[str, Any]:
        """As of transformers, which keeps some modules in float32 (T5's `wo` beside float16): what is
        packed in them, or says where outputs go, stays of its own type."""
        native: Any = super()
        plan = native._get_dtype_plan(dtype)
        held = {n: t.dtype for n, t in self.named_buffers() if not is_number(t)} if plan else {}
        return {**held, **plan}

    @classmethod
    def maybe_distribute_model(
        cls: Any, model: Any, distributed_config: Any, *rest: Any, **options: Any
    ) -> Any:
        """As of transformers, with factors cut where the native plan cuts weights."""
        size = getattr(distributed_config, "tp_size", None) or 1
        if size > 1:
            plan = split_plan(model, size)
            model._tp_plan = {**table_plan(model), **plan}
            if plan:
                split_layers(model)
        native: Any = super()
        return native.maybe_distribute_model(model, distributed_config, *rest, **options)

    @classmethod
    def from_pretrained(
        cls: Any, *arguments: Any, output_loading_info: bool = False, **options: Any
    ) -> Any:
        """As of transformers; weights that were loaded onto a GPU are given their kernel layout.

        Raises ValueError when tensors are missing, left over or of another shape (unless that is to be
        ignored), which transformers would replace by random numbers; who asks for the loading info
        judges it himself.
        """
        native: Any = super()
        model, info = native.from_pretrained(*arguments, output_loading_info=True, **options)
        prepare_layers(model)
        freeze_parts(model)
        prepare_float8(model)
        share_siblings(model)
        if output_loading_info:
            return model, info
        if options.get("ignore_mismatched_sizes"):
            info = {**info, "mismatched_keys": ()}
        if found := misloaded(model, info):
            raise ValueError(
                f"{found}; expected the tensors that config.json describes, copy them again"
            )
        return model


def misloaded(model: Any, info: dict[str, Any]) -> str:
    """The tensors that a loaded model lacks or that found no place in it; empty if there are none.

    A model of another class than its configuration names may lack a head or leave one over: counted
    are then the tensors that the named class has.
    """
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        found = {key if isinstance(key, str) else key[0] for key in info.get(kind) or ()}
        if found and kind != "mismatched_keys":
            found = _accountable(model, found, kind == "missing_keys")
        if found:
            names = ", ".join(repr(name) for name in sorted(found)[:3])
            return f"{kind.replace('_', ' ')} {names} ({len(found)} in all)"
    return ""


def _accountable(model: Any, keys: set[str], missing: bool) -> set[str]:
    """Those of `keys` that the class which the configuration names has (if `missing`) or lacks."""
    name = next(iter(getattr(model.config, "architectures", None) or ()), type(model).__name__)
    known = hasattr(transformers, name.removeprefix(PREFIX))
    if name == type(model).__name__ or not known:
        return keys
    named = type(model).make(name) if name.startswith(PREFIX) else getattr(transformers, name)
    with torch.device("meta"):
        own = {_bare(named, key) for key in named(model.config).state_dict()}
    return {key for key in keys if (_bare(named, key) in own) == missing}


def _bare(cls: Any, key: str) -> str:
    return key.removeprefix(f"{cls.base_model_prefix}.")


def model_class(name: str) -> type[Any]:
    """The model class ``Blr<Native>`` with the layers that ``config.blr`` describes."""
    return made_class(name, StructuredModelMixin, __name__)


def __getattr__(name: str) -> type[Any]:
    if not name.startswith(PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return model_class(name)
