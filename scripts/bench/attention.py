"""Decoding attention over long caches: every kernel and tile, microseconds of a layer.

    python scripts/bench/attention.py [--shapes 8b:1:32768,7b:1:8192] [--quick]

A shape is a model, rows and slots of the cache; of each, a cache in bf16 and one in int8. Whole tokens:
`blr bench decode --models 8b --contexts 8192,32768 --arms ours-lowrank,ours-lowrank-kv8`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from case_files import Way, kernel_case, options, run, timer_of
from torch import Tensor

from blr.compressor.bench.checks import Expected
from blr.compressor.bench.harness import Case
from blr.compressor.bench.kernel_timer import KernelTimer
from blr.kernels.decode.attention import launch, reference

WIDTH = 128
MODELS = {"8b": (32, 8), "7b": (32, 32)}  # query heads, key heads: Llama-3.1-8B and Llama-7B
LIMIT = 2.4e-2  # relative error
TILES: list[dict[str, int]] = [
    {},
    *({"BN": n, "num_warps": w, "STAGES": s} for n, w, s in ((32, 4, 3), (64, 4, 2), (64, 4, 4))),
    *({"BN": n, "num_warps": w, "STAGES": s} for n, w, s in ((128, 4, 2), (128, 8, 3), (64, 8, 3))),
]


def shared(model: str, rows: int, slots: int, device: torch.device) -> dict[str, Any]:
    """Arguments of `decode_attention` that all layers share."""
    angle = torch.rand(slots, WIDTH // 2, device=device).repeat(1, 2)
    start = torch.zeros(rows, dtype=torch.int64, device=device)
    place = torch.full((rows,), slots - 2, device=device)
    return {"cos": angle.cos(), "sin": angle.sin(), "scale": WIDTH**-0.5, "pos": place, "start": start}


def cache(model: str, rows: int, slots: int, kind: str, device: torch.device) -> tuple[Tensor, ...]:
    """Keys and values, of int8 with their scales."""
    shape = (rows, MODELS[model][1], slots, WIDTH)
    if kind == "whole":
        return tuple(torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in "kv")
    packed = (torch.randint(-127, 128, shape, dtype=torch.int8, device=device) for _ in "kv")
    return (*packed, *(torch.rand(shape[:3], device=device) / 127 for _ in "kv"))


def arms(
    model: str, rows: int, slots: int, kind: str, quick: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and options of the kernels."""
    kernels = [{"streamed": False}] if kind == "whole" else []
    kernels += [{"streamed": True, **tile} for tile in (TILES[:1] if quick else TILES)]
    programs = rows * MODELS[model][1]
    splits = {launch.even_count(programs, slots, launch.PROGRAMS) * n for n in (1, 2, 4)}
    fitting = sorted(n for n in splits if n <= launch.MAX_SPLITS and slots // n >= 64) or [1]
    for chosen, count in product(kernels, fitting):
        yield (
            " ".join(f"{k}={v}" for k, v in {**chosen, "splits": count}.items()),
            {
                **chosen,
                "splits": count,
            },
        )


def case(timer: KernelTimer, model: str, rows: int, slots: int, kind: str, quick: bool) -> Case:
    """All kernels over one cache."""

    def made() -> tuple[Expected, dict[str, Way]]:
        (heads, kv_heads), device = MODELS[model], timer.device
        qkv = torch.randn(rows, (heads + 2 * kv_heads) * WIDTH, device=device)
        held, given = cache(model, rows, slots, kind, device), shared(model, rows, slots, device)
        space = launch.attention_workspace(rows, heads, kv_heads, WIDTH, device)
        given_ours = {**given, "bucket": 1 << (slots - 1).bit_length(), "workspace": space}

        def call(qkv: Tensor, k: Tensor, v: Tensor, *scales: Tensor, **chosen: Any) -> Tensor:
            out = torch.zeros(rows, heads * WIDTH, device=device)
            more = {"scales": scales} if scales else {}
            found: Tensor = launch.decode_attention(
                qkv=qkv, k=k, v=v, out=out, **more, **given_ours, **chosen
            )
            return found

        own = [t.clone() if scales_of(held) else t.float() for t in held[:2]]
        more = {"scales": tuple(t.clone() for t in scales_of(held))} if scales_of(held) else {}
        truth = reference.decode_attention(qkv=qkv, k=own[0], v=own[1], **more, **given)
        expected = Expected(torch.arange(rows, device=device), truth.double())
        named = arms(model, rows, slots, kind, quick)
        return expected, {name: (partial(call, **chosen), (qkv, *held)) for name, chosen in named}

    return kernel_case(timer, f"{model}, {rows} x {slots}, {kind}", made, LIMIT)


def scales_of(held: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Of a cache in int8."""
    return held[2:]


def cases_of(given: argparse.Namespace, timer: KernelTimer) -> list[Case]:
    """What the options ask for."""
    shapes = [shape.split(":") for shape in given.shapes.split(",")]
    return [
        case(timer, model, int(rows), int(slots), kind, given.quick)
        for model, rows, slots in shapes
        for kind in ("whole", "int8")
    ]


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--shapes", default="8b:1:32768,8b:1:8192,8b:4:32768,7b:1:8192")
    parser.add_argument("--quick", action="store_true", help="the default tiles only")
    given = parser.parse_args()
    return run(given, cases_of(given, timer_of(given)))


if __name__ == "__main__":
    sys.exit(main())
