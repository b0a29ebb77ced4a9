"""Weights in few bits for `blr bench layers`: alone, with a correction, and those of Humming."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from torch import Tensor
from torch.nn.functional import linear

from blr.bench.harness import Arm
from blr.bench.layer_problem import LayerProblem, gaussian
from blr.bench.timing import Call, Rotation
from blr.kernels.decode.quantized.formats import GROUP
from blr.kernels.decode.quantized.reference import dequantize, quantize
from blr.kernels.layers.packed.op import packed_linear

ROUNDED = {8: 0.02, 4: 0.2, 3: 0.4, 2: 0.8}  # how far Humming's own rounding may be from the weight
SEED = 3
CURVED = False  # the grid of 3 bits that outputs have by default


def packed_arms(dense: LayerProblem, x: Callable[[], Tensor], bits: int, rank: int) -> Iterator[Arm]:
    """The arms of a weight in `bits`, groups of `GROUP`: ours alone, ours with a correction of `rank`,
    and Humming's (package humming-kernels) where it is installed.

    Args:
        dense: the layer with the weight that is rounded. x: gives the input of all.
    """
    for r in (0, rank):
        yield _ours(dense, x, bits, r)
    if dense.timer.device.type == "cuda" and bits < 8 and find_spec("humming"):
        yield _humming(dense, x, bits)


def _ours(dense: LayerProblem, x: Callable[[], Tensor], bits: int, rank: int) -> Arm:
    row, precision, device = dense.row, dense.timer.precision, dense.timer.device
    columns = row.in_features

    def factors() -> tuple[Tensor, ...]:
        packed, scale = quantize(dense.factors()[0], bits, curved=CURVED)
        if not rank:
            return packed, scale
        u = gaussian((row.out_features, rank), rank, precision, device, SEED).mul_(0.1)
        return packed, scale, u, gaussian((rank, columns), columns, precision, device, SEED + 1)

    def reference(x: Tensor, packed: Tensor, scale: Tensor, *uv: Tensor) -> Tensor:
        y = linear(x, dequantize(packed, scale, bits, columns, x.dtype, curved=CURVED))
        return y + x @ uv[1].mT @ uv[0].mT if uv else y

    def product(x: Tensor, packed: Tensor, scale: Tensor, *uv: Tensor) -> Tensor:
        return packed_linear(x, packed, scale, None, bits, GROUP, CURVED, *uv)

    name = f"int{bits}+{rank}" if rank else f"int{bits}"
    made = LayerProblem(dense.timer, replace(row, structure=name), x, factors, reference)
    return made.arm("ours", lambda: (product, made.rotation))


def _humming(dense: LayerProblem, x: Callable[[], Tensor], bits: int) -> Arm:
    """Humming's product, whose levels are its own: right as far as rounding lets it."""
    timer = dense.timer
    row = replace(dense.row, structure=f"int{bits}", arm="humming")

    def make() -> tuple[Call, Rotation]:
        from humming.layer import HummingLayer

        given: dict[str, Any] = {"shape_n": row.out_features, "shape_k": row.in_features}
        form = {"dtype": f"int{bits}", "group_size": GROUP}
        layer = HummingLayer(**given, weight_config=form, torch_dtype=timer.precision.dtype).cuda()
        layer.load_from_unquantized(dense.factors()[0])
        layer.transform()
        names = [name for name, _ in layer.named_parameters()]

        def call(x: Tensor, *held: Tensor) -> Tensor:
            for name, tensor in zip(names, held, strict=True):
                layer.get_parameter(name).data = tensor
            y: Tensor = layer(x)
            return y

        return call, Rotation((x(), *(p.data for p in layer.parameters())), timer.l2)

    loose = replace(timer, precision=replace(timer.precision, gate=ROUNDED[bits]))
    return Arm(row, lambda: loose.checked(make, dense.expected))
