"""Whether a loaded model can compute: tensors that are finite, layers whose products are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from blr.compressor.checkpoint.numerics import check_finite, check_indices, check_product, norm
from blr.compressor.modeling.layers import StructuredLinear
from blr.kernels.fp8.reference import is_number


def check_model(model: nn.Module, where: object) -> None:
    """Raise NumericsError for a loaded model with a tensor that is not finite, or a structured layer
    whose factors multiply to values beyond its dtype. `where` names the checkpoint."""
    for name, tensor in _stored(model):
        check_finite(tensor, f"{where}: tensor {name!r}", f"in {tensor.dtype}")
    for name, layer in model.named_modules():
        if isinstance(layer, StructuredLinear):
            check_layer(f"{where}: layer {name!r}", layer)


def check_layer(name: str, layer: Any) -> None:
    """`check_product` of a `StructuredLinear`, quantized or not, in the dtype it computes in."""
    spec = layer.spec
    dtype = next(t.dtype for t in (*layer.parameters(), *layer.buffers()) if is_number(t))

    def held() -> dict[str, Tensor]:
        return {part: layer.factor(part) for part in layer.held}

    tensors = held()
    check_indices(name, spec, tensors)
    check_product(name, spec, [norm(tensors[factor]) for factor in spec.shapes()], held, dtype)


def _stored(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and the buffers that a checkpoint stores: masks and positions may hold -inf."""
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".lstrip("."), buffer
