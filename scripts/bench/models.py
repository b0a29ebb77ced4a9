"""Whole models to time: random weights of a published shape in every structure, or a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blr.bench.layer_problem import summed
from blr.bench.shapes import LayerShape, specs_for
from blr.compressor.base.errors import CapabilityError, UsageError
from blr.compressor.fitting.rounding import quantize_dense, quantize_factors
from blr.compressor.modeling.float8 import prepare_float8, share_rows
from blr.compressor.modeling.fused import fuse
from blr.compressor.modeling.layers import StructuredLinear, layer_of
from blr.compressor.modeling.models import replace_layers
from blr.compressor.modeling.shared_input import share_siblings
from blr.compressor.recipe.architectures import read_config_table
from blr.compressor.structures.packing import pack_factor
from blr.compressor.structures.specs import CorrectedSpec, DenseSpec, LowRankSpec, QuantizedSpec, Spec
from blr.kernels.common.orders import order_of
from blr.kernels.decode.quantized.formats import BITS, GROUPS, ROW, grid_of
from blr.kernels.decode.quantized.reference import pack, values_of

STRUCTURES = {"lowrank": "svd", "monarch": "monarch", "blast": "blast"}
FP8 = "fp8"
OWN = "own"  # a checkpoint as it is
CORRECTED = "corrected"  # dense weights in few bits and a low-rank correction
FEW_BITS = {f"int{bits}": bits for bits in BITS}
FACTOR_BITS = 4  # of corrections
CPU_WIDTH = 512  # hidden size of the largest random model that a CPU is asked to run
PROMPT = (
    "The wind had dropped before sunrise, and the harbour lay quiet under a thin white mist. Two men "
    "carried the nets down to the boat while the third counted the floats and wrote the number in a "
    "small black book. "
)


@dataclass(frozen=True)
class BenchModel:
    """A named shape (`settings` of a configuration) or a checkpoint (`folder`)."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None


def known_models() -> dict[str, dict[str, Any]]:
    """Settings of a LlamaConfig by name."""
    found: dict[str, dict[str, Any]] = read_config_table("bench-decode.yaml")
    return found


def find_models(names: Sequence[str], device: torch.device) -> list[BenchModel]:
    """Models by name or folder. Raises UsageError as `find_model`, CapabilityError as `refuse_large`."""
    found = [find_model(name) for name in names]
    widths = {model.name: model.settings.get("hidden_size", 0) for model in found}
    refuse_large(device, widths, "time --models pico or a checkpoint folder")
    return found


def find_model(name: str) -> BenchModel:
    """A model by name or folder. Raises UsageError listing the known names."""
    if name in known_models():
        return BenchModel(name, known_models()[name])
    folder = Path(name)
    if (folder / "config.json").is_file():
        return BenchModel(folder.name, folder=folder)
    names = ", ".join(known_models())
    raise UsageError(f"model {name!r} is neither one of {names} nor a folder with config.json; give one")


def refuse_large(device: torch.device, widths: dict[str, int], instead: str) -> None:
    """Raise CapabilityError for the first model by name and hidden size that a CPU would take hours for;
    `instead` is what to do there."""
    large = [name for name, width in widths.items() if width > CPU_WIDTH]
    if device.type == "cpu" and large:
        raise CapabilityError(
            f"{large[0]} on the CPU would take hours: expected a CUDA GPU; {instead} here"
        )


