"""The models that `blr bench prefill` times: decoders to their first token, encoders to their output."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from blr.compressor.bench.float8 import float8_layer
from blr.compressor.bench.models import (
    STRUCTURES,
    BenchModel,
    Models,
    find_model,
    known,
    prompt,
    structured_table,
)
from blr.compressor.modeling.cuda_graphs import ForwardGraphs, captured
from blr.compressor.modeling.extended import Extension
from blr.compressor.modeling.float8 import prepare_float8
from blr.compressor.modeling.float8_makers import BLOCK, share_rows
from blr.compressor.modeling.fused import fuse
from blr.compressor.modeling.layers import StructuredLinear, prepare_layers
from blr.compressor.modeling.masks import unmasked
from blr.compressor.modeling.shared_input import share_siblings
from blr.compressor.modeling.table import replace_layers
from blr.compressor.structures.specs import DenseSpec
from blr.kernels.common.available import kernels_on

FP8 = "fp8"
COMPILED, GRAPH, RUNTIME = "compiled", "graph", "runtime"
CHECKED = 128  # tokens of the check of float8 in decoders


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
        if arm not in self.built:
            structure = arm.removesuffix(f"-{FP8}")
            plain = arm == structure
            self.built[arm] = self.plain(structure) if plain else to_float8(self.fresh(structure))
        return self.built[arm]

    def plain(self, structure: str) -> Any:
        """A model in bfloat16."""
        return self.models.get(structure)

    def fresh(self, structure: str) -> Any:
        """The same, to be changed."""
        return self.models.fresh(structure)

    def inputs(self, model: Any, tokens: int) -> Tensor:
        """What is timed."""
        return prompt(self.model.folder, model, self.batch, tokens)

    def checked(self, x: Tensor) -> Tensor:
        """What float8 is checked by: less, where that is slow."""
        return x[:, :CHECKED]

    def layers(self, model: Any) -> Any:
        """Those that are compiled, one compilation for all."""
        return model.get_decoder().layers

    def output(self, model: Any, x: Tensor, way: str = "") -> Tensor:
        """What is compared, in float32; `way`: eager, layers compiled, these captured in a graph, or as
        the runtime of an export takes prompts."""
        for layer in self.layers(model):
            layer._compiled_call_impl = self._compiled(layer) if way not in ("", RUNTIME) else None
        run: Any = {GRAPH: self._replayed, RUNTIME: self._decoded}.get(way, self.compute)
        found: Tensor = run(model, x)
        return found

    def _compiled(self, layer: Any) -> Any:
        """What a call of a layer is when it is compiled."""
        if id(layer) not in self.calls:
            layer.compile(dynamic=False)
            self.calls[id(layer)] = layer._compiled_call_impl
        return self.calls[id(layer)]

    def _replayed(self, model: Any, x: Tensor) -> Tensor:
        """`compute` by the model's CUDA graph for such inputs. Raises RuntimeError if it has none."""
        graphs = self.graphs.setdefault(id(model), ForwardGraphs(captured))
        found: Tensor = graphs.run(lambda x: self.compute(model, x), ((x,), {}), inside=unmasked)
        if graphs.failed:
            raise RuntimeError("its pass cannot be captured as a CUDA graph")
        return found

    def _decoded(self, model: Any, x: Tensor) -> Tensor:
        """`compute` by a decoder. Raises DecoderError where there can be none."""
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

    def compute(self, model: Any, x: Tensor) -> Tensor:
        """The logits [B, vocab] of the token after `x`; x: ids, or embedded."""
        found: Tensor = model(**_given(x), use_cache=False, logits_to_keep=1).logits[:, -1].float()
        return found

    def dequantized(self, model: Any, x: Tensor) -> Tensor:
        """The same with weights of float8 dequantized, as wherever a gradient is asked for."""
        given = x if x.is_floating_point() else model.get_input_embeddings()(x)
        with torch.enable_grad():
            return self.compute(model, given.detach().requires_grad_()).detach()


class EncoderModels(PrefillModels):
    """The same of an encoder: of `batch` texts of so many tokens, or images."""

    def __post_init__(self) -> None:
        self.known = known_encoders()[self.model.name]

    def plain(self, structure: str) -> Any:
        return self.fresh(structure)

    def fresh(self, structure: str) -> Any:
        import transformers

        given = dict(self.model.settings)
        if not self.images:
            given["max_position_embeddings"] = self.context
        torch.manual_seed(0)
        with torch.device(self.device):
            config = getattr(transformers, self.known["config"])(**given)
            model = getattr(transformers, self.known["model"])(config).to(self.dtype).eval()
            if structure in STRUCTURES:
                inside = {name: module for name, module in model.named_modules() if BLOCK.match(name)}
                replace_layers(model, structured_table(inside, structure, self.cf, self.blocks))
                fuse(model)
        for module in model.requires_grad_(False).modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0, module.in_features**-0.5)
        prepare_layers(model)
        share_siblings(model)
        return model

    @property
    def images(self) -> bool:
        """Whether inputs are images."""
        return "image_size" in self.model.settings

    def inputs(self, model: Any, tokens: int) -> Tensor:
        if not self.images:
            return prompt(None, model, self.batch, tokens)
        size, generator = model.config.image_size, torch.Generator().manual_seed(0)
        pixels = torch.randn(self.batch, 3, size, size, generator=generator)
        return pixels.to(self.device, self.dtype)

    def checked(self, x: Tensor) -> Tensor:
        return x

    def layers(self, model: Any) -> Any:
        return next(m for m in model.modules() if isinstance(m, nn.ModuleList))

    def compute(self, model: Any, x: Tensor) -> Tensor:
        given = {"pixel_values": x} if self.images else _given(x)
        found: Tensor = model(**given).last_hidden_state.float()
        return found


def _given(x: Tensor) -> dict[str, Tensor]:
    return {"inputs_embeds" if x.is_floating_point() else "input_ids": x}


def fused(model: Any) -> Any:
    """The model, or of a plain dense one the same weights in modules that are fused, as exports are."""
    if any(isinstance(module, Extension) for module in model.modules()):
        return model
    made = deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
    fuse(made)
    return made


def known_encoders() -> dict[str, dict[str, Any]]:
    """Classes and settings of configs/bench-encoders.yaml by name."""
    return known("bench-encoders.yaml")


def find_any(name: str) -> BenchModel:
    """A decoder or an encoder by name, or a folder. Raises UsageError listing the known names."""
    if name in known_encoders():
        return BenchModel(name, known_encoders()[name]["settings"])
    return find_model(name, *known_encoders())


def to_float8(model: Any) -> Any:
    """`model` with all linear layers but the head in float8, in place."""
    head = model.get_output_embeddings() if hasattr(model, "lm_head") else None
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
