"""Packs the layers of an export to int8 or int4, one layer in memory at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import mean

import torch

from blr.compressor.checkpoint.header import TensorEntry
from blr.compressor.checkpoint.source import TORCH_NAMES, Source
from blr.compressor.errors import InputError, NumericsError
from blr.compressor.families import Family, find_family
from blr.compressor.modeling.quantized import is_quantized, matrix_shape, stored_names
from blr.compressor.quantize import PRODUCT, Quantized, parse_kind, quantize_dense, quantize_factors
from blr.compressor.structures.specs import Spec
from blr.kernels.quantized.reference import GROUP, packed_width

Parts = dict[str, tuple[str, tuple[int, ...]]]  # name in the module -> safetensors dtype and shape
PACKED_DTYPES = {8: "I8", 4: "U8"}


@dataclass(frozen=True)
class DenseLayer:
    """A dense weight that is quantized: `entry` is [in, out] if `transposed`, else [out, in]."""

    entry: TensorEntry
    transposed: bool

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]."""
        rows, columns = self.entry.shape
        return (columns, rows) if self.transposed else (rows, columns)


@dataclass
class Quantizer:
    """What is packed of `source`, and the packed tensors of the layer that was asked for last.

    Attributes:
        specs, dense: by module, the structured and the dense layers.
        dtype: safetensors' name of the scales' dtype, None for that of each weight.
        errors: relative error of the weight that quantization adds, by module, as they are packed.
    """

    source: Source
    specs: Mapping[str, Spec]
    dense: Mapping[str, DenseLayer]
    kind: str
    dtype: str | None = None
    errors: dict[str, float] = field(default_factory=dict)
    _last: tuple[str, Quantized] | None = None

    @property
    def bits(self) -> int:
        """8 or 4."""
        return parse_kind(self.kind)

    def parts(self, module: str, factor: str, dtype: str) -> Parts:
        """What is stored of one factor of a structured layer, or of a dense "weight", with scales of
        `dtype`; scales first, which are wider."""
        if module in self.dense:
            shape: tuple[int, ...] = self.dense[module].shape
        else:
            spec = self.specs[module]
            if not is_quantized(spec, factor):
                return {factor: (dtype, spec.shapes()[factor])}
            shape = matrix_shape(spec, factor)
        *rows, width = shape
        packed, scale = stored_names(factor)
        return {
            scale: (dtype, (*rows, -(-width // GROUP))),
            packed: (PACKED_DTYPES[self.bits], (*rows, packed_width(width, self.bits))),
        }

    def tensor(self, module: str, part: str) -> torch.Tensor:
        """One stored tensor of a layer. Raises NumericsError when scales are not finite."""
        if self._last is None or self._last[0] != module:
            self._last = None  # the layer before goes first
            try:
                self._last = module, self._quantize(module)
            except NumericsError as error:
                raise NumericsError(f"{self.source.folder}: {module}: {error}") from error
            self.errors[module] = self._last[1].errors[PRODUCT]
        return self._last[1].tensors[part]

    def mean_errors(self) -> dict[str, float]:
        """Layer type to the mean of its errors."""
        family, found = find_family(self.source.model_type), {}
        for module, error in self.errors.items():
            kind = family.layer_type(module) if family else None
            found.setdefault(kind or module.rpartition(".")[2], []).append(error)
        return {kind: mean(values) for kind, values in found.items()}

    def _quantize(self, module: str) -> Quantized:
        if module in self.dense:
            layer = self.dense[module]
            weight = self._load(layer.entry)
            return quantize_dense(weight.mT if layer.transposed else weight, self.bits, self._scales())
        spec = self.specs[module]
        factors = {f: self._load(self.source.entries[f"{module}.{f}"]) for f in spec.shapes()}
        return quantize_factors(spec, factors, self.bits, self._scales())

    def _load(self, entry: TensorEntry) -> torch.Tensor:
        return self.source.load_tensor(entry)

    def _scales(self) -> torch.dtype | None:
        return getattr(torch, TORCH_NAMES[self.dtype]) if self.dtype else None


def make_quantizer(source: Source, specs: Mapping[str, Spec], kind: str, dtype: str | None) -> Quantizer:
    """For all linear layers of `source`: the structured ones, and the dense ones of its family.

    Raises InputError when there are none.
    """
    family = find_family(source.model_type)
    if family is None:
        from blr.compressor.modeling.discover import discover_family

        family = discover_family(source)
    dense = {m: DenseLayer(e, family.transposed) for m, e in _weights(source, family).items()}
    if not specs and not dense:
        raise InputError(
            f"{source.folder}: no linear layer of floating-point weights to quantize; "
            "leave --quantize out"
        )
    return Quantizer(source, specs, dense, kind, dtype)


def _weights(source: Source, family: Family) -> dict[str, TensorEntry]:
    """Dense weights by module: matrices of layers that the family lists, so not of heads."""
    return {
        entry.name.removesuffix(".weight"): entry
        for entry in source.entries.values()
        if entry.name.endswith(".weight")
        and len(entry.shape) == 2
        and entry.is_float
        and family.layer_type(entry.name.removesuffix(".weight"))
    }