@dataclass
class Models:
    """Builds the variants of one model and keeps them, their embeddings shared.

    Args:
        context: positions that the models must have. cf: compression factor of structured layers.
        blocks: of Monarch and BLAST. rank: of the corrections of weights in few bits. quantized variants
            include the dense weights; their head is quantized only if it is asked for.
    """

    model: BenchModel
    device: torch.device
    dtype: torch.dtype
    context: int
    cf: float = 2.0
    blocks: int = 16
    rank: int = 16
    built: dict[tuple[str, str, str], Any] = field(default_factory=dict)
    ends: tuple[nn.Module, nn.Module] | None = None  # embedding and head of all random models

    def get(self, structure: str, kind: str = "", head: str = "") -> Any:
        """The model in a structure ("dense", "lowrank", …, "own") and kind ("", "fp8", "int8", …).
        `head`: the kind of the output head."""
        key = (structure, kind, head)
        if key not in self.built:
            self.built[key] = self._build(structure, kind, head)
        return self.built[key]

    def _build(self, structure: str, kind: str, head: str) -> Any:
        model = self._loaded() if structure == OWN else self._random(structure)
        if structure == CORRECTED:
            replace_linears(model, partial(corrected_layer, bits=FEW_BITS[kind], rank=self.rank))
        elif kind == FP8:
            to_float8(model)
        elif kind:
            make = rounded_layer if structure == OWN else drawn_layer
            replace_linears(model, partial(make, bits=FEW_BITS[kind]))
        if head:
            round_head(model, FEW_BITS[head])
        return model

    def _loaded(self) -> Any:
        from blr.compressor.loading.load import load_model

        assert self.model.folder is not None  # `own` arms are of checkpoints alone
        dtype = str(self.dtype).removeprefix("torch.")
        return load_model(
            self.model.folder, "AutoModelForCausalLM", dtype=dtype, device=str(self.device)
        )

    def _empty(self) -> Any:
        """The dense model on the meta device."""
        from transformers import LlamaConfig, LlamaForCausalLM

        with torch.device("meta"):
            config = LlamaConfig(**self.model.settings, max_position_embeddings=self.context)
            model: Any = LlamaForCausalLM(config)  # whose `to` is annotated as taking no dtype
            return model.to(self.dtype).eval()

    def _random(self, structure: str) -> Any:
        model = self._empty()
        if structure in STRUCTURES:
            with torch.device("meta"):
                replace_layers(model, self._table(model, STRUCTURES[structure]))
            fuse(model)
        if self.ends is not None:
            model.set_input_embeddings(self.ends[0])
            model.set_output_embeddings(self.ends[1])
        fill(model, self.device)
        share_siblings(model)
        self.ends = model.get_input_embeddings(), model.get_output_embeddings()
        return model

    def _table(self, model: Any, structure: str) -> dict[str, dict[str, Any]]:
        """Specs of all linear layers but the head."""
        table = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and module is not model.lm_head:
                layer = LayerShape("", name, module.in_features, module.out_features, self.cf, {})
                if found := specs_for(layer, [structure], [self.blocks]):
                    table[name] = found[0].to_dict()
        return table


def fill(model: Any, device: torch.device) -> None:
    """Allocate what is on the meta device and fill it: weights with unit gain, gains with 1."""
    for module in list(model.modules()):
        if type(module).__name__.endswith("RotaryEmbedding"):
            continue
        for name, tensor in list(module._parameters.items()):
            if tensor is not None and tensor.is_meta:
                stored = _drawn(module, name, tensor, device)
                module._parameters[name] = nn.Parameter(stored, requires_grad=False)
    model.tie_weights()
    base = model.get_decoder()
    base.rotary_emb = type(base.rotary_emb)(config=model.config).to(device)


def _drawn(module: nn.Module, name: str, tensor: Tensor, device: torch.device) -> Tensor:
    """A parameter, in kernel layout if it is a structured factor."""
    if isinstance(module, StructuredLinear):
        deviation, axes = summed(name, tensor.shape) ** -0.5, order_of(name, tensor.dim())
        made = torch.empty_permuted(tensor.shape, axes, dtype=tensor.dtype, device=device)
        return made.normal_(0, deviation)
    made = torch.empty_like(tensor, device=device)
    if tensor.dim() == 1:
        return made.fill_(1.0)
    return made.normal_(0, 1.0 if isinstance(module, nn.Embedding) else tensor.shape[-1] ** -0.5)


def replace_linears(model: Any, make: Callable[[Any], nn.Module]) -> None:
    """Put what `make` makes of each linear layer but the head, and but those in few bits, into its
    place."""
    head = model.get_output_embeddings()
    for name, layer in list(model.named_modules()):
        plain = type(layer) is nn.Linear or (
            isinstance(layer, StructuredLinear) and layer.packing is None
        )
        if plain and layer is not head:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, make(layer))


def rounded_layer(layer: object, bits: int) -> nn.Module:
    """The layer with its factors, or the weight of an nn.Linear, rounded to `bits`."""
    plain, factors = factors_of(layer)
    spec = QuantizedSpec(plain, bits, curved=False)
    if "weight" in factors:
        return filled_layer(layer, spec, quantize_dense(factors["weight"], spec).tensors)
    return filled_layer(layer, spec, quantize_factors(spec, factors).tensors)


def round_head(model: Any, bits: int) -> None:
    """Round the output head to `bits`; one that is the input embedding gets weights of its own."""
    name = next(n for n, module in model.named_modules() if module is model.get_output_embeddings())
    model.set_output_embeddings(rounded_layer(model.get_output_embeddings(), bits))
    model.config.tie_word_embeddings = False
    model.all_tied_weights_keys.pop(f"{name}.weight", None)


def factors_of(layer: Any) -> tuple[Spec, dict[str, Tensor]]:
    """The spec of a structured layer or an nn.Linear, and its factors by name."""
    if isinstance(layer, StructuredLinear):
        return layer.spec, {name: layer.factor(name).detach() for name in layer.held}
    spec = DenseSpec(layer.in_features, layer.out_features)
    return spec, {"weight": layer.weight.detach()}


def filled_layer(layer: Any, spec: Spec, tensors: dict[str, Tensor]) -> Any:
    """The layer of `spec` with these tensors in the place of `layer`."""
    with torch.device("meta"):
        made = layer_of(spec, layer.bias is not None).to(next(iter(layer.parameters())).dtype)
    bias = {} if layer.bias is None else {"bias": layer.bias.detach()}
    made.load_state_dict(tensors | bias, assign=True)
    return made.requires_grad_(False).eval()


