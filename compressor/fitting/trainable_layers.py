"""Layers as they are trained: those in few bits as full numbers, others by their dense weight."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from blr.compressor.fitting.rounding import Metric, latent_name, round_factors
from blr.compressor.modeling.layers import StructuredLinear
from blr.compressor.structures.latent import GroupPlace, Latent, Plain, RoundedGrid, Trained
from blr.compressor.structures.packing import factors_of, from_matrix, part_of, to_matrix
from blr.compressor.structures.registry import STRUCTURES
from blr.compressor.structures.specs import DenseSpec, LowRankSpec, Spec, stored_names
from blr.kernels.decode.quantized.reference import pack


class Sum(nn.Module):
    """``y = x Qᵀ + x Sᵀ + bias``, from two layers without bias."""

    def __init__(self, base: nn.Module, correction: nn.Module) -> None:
        super().__init__()
        self.base, self.correction = base, correction
        self.bias: nn.Parameter | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[..., i] -> [..., o]."""
        y = self.base(x) + self.correction(x)
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True)
class Twin:
    """The trainable form of a stored layer: `module` computes with the values that are stored, and
    `parts` are its trained parameters by the names of factors. The bias is not among them."""

    spec: Spec
    module: nn.Module
    parts: dict[str, Trained]

    def stored(self, dtype: torch.dtype, metric: Metric | None = None) -> dict[str, Tensor]:
        """What is stored of the layer, as ``spec.stored()`` names it; unpacked numbers are in `dtype`.
        Factors in float8 are rounded only here, in the `metric` of the layer's inputs."""
        found: dict[str, Tensor] = {}
        if self.spec.corrected:
            for half, spec in self.spec.parts():
                twin = Twin(spec, self.module.get_submodule(half), part_of(self.parts, half))
                found |= {f"{half}.{name}": tensor for name, tensor in twin.stored(dtype).items()}
            return found
        if (packing := self.spec.packing) is not None and packing.fp8:
            factors = {name: part.parameter.detach().float() for name, part in self.parts.items()}
            return round_factors(factors, packing, metric, dtype)
        for name, part in self.parts.items():
            if isinstance(part, Plain):
                found[name] = part.parameter.detach().to(dtype).contiguous()
            else:
                levels, scale = part.rounded()
                packed = pack(levels, part.grid.bits, part.grid.group)
                found |= dict(zip(stored_names(name), (packed, scale), strict=True))
        return found

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Compute with the stored `tensors` of a layer that has no correction."""
        factors = factors_of(self.spec, tensors, torch.float32)
        for name, part in self.parts.items():
            part.parameter.copy_(factors[name])

    def latents(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The numbers behind packed ones, on the CPU, by `latent_name`; `make_twin` takes them."""
        found = {name: part.full() for name, part in self.parts.items() if isinstance(part, Latent)}
        return {latent_name(name): t.to("cpu", dtype).contiguous() for name, t in found.items()}


def make_twin(spec: Spec, tensors: Mapping[str, Tensor], bias: Tensor | None = None) -> Twin:
    """The trainable form of a stored layer, in float32 on the device of its `tensors`: those that
    ``spec.stored()`` names, and the numbers behind packed ones where they are known."""
    if spec.corrected:
        halves = {name: make_twin(part, part_of(tensors, name)) for name, part in spec.parts()}
        module: nn.Module = Sum(halves["base"].module, halves["correction"].module)
        parts = {f"{n}.{k}": part for n, half in halves.items() for k, part in half.parts.items()}
    else:
        factors = factors_of(spec, tensors, torch.float32)
        module = _plain_module(spec, factors)
        found = {name: module.get_parameter(name) for name in spec.shapes()}
        parts = {name: _part(spec, name, p, tensors) for name, p in found.items()}
    if bias is not None:
        module.bias = nn.Parameter(bias.detach().float(), requires_grad=False)
    return Twin(spec, module, parts)


def _plain_module(spec: Spec, factors: dict[str, Tensor]) -> nn.Module:
    plain = spec.plain
    with torch.device("meta"):
        if plain.structure == DenseSpec.structure:
            module: nn.Module = nn.Linear(plain.in_features, plain.out_features, bias=False)
        else:
            module = StructuredLinear(plain, bias=False)
    module.load_state_dict(factors, assign=True)
    return module.requires_grad_(False)


def _part(spec: Spec, name: str, parameter: nn.Parameter, tensors: Mapping[str, Tensor]) -> Trained:
    packing = spec.packing
    if packing is None or packing.fp8 or (form := packing.format_of(name)) is None:
        return Plain(parameter)
    place = GroupPlace(partial(to_matrix, packing, name), partial(from_matrix, packing, name))
    scale = tensors[stored_names(name)[1]]
    grid = RoundedGrid(*form, scale.dtype, packing.curved, packing.superblocks)
    return Latent(parameter, grid, place, scale, tensors.get(latent_name(name)))


def compose_layers(model: nn.Module, widest: int | None = None) -> None:
    """Let the structured layers of `model` compute by their dense weights, except those whose inputs
    and outputs together are over `widest`, and low rank. Composing the weight in every pass costs as
    much as r tokens; one product with it is faster than a chain of small ones, and keeps nothing but
    its input for the backward pass."""
    for module in model.modules():
        layer = module.correction if isinstance(module, Sum) else module
        if isinstance(layer, StructuredLinear):
            low_rank = layer is module and layer.spec.structure == LowRankSpec.structure
            width = layer.spec.in_features + layer.spec.out_features
            if not low_rank and (widest is None or width <= widest):
                module.forward = partial(_forward, module)  # type: ignore[method-assign,arg-type]


def dense_weight(layer: StructuredLinear | Sum) -> Tensor:
    """The weight [o, i] of a structured layer, or of a sum with one; differentiable."""
    if isinstance(layer, Sum):
        assert isinstance(layer.base, nn.Linear) and isinstance(layer.correction, StructuredLinear)
        return layer.base.weight + dense_weight(layer.correction)
    held = dict(zip(layer.held, layer.ordered(), strict=True))
    return STRUCTURES[layer.spec.structure].factorizer().reconstruct(held, layer.spec)


def _forward(layer: StructuredLinear | Sum, x: Tensor) -> Tensor:
    return linear(x, dense_weight(layer), layer.bias)
