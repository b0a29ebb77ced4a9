"""Whole models to time: random weights of a published shape in every structure, or a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blr.bench.layer_problem import float8_layer, random_order, summed
from blr.bench.shapes import LayerShape, specs_for
from blr.compressor.base.errors import CapabilityError, UsageError
from blr.compressor.exporting.pack import quantizable, quantize_head, quantize_model
from blr.compressor.fitting.rounding import quantize_dense, quantize_factors
from blr.compressor.modeling.float8 import prepare_float8, share_rows
from blr.compressor.modeling.fused import fuse
from blr.compressor.modeling.layers import CorrectedLinear, StructuredLinear
from blr.compressor.modeling.models import replace_layers
from blr.compressor.modeling.shared_input import share_siblings
from blr.compressor.structures.specs import CorrectedSpec, DenseSpec, LowRankSpec, QuantizedSpec
from blr.kernels.common.orders import order_of
from blr.kernels.decode.quantized.formats import BITS

STRUCTURES = {"lowrank": "svd", "pivoted": "pivoted", "monarch": "monarch", "blast": "blast"}
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


@cache
def known(file: str) -> dict[str, dict[str, Any]]:
    """What configs/`file` says of each model by name."""
    from ruamel.yaml import YAML

    text = files("blr.configs").joinpath(file).read_text("utf-8")
    return {str(name): dict(found) for name, found in YAML(typ="safe").load(text).items()}


def known_models() -> dict[str, dict[str, Any]]:
    """Settings of a LlamaConfig by name."""
    return known("bench-decode.yaml")


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

    def get(self, structure: str, kind: str = "", plain: bool = False, head: str = "") -> Any:
        """The model in a structure ("dense", "lowrank", …, "own") and kind ("", "fp8", "int8", …).

        `plain`: with low-rank layers as two nn.Linear each, on the same weights. `head`: the kind of
        the output head.
        """
        key = (structure, "plain" if plain else kind, head)
        if key not in self.built:
            self.built[key] = self._build(structure, kind, plain, head)
        return self.built[key]

    def _build(self, structure: str, kind: str, plain: bool, head: str) -> Any:
        if plain and structure == "lowrank":
            return two_linears(self.get(structure), self._empty())
        model = self._loaded() if structure == OWN else self._random(structure)
        if structure == CORRECTED:
            correct_model(model, FEW_BITS[kind], self.rank)
        elif kind == FP8:
            to_float8(model)
        elif kind:
            quantize_model(model, FEW_BITS[kind])
        if head:
            quantize_head(model, FEW_BITS[head])
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
            share_ends(model, *self.ends)
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


def share_ends(model: Any, embedding: nn.Module, head: nn.Module) -> None:
    """Give `model` the embedding and the head of another."""
    model.set_input_embeddings(embedding)
    model.set_output_embeddings(head)


def fill(model: Any, device: torch.device) -> None:
    """Allocate what is on the meta device and fill it: weights with unit gain, gains with 1, indices in
    some order."""
    for module in list(model.modules()):
        if type(module).__name__.endswith("RotaryEmbedding"):
            continue
        if isinstance(module, StructuredLinear):
            for name, (count,) in module.spec.indices().items():
                setattr(module, name, random_order(count, device))
        for name, tensor in list(module._parameters.items()):
            if tensor is not None and tensor.is_meta:
                std = _deviation(module, name, tensor)
                stored = _allocate(module, name, tensor, device)
                stored.fill_(1.0) if std is None else stored.normal_(0, std)
                module._parameters[name] = nn.Parameter(stored, requires_grad=False)
    model.tie_weights()
    base = model.get_decoder()
    base.rotary_emb = type(base.rotary_emb)(config=model.config).to(device)


def _allocate(module: nn.Module, name: str, tensor: Tensor, device: torch.device) -> Tensor:
    """Memory for a parameter, in kernel layout if it is a structured factor."""
    if not isinstance(module, StructuredLinear) or name == "bias":
        return torch.empty_like(tensor, device=device)
    order = order_of(name, tensor.dim())
    return torch.empty_permuted(tensor.shape, order, dtype=tensor.dtype, device=device)


def _deviation(module: nn.Module, name: str, tensor: Tensor) -> float | None:
    """Standard deviation that gives a weight unit gain; None for a gain."""
    if isinstance(module, StructuredLinear):
        return float(summed(name, tensor.shape) ** -0.5)
    if tensor.dim() == 1:
        return None
    return 1.0 if isinstance(module, nn.Embedding) else tensor.shape[-1] ** -0.5


def two_linears(model: Any, empty: Any) -> Any:
    """`empty` (on the meta device) with the weights of the low-rank `model`: the naive form, each layer
    an nn.Sequential of two nn.Linear."""
    dense = dict(empty.named_modules())
    for name, layer in model.named_modules():
        if isinstance(layer, StructuredLinear) and layer.spec.structure == "svd":
            first, second = _linear(layer.V.detach().mT), _linear(layer.U.detach())
            parent, _, child = name.rpartition(".")
            setattr(dense[parent], child, nn.Sequential(first, second))
        elif name.endswith("norm"):
            dense[name].weight = layer.weight
    share_ends(empty, model.get_input_embeddings(), model.get_output_embeddings())
    empty.get_decoder().rotary_emb = model.get_decoder().rotary_emb
    return empty


def _linear(weight: Tensor) -> nn.Linear:
    with torch.device("meta"):
        made = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made


def correct_model(model: nn.Module, bits: int, rank: int) -> None:
    """Replace every linear layer but the head: its weight rounded to `bits`, and a random correction of
    `rank` in int4 beside it, as large as the error. For timing: what is corrected is no better."""
    for name in quantizable(model):
        parent, _, child = name.rpartition(".")
        holder = model.get_submodule(parent)
        setattr(holder, child, corrected_layer(getattr(holder, child), bits, rank))


def corrected_layer(layer: Any, bits: int, rank: int) -> CorrectedLinear:
    """The corrected layer in the place of an nn.Linear, on its device, with scales of its dtype."""
    weight: Tensor = layer.weight.detach()
    outputs, inputs = weight.shape
    structure = LowRankSpec(inputs, outputs, min(rank, inputs, outputs))
    base = QuantizedSpec(DenseSpec(inputs, outputs), bits)
    correction = QuantizedSpec(structure, FACTOR_BITS, tiled=True)
    like: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
    u = torch.randn(outputs, structure.rank, **like) * 0.1 / structure.rank**0.5
    v = torch.randn(inputs, structure.rank, **like) / inputs**0.5
    tensors = {f"base.{n}": t for n, t in quantize_dense(weight, base).tensors.items()}
    packed = quantize_factors(correction, {"U": u, "V": v}).tensors
    tensors |= {f"correction.{n}": t for n, t in packed.items()}
    if layer.bias is not None:
        tensors["bias"] = layer.bias.detach()
    with torch.device("meta"):
        made = CorrectedLinear(CorrectedSpec(base, correction), layer.bias is not None)
    made.to(weight.dtype).load_state_dict(tensors, assign=True)
    return made.requires_grad_(False).train(layer.training)


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
