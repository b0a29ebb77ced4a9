"""Packs the layers of an export to int8 or int4, one layer in memory at a time."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from statistics import mean
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from blr.compressor.base.errors import InputError, NumericsError, UsageError
from blr.compressor.checkpoint.header import BITS, TORCH_NAMES, TensorEntry
from blr.compressor.checkpoint.source import Source
from blr.compressor.fitting.rounding import Quantized, quantize_dense, quantize_factors
from blr.compressor.loading.native import family_of, meta_model
from blr.compressor.modeling.modeling_blr import module_names
from blr.compressor.recipe.architectures import find_family
from blr.compressor.structures.specs import DenseSpec, QuantizedSpec, Spec
from blr.kernels.decode.quantized.formats import GROUP

KINDS = {"int4": 4, "int8": 8}  # kinds that layers are packed to, and their bits
Parts = dict[str, tuple[str, tuple[int, ...]]]  # name in the module -> safetensors dtype and shape


@dataclass(frozen=True)
class DenseLayer:
    """A dense weight to quantize. entry: its tensor, [in, out] if `transposed`, else [out, in]."""

    entry: TensorEntry
    transposed: bool

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.entry.shape
        return (columns, rows) if self.transposed else (rows, columns)


@dataclass(frozen=True)
class PackedHead:
    """An output head that is packed by itself. kind: int4 or int8. weight: the tensor that it is made
    from; None for a structured head. tied: whether that is the embedding's, which stays as it is."""

    module: str
    kind: str
    weight: TensorEntry | None
    tied: bool


