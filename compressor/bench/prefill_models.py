"""The models that `blr bench prefill` times, and the ways in which each is run."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from blr.compressor.bench.float8 import float8_layer
from blr.compressor.bench.models import (
    BenchModel,
    Models,
    prompt,
)
from blr.compressor.modeling.cuda_graphs import ForwardGraphs, captured
from blr.compressor.modeling.extended import Extension
from blr.compressor.modeling.float8 import prepare_float8
from blr.compressor.modeling.float8_makers import share_rows
from blr.compressor.modeling.fused import fuse
from blr.compressor.modeling.layers import StructuredLinear
from blr.compressor.modeling.masks import unmasked
from blr.compressor.structures.specs import DenseSpec
from blr.kernels.common.available import kernels_on

FP8 = "fp8"
COMPILED, GRAPH, RUNTIME = "compiled", "graph", "runtime"


@dataclass
class PrefillModels:
    """The arms of one decoder, each made once. batch: sequences of an input. context: their longest."""

    model: BenchModel
    device: torch.device
    dtype: torch.dtype
    context: int
    cf: float
    blocks: int
    batch: int
    built: dict[str, Any] = field(default_factory=dict)
    graphs: dict[int, ForwardGraphs] = field(default_factory=dict)  # by the id of a built model
    decoders: dict[int, Any] = field(default_factory=dict)  # likewise
    calls: dict[int, Any] = field(default_factory=dict)  # of compiled layers, by their id

    def __post_init__(self) -> None:
        self.models = Models(self.model, self.device, self.dtype, self.context + 1, self.cf, self.blocks)

    def get(self, arm: str) -> Any:
        """The model of an arm."""
        structure = arm.removesuffix(f"-{FP8}")
        if arm == structure:
            return self.models.get(structure)
        if arm not in self.built:
            self.built[arm] = to_float8(self.models.fresh(structure))
        return self.built[arm]

    def inputs(self, model: Any, tokens: int) -> Tensor:
        """What is timed."""
        return prompt(self.model.folder, model, self.batch, tokens)

    def output(self, model: Any, x: Tensor, way: str = "") -> Tensor:
        """What is compared, in float32; `way`: eager, layers compiled, these captured in a graph, or as
        the runtime of an export takes prompts."""
        for layer in model.get_decoder().layers:
            layer._compiled_call_impl = self._compiled(layer) if way not in ("", RUNTIME) else None
        run = {GRAPH: self._replayed, RUNTIME: self._decoded}.get(way, first_logits)
        return run(model, x)

    def _compiled(self, layer: Any) -> Any:
        """What a call of a layer is when it is compiled, one compilation for all."""
        if id(layer) not in self.calls:
            layer.compile(dynamic=False)
            self.calls[id(layer)] = layer._compiled_call_impl
        return self.calls[id(layer)]

    def _replayed(self, model: Any, x: Tensor) -> Tensor:
        """By the model's CUDA graph for such inputs. Raises RuntimeError if it has none."""
        graphs = self.graphs.setdefault(id(model), ForwardGraphs(captured))
        found: Tensor = graphs.run(lambda x: first_logits(model, x), ((x,), {}), inside=unmasked)
        if graphs.failed:
            raise RuntimeError("its pass cannot be captured as a CUDA graph")
        return found

    def _decoded(self, model: Any, x: Tensor) -> Tensor:
        """By a decoder. Raises DecoderError where there can be none."""
        from blr.compressor.runtime.decoder import Decoder

        if id(model) not in self.decoders:
            ops = "triton" if kernels_on(self.device) else "torch"
            made = Decoder(fused(model), batch=self.batch, context=self.context + 1, ops=ops)
            self.decoders[id(model)] = made
        found: Tensor = self.decoders[id(model)].prefill(x)
        return found

    def forget(self) -> None:
        """Free what was made for prompts of some length."""
        self.graphs.clear()
        self.decoders.clear()


def first_logits(model: Any, x: Tensor) -> Tensor:
    """The logits [B, vocab] of the token after `x`; x: ids, or embedded."""
    name = "inputs_embeds" if x.is_floating_point() else "input_ids"
    found: Tensor = model(**{name: x}, use_cache=False, logits_to_keep=1).logits[:, -1].float()
    return found


def dequantized_logits(model: Any, x: Tensor) -> Tensor:
    """The same with weights of float8 dequantized, as wherever a gradient is asked for."""
    with torch.enable_grad():
        return first_logits(model, model.get_input_embeddings()(x).detach().requires_grad_()).detach()


def fused(model: Any) -> Any:
    """The model, or of a plain dense one the same weights in modules that are fused, as exports are."""
    if any(isinstance(module, Extension) for module in model.modules()):
        return model
    made = deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
    fuse(made)
    return made


def to_float8(model: Any) -> Any:
    """`model` with all linear layers but the head in float8, in place."""
    head = model.get_output_embeddings()
    for name, layer in list(model.named_modules()):
        if isinstance(layer, StructuredLinear) or (type(layer) is nn.Linear and layer is not head):
            parent, _, child = name.rpartition(".")
            plain = getattr(layer, "spec", None) or DenseSpec(layer.in_features, layer.out_features)
            factors = {factor: getattr(layer, factor).detach() for factor in plain.shapes()}
            bias = None if layer.bias is None else layer.bias.detach()
            setattr(model.get_submodule(parent), child, float8_layer(plain, factors, bias))
    share_rows(model)
    prepare_float8(model)
    return model
