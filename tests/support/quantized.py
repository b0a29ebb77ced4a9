"""Quantizes the layers of a model in memory to int8 and int4, as exports store them, with their errors.

Quantized are U and V of low-rank, Monarch and BLAST layers, the Kronecker-sparse factors, and dense
weights; not the S of BLAST, biases, norms and embeddings. The output head is left by `quantize_model`
and has a kind of its own (`quantize_head`). The format is that of
`blr.kernels.decode.quantized.reference`, the modules are those of `blr.compressor.modeling.layers`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from blr.compressor.base.errors import NumericsError, UsageError
from blr.compressor.fitting.rounding import quantize_dense, quantize_factors
from blr.compressor.modeling.layers import KernelLinear, StructuredLinear, layer_of
from blr.compressor.structures.specs import DenseSpec, QuantizedSpec


def quantize_layer(layer: nn.Module, bits: int) -> tuple[KernelLinear, float]:
    """The quantized module in place of a structured layer, an nn.Linear or a Conv1D, and its error.
    Scales and what is not quantized keep the layer's dtype and device."""
    bias = getattr(layer, "bias", None)
    if isinstance(layer, StructuredLinear):
        factors = {name: layer.factor(name).detach() for name in layer.held}
        found = quantize_factors(quantized_spec(layer, bits), factors)
    else:
        found = quantize_dense(_dense_weight(layer), quantized_spec(layer, bits))
    some = next(iter(layer.parameters()))
    with torch.device("meta"):
        new: KernelLinear = layer_of(quantized_spec(layer, bits), bias is not None).to(some.dtype)
    state = found.tensors if bias is None else {**found.tensors, "bias": bias.detach()}
    new.load_state_dict(state, assign=True)
    return new.requires_grad_(False).train(layer.training), found.error


def quantize_model(
    model: nn.Module, bits: int, *, dense: bool = True, skip: Iterable[str] = ()
) -> dict[str, float]:
    """Quantize the layers of a transformers model in place, one at a time.

    Args:
        dense: dense weights as well as structured layers. skip: modules to leave, by name.

    Returns the error of every quantized module.
    """
    return {name: _replace(model, name, bits) for name in quantizable(model, dense=dense, skip=skip)}


def quantize_head(model: nn.Module, bits: int) -> dict[str, float]:
    """Quantize the output head of a transformers model in place.

    A head that is the input embedding gets weights of its own; the embedding stays as it is, and the
    model's configuration ties them no more.

    Returns as `quantize_model`. Raises UsageError for a model without a linear head to quantize.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    kinds = StructuredLinear, nn.Linear
    if not isinstance(head, kinds) or _is_packed(head):
        found = "none" if head is None else type(head).__name__
        raise UsageError(
            f"the output head of {type(model).__name__} is {found}: expected a linear layer with"
            " weights that are not quantized yet; leave the head as it is"
        )
    name = next(name for name, module in model.named_modules() if module is head)
    errors = {name: _replace(model, name, bits)}
    config: Any = model.config
    if getattr(config, "tie_word_embeddings", False):
        config.tie_word_embeddings = False
        getattr(model, "all_tied_weights_keys", {}).pop(f"{name}.weight", None)
    return errors


def _replace(model: nn.Module, name: str, bits: int) -> float:
    """Quantize the module `name` of `model`; its error."""
    parent, _, child = name.rpartition(".")
    holder = model.get_submodule(parent)
    try:
        new, missed = quantize_layer(getattr(holder, child), bits)
    except NumericsError as error:
        raise NumericsError(f"{name}: {error}") from error
    setattr(holder, child, new)
    return missed


def quantizable(model: nn.Module, *, dense: bool = True, skip: Iterable[str] = ()) -> list[str]:
    """Names of the modules that `quantize_model` replaces: all linear layers but the output head."""
    skip = set(skip)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    kinds = (StructuredLinear, nn.Linear, Conv1D) if dense else (StructuredLinear,)
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, kinds)
        and not _is_packed(module)
        and module is not head
        and name not in skip
    ]


def quantized_spec(layer: nn.Module, bits: int) -> QuantizedSpec:
    """What `quantize_layer` makes of a layer."""
    if isinstance(layer, StructuredLinear):
        return QuantizedSpec(layer.spec, bits)
    outputs, inputs = _dense_weight(layer).shape
    return QuantizedSpec(DenseSpec(inputs, outputs), bits)


def _dense_weight(layer: nn.Module) -> Tensor:
    """W [o, i]."""
    weight = layer.get_parameter("weight").detach()
    return weight.mT if isinstance(layer, Conv1D) else weight


def _is_packed(module: nn.Module) -> bool:
    return isinstance(module, KernelLinear) and module.packing is not None
