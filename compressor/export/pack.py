"""Weight-only int8 and int4: from factors and dense weights to packed tensors, with their errors.

Quantized are U and V of low-rank, Monarch and BLAST layers, the Kronecker-sparse factors, and dense
weights; not the S of BLAST, biases, norms and embeddings. The output head is left by `quantize_model`
and has a kind of its own (`quantize_head`). The format is that of
`blr.kernels.quantized.reference`, the modules are those of `blr.compressor.modeling.quantized`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from blr.compressor.errors import NumericsError, UsageError
from blr.compressor.modeling.layers import StructuredLinear
from blr.compressor.modeling.quantized import (
    QuantizedLinear,
    QuantizedStructured,
    dense_entry,
    from_matrix,
    is_quantized,
    quantized_linear,
    rows_at_once,
    stored_names,
    to_matrix,
)
from blr.compressor.structures.base import relative_error
from blr.compressor.structures.registry import STRUCTURES
from blr.compressor.structures.specs import Spec
from blr.kernels.quantized.reference import BITS, dequantize, quantize

KINDS = {f"int{bits}": bits for bits in BITS}
PRODUCT = "product"
SOLVED = (4,)  # bits for which factors are solved again: int8 has nothing to make good


@dataclass(frozen=True)
class Quantized:
    """`tensors` by stored name (``V_q``, ``V_scale``, ``S``); `errors`, relative Frobenius, by factor
    and, under "product", of the weight they multiply out to."""

    tensors: dict[str, Tensor]
    errors: dict[str, float]


def parse_kind(kind: str) -> int:
    """ "int8" -> 8. Raises UsageError for a kind that does not exist."""
    if kind not in KINDS:
        raise UsageError(f"quantization {kind!r}: expected one of {', '.join(KINDS)}")
    return KINDS[kind]


def quantize_factors(
    spec: Spec, factors: dict[str, Tensor], bits: int, scale_dtype: torch.dtype | None = None
) -> Quantized:
    """Quantize one structured layer. Of int4, which rounds coarsely, factors that follow from the
    others by least squares are solved again behind those that are rounded.

    Args:
        factors: canonical, as named by `spec`. scale_dtype: the model's (default: of each factor).

    Raises:
        NumericsError: a factor whose scales are not finite.
    """
    tensors: dict[str, Tensor] = {}
    errors: dict[str, float] = {}
    back: dict[str, Tensor] = {}
    exact = {name: factor.to(_work(factor)) for name, factor in factors.items()}
    for name in _turns(spec, bits):
        factor = _solved(name, spec, back, exact) if bits in SOLVED else exact[name]
        if not is_quantized(spec, name):
            tensors[name] = factor.to(scale_dtype or factors[name].dtype)
            back[name] = tensors[name].to(factor)
            continue
        dtype = scale_dtype or factors[name].dtype
        matrix, stored = _pack(name, to_matrix(spec, name, factor), bits, dtype)
        tensors |= stored
        back[name] = from_matrix(spec, name, matrix)
        errors[name] = relative_error(factor, back[name])
    reconstruct = STRUCTURES[spec.structure].factorizer().reconstruct
    errors[PRODUCT] = relative_error(reconstruct(exact, spec), reconstruct(back, spec))
    return Quantized(tensors, errors)


def _turns(spec: Spec, bits: int) -> list[str]:
    """The factors as they are rounded: those that are solved again come last."""
    solved = STRUCTURES[spec.structure].solved if bits in SOLVED else ()
    return [*(name for name in spec.shapes() if name not in solved), *solved]


def _solved(name: str, spec: Spec, rounded: dict[str, Tensor], exact: dict[str, Tensor]) -> Tensor:
    """The factor `name` for those of `rounded` so far."""
    structure = STRUCTURES[spec.structure]
    if name not in structure.solved:
        return exact[name]
    return structure.factorizer().solve_again(name, {**exact, **rounded}, exact, spec)


def quantize_dense(weight: Tensor, bits: int, scale_dtype: torch.dtype | None = None) -> Quantized:
    """Quantize one dense weight [o, i]. Raises NumericsError when its scales are not finite."""
    parts, lost, whole = [], 0.0, 0.0
    for rows in weight.split(rows_at_once(weight.shape[1])):
        matrix, stored = _pack("weight", rows, bits, scale_dtype)
        exact = rows.to(matrix)
        lost, whole = lost + _square(matrix - exact), whole + _square(exact)
        parts.append(stored)
    tensors = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return Quantized(tensors, {PRODUCT: (lost / whole) ** 0.5 if whole else 0.0})


def quantize_layer(
    layer: nn.Module, bits: int
) -> tuple[QuantizedStructured | QuantizedLinear, dict[str, float]]:
    """The quantized module in place of a structured layer, an nn.Linear or a Conv1D, and its errors.

    Scales and what is not quantized keep the layer's dtype and device.
    """
    bias = getattr(layer, "bias", None)
    if isinstance(layer, StructuredLinear):
        names = layer.spec.shapes()
        factors = {name: _factor(layer, name) for name in names}
        found = quantize_factors(layer.spec, factors, bits)
    else:
        found = quantize_dense(_dense_weight(layer), bits)
    some = next(iter(layer.parameters()))
    with torch.device("meta"):
        new = quantized_linear(table_entry(layer, bits), bias is not None).to(some.dtype)
    state = found.tensors if bias is None else {**found.tensors, "bias": bias.detach()}
    new.load_state_dict(state, assign=True)
    return new.requires_grad_(False).train(layer.training), found.errors


def quantize_model(
    model: nn.Module, bits: int, *, dense: bool = True, skip: Iterable[str] = ()
) -> dict[str, dict[str, float]]:
    """Quantize the layers of a transformers model in place, one at a time.

    Args:
        dense: dense weights as well as structured layers. skip: modules to leave, by name.

    Returns:
        Errors of every quantized module, as `Quantized.errors`.
    """
    return {name: _replace(model, name, bits) for name in quantizable(model, dense=dense, skip=skip)}


def quantize_head(model: nn.Module, bits: int) -> dict[str, dict[str, float]]:
    """Quantize the output head of a transformers model in place.

    A head that is the input embedding gets weights of its own; the embedding stays as it is, and the
    model's configuration ties them no more.

    Returns:
        As `quantize_model`. Raises UsageError for a model without a linear head to quantize.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    kinds = StructuredLinear, nn.Linear
    if not isinstance(head, kinds) or isinstance(head, QuantizedStructured):
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