def drawn_layer(layer: Any, bits: int) -> nn.Module:
    """Random weights of `bits` in the place of a layer, as large as if they had been rounded: to round
    those of an 8B takes a GPU half a minute. Layers with other factors than packed ones are rounded."""
    plain, factors = factors_of(layer)
    spec = QuantizedSpec(plain, bits, curved=False)
    tensors = drawn_tensors(spec, next(iter(factors.values())))
    return rounded_layer(layer, bits) if tensors is None else filled_layer(layer, spec, tensors)


def corrected_layer(layer: Any, bits: int, rank: int) -> nn.Module:
    """Random weights in `bits` in the place of an nn.Linear, beside them a random correction of `rank`
    in int4, as large as the error. For timing: what is corrected is no better."""
    outputs, inputs = layer.weight.shape
    structure = LowRankSpec(inputs, outputs, min(rank, inputs, outputs))
    base = QuantizedSpec(DenseSpec(inputs, outputs), bits, curved=False)
    spec = CorrectedSpec(base, QuantizedSpec(structure, FACTOR_BITS, tiled=True))
    tensors = drawn_tensors(spec, layer.weight)
    assert tensors is not None
    tensors["correction.U_scale"] *= 0.1
    return filled_layer(layer, spec, tensors)


def drawn_tensors(spec: Spec, like: Tensor) -> dict[str, Tensor] | None:
    """What a layer of `spec` stores, with random levels and equal scales, on the device of `like` and
    in its dtype; None if not all of it is packed."""
    with torch.device("meta"):
        made = layer_of(spec, False)
    found = dict[str, Tensor]()
    for prefix, module in made.named_modules():
        for factor in getattr(module, "held", {}).values():
            if factor.storage != "integer":
                return None
            dot = f"{prefix}." if prefix else ""
            packed, scale = (f"{dot}{name}" for name in factor.names)
            codes, scales = module.stored(factor)
            grid = grid_of(factor.bits, factor.curved)
            top = 1 << (factor.bits - 1)
            lowest = -top if grid.shift else 1 - top  # as many below zero as above it
            shape = *codes.shape[:-1], codes.shape[-1] * 8 // factor.bits
            levels = torch.randint(lowest, top, shape, dtype=torch.int8, device=like.device)
            found[packed] = pack(levels, factor.bits, GROUPS[-1] if factor.tile else factor.group)
            every = torch.arange(lowest, top, device=like.device)
            size = values_of(every, like.new_ones(1), factor.bits, factor.curved).square().mean().sqrt()
            found[scale] = (factor.unit / size).to(like.dtype).expand(scales.shape).contiguous()
    return found


def float8_of(layer: object) -> nn.Module:
    """The layer with float8 weights, a scale a row, in the place of a structured or dense one."""
    plain, factors = factors_of(layer)
    spec = QuantizedSpec(plain, 8, ROW, fp8=True)
    packed = (pack_factor(spec, name, factor, factor.dtype) for name, factor in factors.items())
    return filled_layer(layer, spec, {n: tensor for found in packed for n, tensor in found.items()})


def to_float8(model: Any) -> Any:
    """`model` with all linear layers but the head in float8, in place."""
    replace_linears(model, float8_of)
    share_rows(model)
    prepare_float8(model)
    return model


def weight_bytes(model: Any) -> int:
    """Bytes of weights that a token reads: everything but an untied input embedding."""
    head = {parameter.data_ptr() for parameter in model.get_output_embeddings().parameters()}
    table = model.get_input_embeddings().weight
    found = {t.data_ptr(): t.nbytes for t in [*model.parameters(), *model.buffers()]}
    if table.data_ptr() not in head:
        del found[table.data_ptr()]
    return sum(found.values())


def cache_bytes(model: Any, slots: int, batch: int, packed: bool = False) -> int:
    """Bytes of keys and values of `slots` tokens in each of `batch` rows, of whole ones or of int8."""
    config = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    element = model.get_input_embeddings().weight.element_size()
    heads = 2 * config.num_hidden_layers * config.num_key_value_heads
    return heads * (width + 4 if packed else width * element) * slots * batch


def prompt(folder: Path | None, model: Any, batch: int, length: int) -> Tensor:
    """[batch, length] token ids: English for a checkpoint with a tokenizer, random otherwise."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (batch, length), generator=generator)
    if folder is not None and (folder / "tokenizer_config.json").is_file():
        from blr.compressor.loading.load import load_tokenizer

        text = load_tokenizer(folder)(PROMPT * (1 + length // 16))["input_ids"]
        words = torch.tensor(text)
        for row in range(batch):  # other places of the text in every row
            ids[row] = words.roll(-7 * row)[:length] if len(words) >= length else ids[row]
    return ids.to(model.device)
