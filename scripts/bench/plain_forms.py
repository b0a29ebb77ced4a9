"""Ways of a low-rank layer's two products, beside ours: is any faster where ours is the library's?

    python scripts/bench/plain_forms.py [--shapes 4096x4096x1024,…] [--tokens 512,768,…] [--rounds 41]

In bf16 on a GPU, interleaved, weights rotated past L2, each way checked against two `nn.Linear` first:
ours; nt, two `nn.Linear` (V stored [r, i]); nn, V stored [i, r]; z or y or both transposed; the same by
cuBLASLt; and a bias in the first product's epilogue. A line a shape: microseconds, and quartiles.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from blr.compressor.bench.timing import CudaSampler, Rotation, interleave, spread
from blr.kernels.layers.lowrank.op import lowrank_linear

SHAPES, TOKENS = "4096x4096x1024,4096x4096x512,14336x4096x1536", "512,768,1024,1536,2048"
L2, OFF = 50 << 20, 2e-2  # bytes; relative error that is none, in bf16
Way = Callable[..., Tensor]


def by_lt(way: Way, *arguments: Tensor) -> Tensor:
    """`way` by cuBLASLt, whose heuristics choose otherwise."""
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        return way(*arguments)
    finally:
        torch.backends.cuda.preferred_blas_library("cublas")


def two_linear(x: Tensor, U: Tensor, V: Tensor) -> Tensor:
    """x [n, i], U [o, r], V [r, i] -> [n, o]."""
    return linear(linear(x, V), U)


def ways(x: Tensor, U: Tensor, V: Tensor) -> dict[str, tuple[Way, tuple[Tensor, ...]]]:
    """Each way and its arguments."""
    given, other = (x, U, V), (x, U, V.t().contiguous())
    zero = V.new_zeros(len(V))
    plain: dict[str, tuple[Way, tuple[Tensor, ...]]] = {
        "nt": (two_linear, given),
        "nn": (lambda x, U, V: linear(x @ V, U), other),
        "zt": (lambda x, U, V: linear(torch.mm(V, x.t()).t(), U), given),
    }
    return {
        **{"ours": (lambda x, U, V: lowrank_linear(x, U, V.t()), given), **plain},
        **{f"lt-{name}": (partial(by_lt, way), them) for name, (way, them) in plain.items()},
        "yt": (lambda x, U, V: torch.mm(U, linear(x, V).t()).t(), given),
        "zyt": (lambda x, U, V: torch.mm(U, torch.mm(V, x.t())).t(), given),
        "bias": (lambda x, U, V, b: linear(linear(x, V, b), U), (*given, zero)),
    }


def timed(o: int, i: int, r: int, n: int, rounds: int, flush: Tensor) -> str:
    """The line of a shape, the fastest way first."""
    make = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    x, U, V = make(n, i), make(o, r) / r**0.5, make(r, i) / i**0.5
    want, pool = two_linear(x, U, V).float(), torch.cuda.graph_pool_handle()
    samplers: dict[str, Any] = {}
    for name, (way, arguments) in ways(x, U, V).items():
        if not (way(*arguments).float() - want).norm() < OFF * want.norm():
            raise SystemExit(f"{name} gives something else")
        samplers[name] = CudaSampler(way, Rotation(arguments, L2), flush, pool)
        samplers[name].output = None
    times = interleave(samplers, rounds, lambda name, error: print(name, error))
    found = sorted(((spread(each), name) for name, each in times.items()), key=lambda pair: pair[0].ms)
    told = [f"{name} {1e3 * s.ms:.2f} ({1e3 * s.low:.2f} to {1e3 * s.high:.2f})" for s, name in found]
    return f"{o} x {i}, rank {r}, {n} tokens: " + ", ".join(told)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--tokens", default=TOKENS)
    parser.add_argument("--rounds", type=int, default=41)
    asked = parser.parse_args()
    flush = torch.empty(2 * L2, dtype=torch.uint8, device="cuda")
    for shape in asked.shapes.split(","):
        for n in asked.tokens.split(","):
            print(timed(*map(int, shape.split("x")), int(n), asked.rounds, flush), flush=True)


if __name__ == "__main__":
    main()
