"""What `blr tune` times of float8: products of layers by every tile, and by the library; and whole
layers, in float8 and with their weights dequantized at every call.

Outputs of products are in the model's dtype here; the first of two writes float8, by the same tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from blr.bench.harness import Arm, Case
from blr.bench.layer_problem import FLOAT8_LIMIT as ROUGH
from blr.bench.layer_problem import (
    KernelTimer,
    LayerProblem,
    LayerRow,
    dequantizing_call,
    gaussian,
    problem_of,
    rounding_call,
)
from blr.bench.shapes import LayerShape, specs_for
from blr.bench.timing import Call, Rotation
from blr.bench.tuning_rules import Measured
from blr.compressor.modeling.float8 import known_by
from blr.compressor.structures.specs import BlastSpec, DenseSpec, LowRankSpec, MonarchSpec, Spec
from blr.kernels.common.tables import DEQUANTIZED, FLOAT8, PRODUCT, Shape
from blr.kernels.fp8.launch import Fp8Tile, product
from blr.kernels.fp8.op import fp8_device
from blr.kernels.fp8.reference import E4M3, even

LIBRARY = "library"
STRUCTURES = ("svd", "monarch", "blast")
FEWEST = 16  # tokens: fewer are for the decoding kernels
LIMIT = 0.01  # relative error of a product with sums of about 14 bits
FIELDS = ("BM", "BN", "stages", "warps", "programs", "store", "flatten")  # that tiles differ by
TILES = {
    "128x128 s4 w8": Fp8Tile(128, 128, 128, stages=4),
    "128x128 s4 w4": Fp8Tile(128, 128, 128, stages=4, warps=4),
    "128x256 s3 w8": Fp8Tile(128, 256, 128, stages=3),
    "128x256 s3 w8 half-store": Fp8Tile(128, 256, 128, stages=3, store=2),
    "128x256 s3 w8 persistent flat": Fp8Tile(128, 256, 128, stages=3, programs=1, store=2, flatten=True),
    "128x256 s4 w8 persistent flat": Fp8Tile(128, 256, 128, stages=4, programs=1, store=2, flatten=True),
    "128x128 s4 w8 persistent flat": Fp8Tile(128, 128, 128, stages=4, programs=1, store=1, flatten=True),
    "64x128 s4 w4": Fp8Tile(64, 128, 128, stages=4, warps=4),
    "128x64 s4 w4": Fp8Tile(128, 64, 128, stages=4, warps=4),
    "64x64 s6 w4": Fp8Tile(64, 64, 128, stages=6, warps=4),
    "256x128 s3 w8 persistent flat": Fp8Tile(256, 128, 128, stages=3, programs=1, store=2, flatten=True),
    "128x128 s3 w4 2 persistent": Fp8Tile(128, 128, 128, stages=3, warps=4, programs=2, store=1),
}


def config_of(tile: Fp8Tile) -> dict[str, Any]:
    """What a table says of a tile."""
    return {name: getattr(tile, name) for name in FIELDS}


def products_of(spec: Spec) -> list[Shape]:
    """Both products of a layer, as tables know them, with ranks as kernels see them: inputs and outputs
    of each block."""
    i, o = spec.in_features, spec.out_features
    if isinstance(spec, MonarchSpec):
        b, rank = spec.blocks, spec.blocks * even(spec.block_rank)
    elif isinstance(spec, LowRankSpec | BlastSpec):
        b, rank = getattr(spec, "blocks", 1), even(spec.rank)
    else:
        return []
    return [Shape(i // b, rank, b), Shape(rank, o // b, b)]


def product_cases(
    layers: Sequence[LayerShape], tokens: Sequence[int], timer: KernelTimer
) -> Iterator[tuple[Case, Measured]]:
    """Every product of every structure of the layers, once; nothing where the device has no float8."""
    if not fp8_device(timer.device):
        return
    specs = [spec for layer in layers for spec in specs_for(layer, STRUCTURES)]
    for shape in dict.fromkeys(found for spec in specs for found in products_of(spec)):
        for n in (n for n in tokens if n >= FEWEST):
            title = f"float8 {shape.inputs}→{shape.outputs} x{shape.blocks} n={n}"
            arms = partial(_product_arms, title, shape, n, timer)
            measured = PRODUCT, shape, timer.precision.stored, n
            yield Case(title, arms, around=timer.case), measured


def layer_cases(
    layers: Sequence[LayerShape], tokens: Sequence[int], timer: KernelTimer
) -> Iterator[tuple[Case, Measured]]:
    """Every layer with float8 weights, dense and of every structure; nothing where the device has no
    float8."""
    if not fp8_device(timer.device):
        return
    dense: list[Spec] = [DenseSpec(layer.in_features, layer.out_features) for layer in layers]
    for spec in dict.fromkeys([*dense, *(s for layer in layers for s in specs_for(layer, STRUCTURES))]):
        structure, shape = known_by(spec)
        for n in tokens:
            title = f"float8 {structure} {spec.describe()} n={n}"
            measured = FLOAT8[structure], shape, timer.precision.stored, n
            yield Case(title, partial(_layer_arms, title, spec, n, timer), around=timer.case), measured


def _layer_arms(title: str, spec: Spec, n: int, timer: KernelTimer) -> list[Arm]:
    structured = None if isinstance(spec, DenseSpec) else spec
    layer = LayerShape("", title, spec.in_features, spec.out_features, 1.0, {})
    made = problem_of(timer, layer, structured, n, title)
    calls = {"float8": rounding_call, DEQUANTIZED: dequantizing_call}
    return [made.arm(name, partial(c, made, structured), limit=ROUGH) for name, c in calls.items()]


def _product_arms(title: str, shape: Shape, n: int, timer: KernelTimer) -> list[Arm]:
    K, N, blocks, _ = shape
    device, precision = timer.device, timer.precision
    row = LayerRow(title, "", title, PRODUCT, "", blocks * K, blocks * N, 1.0, n, precision.name, "")

    @cache
    def held() -> tuple[Tensor, Tensor]:
        x = gaussian((n, blocks * K), 1, precision, device, 0).to(E4M3)
        return x, gaussian((blocks, N, K), 1, precision, device, 1).to(E4M3)

    def reference(x: Tensor, w: Tensor) -> Tensor:
        parts = x.view(len(x), blocks, K).transpose(0, 1)
        return (parts @ w.mT).transpose(0, 1).flatten(1) / K**0.5

    wide = precision.dtype
    made = LayerProblem(
        timer, row, cache(lambda: held()[0].to(wide)), cache(lambda: (held()[1].to(wide),)), reference
    )
    calls = {name: _by_tile(shape, n, wide, device, tile) for name, tile in TILES.items()}
    if blocks == 1 and device.type == "cuda" and K % 16 == N % 16 == 0:
        calls[LIBRARY] = _by_library(shape, n, device)
    rotated = lambda call: lambda: (call, Rotation(held(), timer.l2))  # noqa: E731
    return [made.arm(name, rotated(call), limit=LIMIT) for name, call in calls.items()]


def _scales(shape: Shape, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    by_row = torch.ones(n, device=device)
    return by_row, torch.full((shape.blocks, shape.outputs), shape.inputs**-0.5, device=device)


def _by_tile(shape: Shape, n: int, dtype: torch.dtype, device: torch.device, tile: Fp8Tile) -> Call:
    scales = cache(lambda: _scales(shape, n, device))

    def call(x: Tensor, w: Tensor) -> Tensor:
        y = torch.empty(n, shape.blocks, shape.outputs, dtype=dtype, device=device)
        parts = x.view(n, shape.blocks, shape.inputs).transpose(0, 1)
        product(parts, w, *scales(), y.transpose(0, 1), tile=tile)
        return y.view(n, -1)

    return call


def _by_library(shape: Shape, n: int, device: torch.device) -> Call:
    from blr.kernels.fp8 import library

    scales = cache(lambda: _scales(shape, n, device))

    def call(x: Tensor, w: Tensor) -> Tensor:
        by_row, by_col = scales()
        return library.product(x, by_row[:, None], w, by_col, torch.bfloat16)

    return call


def float8_candidates() -> Mapping[str, tuple[str, dict[str, Any]]]:
    """Label of every arm to the variant and the arguments that a table has for it."""
    tiles = {name: ("tile", config_of(tile)) for name, tile in TILES.items()}
    return {**{name: (name, {}) for name in (LIBRARY, "float8", DEQUANTIZED)}, **tiles}
