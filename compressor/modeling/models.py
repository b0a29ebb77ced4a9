"""Structured models where the package is installed: those of `modeling_blr.py`, with kernels. The layers
are those of `layers.py`; blocks compute in slices, norms, gates and rotations are one kernel, caches
hold ranks, factors are cut over processes, and exports run in the decoding runtime or as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers import initialization as init
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from blr.compressor.modeling.experts import KernelExperts
from blr.compressor.modeling.exported import model_class as exported_class
from blr.compressor.modeling.float8 import prepare_float8, share_rows
from blr.compressor.modeling.fused import fuse, fuse_activations
from blr.compressor.modeling.layers import KernelLinear, make_layer, prepare_layers
from blr.compressor.modeling.modeling_blr import PREFIX, Entry, StructuredConfig, StructuredModel
from blr.compressor.modeling.modeling_blr import replace_layers as put_layers
from blr.compressor.modeling.rank_attention import keep_ranks
from blr.compressor.modeling.rank_cache import rank_cache
from blr.compressor.modeling.settings import CACHE_NAMES, caches_ranks
from blr.compressor.modeling.shared_input import share_siblings
from blr.compressor.modeling.slices import bound_blocks, bound_norms, part_heads
from blr.compressor.modeling.splitting import (
    freeze_parts,
    pair_plan,
    split_layers,
    split_plan,
    table_plan,
)

NAME = "blr"


# Transformers then knows ``attn_implementation="blr"``
AttentionInterface.register(NAME, sdpa_attention_forward)
AttentionMaskInterface.register(NAME, sdpa_mask)


class KernelModel(StructuredModel):
    """Mixin of models whose layers run kernels, fast and within little memory."""

    make_layer = staticmethod(make_layer)
    make_experts = KernelExperts

    def place_layers(self) -> None:
        """Put the layers in their places, then equip the modules around them."""
        super().place_layers()
        share_rows(self)
        bound_norms(self)
        fuse(self)
        fuse_activations(self)
        part_heads(self)
        bound_blocks(self)
        if caches_ranks(self.config) is not None:
            keep_ranks(self)

    def post_init(self) -> None:
        """Replace the layers; pairs of linear layers get a plan of tensor parallelism."""
        super().post_init()
        if (self.config.blr or {}).get("pairs"):
            self._tp_plan = {**table_plan(self), **pair_plan(self)}

    def initialize_weights(self) -> None:
        initialize_packed(self)  # first: then transformers marks all layers
        super().initialize_weights()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follow a move or cast: group the layers on a GPU that read one input."""
        super()._apply(fn, recurse)
        share_siblings(self)
        return self

    def _prepare_cache_for_generation(
        self,
        generation_config: object,
        model_kwargs: dict[str, object],
        *rest: object,
        **options: object,
    ) -> None:
        """Make a cache as transformers does; it holds ranks if the checkpoint says so."""
        made = [name for name in CACHE_NAMES if model_kwargs.get(name) is None]  # not by whoever calls
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *rest, **options)
        if (kind := caches_ranks(self.config)) is None:
            return
        for name in made:
            if model_kwargs.get(name) is not None:
                model_kwargs[name] = rank_cache(model_kwargs[name], self.config, kind)

    @classmethod
    def maybe_distribute_model(
        cls, model: KernelModel, distributed_config: object, *rest: object, **options: object
    ) -> KernelModel:
        """Distribute a model by its native plan, with factors cut in place of weights."""
        size = getattr(distributed_config, "tp_size", None) or 1
        if size > 1:
            plan = split_plan(model, size)
            model._tp_plan = {**table_plan(model), **plan}
            if plan:
                split_layers(model)
        return super().maybe_distribute_model(model, distributed_config, *rest, **options)

    def finish_loading(self) -> None:
        prepare_layers(self)
        freeze_parts(self)
        prepare_float8(self)
        share_siblings(self)


def replace_layers(model: nn.Module, entries: dict[str, Entry]) -> None:
    """Replace the modules of any model that `entries` names by layers with kernels."""
    put_layers(model, entries, make_layer)
    share_rows(model)


def model_class(name: str) -> type[Any]:
    """The class ``Blr<Native>`` of exports and of what `blr compress` writes, made once."""
    return exported_class(name, KernelModel)


KernelModel.make_model = StructuredConfig.make_model = staticmethod(model_class)


def __getattr__(name: str) -> type:
    if not name.startswith(PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return model_class(name)


MIXER, SHIFT, BYTE = 2654435761, 16, 255  # of a multiplicative hash (Knuth)
SMALL = 191  # the bits of a byte but the one that makes a float8 2 or more, or no number
PART = 0.5  # of unit gain: a weight and its correction are summed, and neither is trained to less
FLOAT8 = 0.6  # root mean square of such numbers


@torch.no_grad()
def initialize_packed(model: nn.Module) -> None:
    """Give packed factors first values, the same each time, where transformers marks none as given."""
    for layer in model.modules():
        if not isinstance(layer, KernelLinear) or getattr(layer, "_is_hf_initialized", False):
            continue
        for factor in (factor for factor in layer.held.values() if factor.bits):
            packed, scale = layer.stored(factor)
            if packed.is_meta or getattr(packed, "_is_hf_initialized", False):
                continue
            fp8, places = factor.storage == "float8", torch.arange(packed.numel(), device=packed.device)
            numbers = (places * MIXER >> SHIFT) & (SMALL if fp8 else BYTE)
            levels = FLOAT8 if fp8 else 2**factor.bits / 12**0.5
            init.copy_(packed, numbers.to(torch.uint8).view(packed.dtype).view(packed.shape))
            init.copy_(scale, torch.full_like(scale, PART * factor.unit / levels))