def _replace(model: nn.Module, name: str, bits: int) -> dict[str, float]:
    """Quantize the module `name` of `model`; its errors."""
    parent, _, child = name.rpartition(".")
    holder = model.get_submodule(parent)
    try:
        new, errors = quantize_layer(getattr(holder, child), bits)
    except NumericsError as error:
        raise NumericsError(f"{name}: {error}") from error
    setattr(holder, child, new)
    return errors


def quantizable(model: nn.Module, *, dense: bool = True, skip: Iterable[str] = ()) -> list[str]:
    """Names of the modules that `quantize_model` replaces: all linear layers but the output head."""
    skip = set(skip)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    kinds = (StructuredLinear, nn.Linear, _conv1d()) if dense else (StructuredLinear,)
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, kinds)
        and not isinstance(module, QuantizedStructured)
        and module is not head
        and name not in skip
    ]


def table_entry(layer: nn.Module, bits: int) -> dict[str, Any]:
    """What `blr.compressor.modeling.quantized.quantized_linear` makes the layer's place-holder from."""
    if isinstance(layer, StructuredLinear):
        return {**layer.spec.to_dict(), "bits": bits}
    outputs, inputs = _dense_weight(layer).shape
    return dense_entry(outputs, inputs, bits)


def _dense_weight(layer: nn.Module) -> Tensor:
    """W [o, i]."""
    weight = layer.get_parameter("weight").detach()
    return weight.mT if isinstance(layer, _conv1d()) else weight


def _factor(layer: StructuredLinear, name: str) -> Tensor:
    stem, _, index = name.partition(".")
    held = getattr(layer, stem)
    return (held[int(index)] if index else held).detach()


def _pack(
    name: str, matrix: Tensor, bits: int, scale_dtype: torch.dtype | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The dequantized matrix in a dtype to measure errors in, and what is stored of it."""
    packed, scale = quantize(matrix, bits, scale_dtype)
    if not bool(torch.isfinite(scale).all()):
        raise NumericsError(
            f"scales of {name} are not finite in {scale.dtype}; take a model in bfloat16 or float32, "
            "or leave the layer out"
        )
    back = dequantize(packed, scale, bits, matrix.shape[-1], _work(matrix))
    return back, dict(zip(stored_names(name), (packed, scale), strict=True))


def _square(tensor: Tensor) -> float:
    return float(tensor.square().sum(dtype=torch.float64))


def _work(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _conv1d() -> type[nn.Module]:
    from transformers.pytorch_utils import Conv1D

    return Conv1D
