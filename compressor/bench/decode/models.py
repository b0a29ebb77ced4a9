"""The models that `blr bench decode` times: random weights of a shape, or a checkpoint folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blr.compressor.base.errors import UsageError
from blr.compressor.bench.shapes import Layer, specs_for
from blr.compressor.bench.subjects import random_order
from blr.compressor.modeling.fused import fuse
from blr.compressor.modeling.layers import LowRankLinear, StructuredLinear
from blr.compressor.modeling.shared_input import share_siblings
from blr.compressor.modeling.table import replace_layers
from blr.compressor.structures.specs import Spec
from blr.kernels.common.orders import order_of
from blr.kernels.decode.quantized.formats import BITS

STRUCTURES = {"lowrank": "svd", "pivoted": "pivoted", "monarch": "monarch", "blast": "blast"}
OWN = "own"  # a checkpoint as it is
CORRECTED = "corrected"  # dense weights in few bits and a low-rank correction
FEW_BITS = {f"int{bits}": bits for bits in BITS}
PROMPT = (
    "The wind had dropped before sunrise, and the harbour lay quiet under a thin white mist. Two men "
    "carried the nets down to the boat while the third counted the floats and wrote the number in a "
    "small black book. "
)


@dataclass(frozen=True)
class Subject:
    """A named shape (`settings` of a LlamaConfig) or a checkpoint (`folder`)."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None


@cache
def known_models() -> dict[str, dict[str, Any]]:
    """Settings of configs/bench-decode.yaml by name."""
    from ruamel.yaml import YAML

    text = files("blr.configs").joinpath("bench-decode.yaml").read_text("utf-8")
    return {str(name): dict(found) for name, found in YAML(typ="safe").load(text).items()}


def find_subject(name: str) -> Subject:
    """A model by name or folder. Raises UsageError listing the known names."""
    if name in known_models():
        return Subject(name, known_models()[name])
    folder = Path(name)
    if (folder / "config.json").is_file():
        return Subject(folder.name, folder=folder)
    known = ", ".join(known_models())
    raise UsageError(f"model {name!r} is neither one of {known} nor a folder with config.json; give one")


@dataclass
class Models:
    """Builds the variants of one subject and keeps them, their embeddings shared.

    Args:
        context: positions that the models must have. cf: compression factor of structured layers.
        blocks: of Monarch and BLAST. rank: of the corrections of weights in few bits. quantized variants
            include the dense weights; their head is quantized only if it is asked for.
    """

    subject: Subject
    device: torch.device
    dtype: torch.dtype
    context: int
    cf: float = 2.0
    blocks: int = 16
    rank: int = 16
    built: dict[tuple[str, str, str], Any] = field(default_factory=dict)
    ends: tuple[nn.Module, nn.Module] | None = None  # embedding and head of all random models

    def get(self, structure: str, kind: str = "", plain: bool = False, head: str = "") -> Any:
        """The model in a structure ("dense", "lowrank", …, "own") and kind ("", "int8", …).

        `plain`: with low-rank layers as two nn.Linear each, on the same weights. `head`: the kind of
        the output head.
        """
        key = (structure, "plain" if plain else kind, head)
        if key not in self.built:
            self.built[key] = self._build(structure, kind, plain, head)
        return self.built[key]

    def fresh(self, structure: str) -> Any:
        """A model in a structure that nobody else has, to be changed."""
        return self._build(structure, "", False, "")

    def _build(self, structure: str, kind: str, plain: bool, head: str) -> Any:
        if plain and structure == "lowrank":
            return two_linears(self.get(structure), self._empty())
        model = self._loaded() if structure == OWN else self._random(structure)
        if kind or head:
            from blr.compressor.bench.decode.corrected import correct_model
            from blr.compressor.exporting.pack import quantize_head, quantize_model

            if structure == CORRECTED:
                correct_model(model, FEW_BITS[kind], self.rank)
            elif kind:
                quantize_model(model, FEW_BITS[kind])
            if head:
                quantize_head(model, FEW_BITS[head])
        return model

    def _loaded(self) -> Any:
        from blr.compressor.loading.load import load_model

        if self.subject.folder is None:
            raise UsageError(
                f"{self.subject.name} is a shape, its arms are of dense or a structure; "
                "arms of a model's own need a checkpoint folder"
            )
        dtype = str(self.dtype).removeprefix("torch.")
        return load_model(
            self.subject.folder, "AutoModelForCausalLM", dtype=dtype, device=str(self.device)
        )

    def _empty(self) -> Any:
        """The dense model on the meta device."""
        from transformers import LlamaConfig, LlamaForCausalLM

        if not self.subject.settings:
            raise UsageError(f"{self.subject.name} is a checkpoint: give --arms hf-own,ours-own")
        with torch.device("meta"):
            config = LlamaConfig(**self.subject.settings, max_position_embeddings=self.context)
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
                layer = Layer("", name, module.in_features, module.out_features, self.cf, {})
                found = specs_for(layer, [structure], [self.blocks])
                if found:
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