@dataclass
class Quantizer:
    """Packs layers of `source`, and holds the packed tensors of the layer that was asked for last.
    packings: the specs by which layers are packed, structured and dense ones, by module. dense: the
    dense ones among them. plain: the structured layers that packing would not make smaller. kind: of all
    but the head; None if the head alone is packed. dtype: safetensors' name of the scales' dtype, None
    for that of each weight. errors: relative error of the weight that quantization adds, by module, as
    they are packed."""

    source: Source
    packings: Mapping[str, QuantizedSpec]
    dense: Mapping[str, DenseLayer]
    kind: str | None
    dtype: str | None = None
    head: PackedHead | None = None
    plain: list[str] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    _last: tuple[str, Quantized] | None = None

    def settings(self) -> dict[str, Any]:
        """The fields of `ExportSettings` on packed layers."""
        own = self.head.module if self.head else None
        dense = {m: list(layer.shape) for m, layer in self.dense.items() if m != own}
        head = {own: self.packings[own].to_dict()} if own else {}
        return {"quantize": self.kind, "dense": dense, "plain": self.plain, "head": head}

    def sizes(self, module: str) -> tuple[int, int]:
        """The bytes of a layer without packing, and packed."""
        before = packed = 0
        for factor, entry in self._entries(module).items():
            dtype = self.dtype or entry.dtype
            before += prod(entry.shape) * BITS[dtype] // 8
            parts = self.parts(module, factor, dtype).values()
            packed += sum(prod(shape) * BITS[kind] // 8 for kind, shape in parts)
        return before, packed

    def parts(self, module: str, factor: str, dtype: str) -> Parts:
        """The stored tensors of a structured layer's factor, or of a dense "weight", with scales of
        `dtype`; scales, which are wider, come first."""
        stored = self.packings[module].packed_parts(factor)
        return {name: (kind or dtype, shape) for name, (shape, kind) in stored.items()}

    def tensor(self, module: str, part: str) -> torch.Tensor:
        """Make a stored tensor of a layer. Raises NumericsError when scales are not finite."""
        if self._last is None or self._last[0] != module:
            self._last = None  # the layer before goes first
            try:
                self._last = module, self._quantize(module)
            except NumericsError as error:
                raise NumericsError(f"{self.source.folder}: {module}: {error}") from error
            self.errors[module] = self._last[1].error
        return self._last[1].tensors[part]

    def mean_errors(self) -> dict[str, float]:
        """The mean error of each layer type."""
        family, found = find_family(self.source.model_type), dict[str, list[float]]()
        for module, error in self.errors.items():
            kind = family.layer_type(module) if family else None
            found.setdefault(kind or module.rpartition(".")[2], []).append(error)
        return {kind: mean(values) for kind, values in found.items()}

    def _entries(self, module: str) -> dict[str, TensorEntry]:
        if module in self.dense:
            return {"weight": self.dense[module].entry}
        factors = self.packings[module].shapes()
        return {factor: self.source.entries[f"{module}.{factor}"] for factor in factors}

    def _quantize(self, module: str) -> Quantized:
        packing, entries = self.packings[module], self._entries(module)
        scales = getattr(torch, TORCH_NAMES[self.dtype]) if self.dtype else None
        stored = {name: self.source.load_tensor(entry) for name, entry in entries.items()}
        if module not in self.dense:
            return quantize_factors(packing, stored, scales)
        weight = stored["weight"]
        return quantize_dense(weight.mT if self.dense[module].transposed else weight, packing, scales)


def make_quantizer(
    source: Source,
    specs: Mapping[str, Spec],
    kind: str | None,
    dtype: str | None,
    head: PackedHead | None = None,
) -> Quantizer:
    """Make the quantizer of all linear layers of `source`, structured ones and dense ones of its family,
    or of the `head` alone if `kind` is None. Raises InputError when there are none."""
    packed = dict(specs) if kind else {}
    dense = _dense_layers(source, packed) if kind else {}
    if head is not None and head.weight is None:
        packed[head.module] = specs[head.module]
    elif head is not None and head.weight is not None:
        dense[head.module] = DenseLayer(head.weight, transposed=False)
    packed |= {module: DenseSpec(*reversed(layer.shape)) for module, layer in dense.items()}
    own = {head.module: KINDS[head.kind]} if head else {}
    packings = {m: QuantizedSpec(spec, own.get(m) or KINDS[kind or ""]) for m, spec in packed.items()}
    return _without_larger(Quantizer(source, packings, dense, kind, dtype, head))


def _without_larger(found: Quantizer) -> Quantizer:
    """Take out layers with rows far shorter than a group. Raises InputError when none is left."""
    own = {found.head.module} if found.head else set()
    sizes = {module: found.sizes(module) for module in found.packings.keys() - own}
    larger = {module for module, (before, after) in sizes.items() if after >= before}
    if found.kind and not sizes.keys() - larger:
        said = f"no layer gets smaller in {found.kind}, whose rows are padded to groups of {GROUP}"
        remedy = "leave --quantize out, or compress with fewer or no blocks"
        raise InputError(f"{found.source.folder}: {said}; {remedy}")
    packings = {m: packing for m, packing in found.packings.items() if m not in larger}
    dense = {m: layer for m, layer in found.dense.items() if m not in larger}
    return replace(found, packings=packings, dense=dense, plain=sorted(larger - found.dense.keys()))


def find_head(source: Source, specs: Mapping[str, Spec], kind: str) -> PackedHead:
    """Find the output head of a causal language model, from headers, to be packed to `kind`. specs: the
    structured modules, which the head may be one of. Raises UsageError: no such model, or none whose
    head is a linear layer; InputError: no weight of floating-point numbers to make it from."""
    model = meta_model(source)
    name = _head_module(model, kind)
    structured = next((stored for stored, n in module_names(model, specs).items() if n == name), None)
    if structured is not None:
        return PackedHead(structured, kind, None, tied=False)
    shape = tuple(model.get_submodule(name).get_parameter("weight").shape)
    alike = {
        entry.name.removesuffix(".weight"): entry
        for entry in source.entries.values()
        if entry.name.endswith(".weight") and entry.shape == shape and entry.is_float
    }
    stored = {module: alike[owner] for owner, module in module_names(model, alike).items()}
    if own := stored.get(name):
        return PackedHead(own.name.removesuffix(".weight"), kind, own, tied=False)
    giving = model.all_tied_weights_keys.get(f"{name}.weight", "").removesuffix(".weight")
    if giving not in stored:
        found = f"no floating-point weight {list(shape)} of {name}, expected one to quantize"
        raise InputError(f"{source.folder}: {found}; leave --quantize-head out")
    return PackedHead(name, kind, stored[giving], tied=True)


def _head_module(model: PreTrainedModel, kind: str) -> str:
    """The name of the output head of a model. Raises UsageError if there is none to pack."""
    head, known = model.get_output_embeddings(), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    name = next((n for n, module in model.named_modules() if module is head), "")
    others = model.all_tied_weights_keys.keys() - {f"{name}.weight"}
    reason = "ties more than the weights of its head" if others else ""
    if type(head) is not torch.nn.Linear:
        reason = "has no output head that is a linear layer"
    if not any(type(model).__name__ in ((n,) if isinstance(n, str) else n) for n in known):
        reason = "is no causal language model"
    if reason:
        found = f"{type(model).__name__} {reason}"
        raise UsageError(f"--quantize-head {kind}: {found}; leave the option out")
    return name


def _dense_layers(source: Source, specs: Mapping[str, Spec]) -> dict[str, DenseLayer]:
    """The dense layers that the family lists. Raises InputError when there are none, nor `specs`."""
    family = family_of(source)
    dense = {
        module: DenseLayer(entry, family.transposed)
        for entry in source.entries.values()
        if entry.name.endswith(".weight") and len(entry.shape) == 2 and entry.is_float
        if family.layer_type(module := entry.name.removesuffix(".weight"))
    }
    if not specs and not dense:
        found = "no linear layer of floating-point weights to quantize"
        raise InputError(f"{source.folder}: {found}; leave --quantize out")
    return dense