def two_linears(model: Any, empty: Any) -> Any:
    """`empty` (on the meta device) with the weights of the low-rank `model`: the naive form, each layer
    an nn.Sequential of two nn.Linear."""
    dense = dict(empty.named_modules())
    for name, layer in model.named_modules():
        if isinstance(layer, LowRankLinear):
            first, second = _linear(layer.V.detach().mT), _linear(layer.U.detach())
            parent, _, child = name.rpartition(".")
            setattr(dense[parent], child, nn.Sequential(first, second))
        elif name.endswith("norm"):
            dense[name].weight = layer.weight
    share_ends(empty, model.get_input_embeddings(), model.get_output_embeddings())
    empty.get_decoder().rotary_emb = model.get_decoder().rotary_emb
    return empty


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


def prompt(subject: Subject, model: Any, batch: int, length: int) -> Tensor:
    """[batch, length] token ids: English for a checkpoint with a tokenizer, random otherwise."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (batch, length), generator=generator)
    if subject.folder is not None and (subject.folder / "tokenizer_config.json").is_file():
        from blr.compressor.loading.load import load_tokenizer

        text = load_tokenizer(subject.folder)(PROMPT * (1 + length // 16))["input_ids"]
        words = torch.tensor(text)
        for row in range(batch):  # other places of the text in every row
            ids[row] = words.roll(-7 * row)[:length] if len(words) >= length else ids[row]
    return ids.to(model.device)


def _allocate(module: nn.Module, name: str, tensor: Tensor, device: torch.device) -> Tensor:
    """Memory for a parameter, in kernel layout if it is a structured factor."""
    if not isinstance(module, StructuredLinear) or name == "bias":
        return torch.empty_like(tensor, device=device)
    order = order_of(module.spec.structure, name, tensor.dim())
    physical = torch.empty([tensor.shape[a] for a in order], dtype=tensor.dtype, device=device)
    return physical.permute(tuple(order.index(axis) for axis in range(len(order))))


def _deviation(module: nn.Module, name: str, tensor: Tensor) -> float | None:
    """Standard deviation that gives a weight unit gain; None for a gain."""
    if isinstance(module, StructuredLinear):
        return _contracted(module.spec, name) ** -0.5
    if tensor.dim() == 1:
        return None
    return 1.0 if isinstance(module, nn.Embedding) else tensor.shape[-1] ** -0.5


def _contracted(spec: Spec, name: str) -> int:
    """How many terms a product with this factor sums."""
    shape = spec.shapes()[name]
    if name == "S":
        return shape[1]
    return max(prod(shape[axis] for axis in order_of(spec.structure, name, len(shape))[-1:]), 1)


def _linear(weight: Tensor) -> nn.Linear:
    with torch.device("meta"):
        made = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made
