"""Kronecker-sparse layers of few and many rows: what is chosen, beside every way there is.

    python scripts/bench/kronecker.py [--layers '1,4096,1360,1 2,680,2048,1;…'] [--tokens 1,2,4,…]
        [--ways auto,bmm,permute,fused,blocks] [--rounds 9]

In bf16 on a GPU, interleaved, weights rotated past L2, each way checked against the reference first. bmm
is plain torch. A line a layer and number of tokens: the ways chosen for its factors, microseconds, and
how many times as fast as plain torch it is; SLOWER where that is below .98.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blr.compressor.bench.timing import CudaSampler, Rotation, interleave, spread
from blr.kernels.layers.kronecker.choose import Problem, choose
from blr.kernels.layers.kronecker.variants import VARIANTS

LAYERS = (
    "1,4096,1360,1 2,680,2048,1;1,4096,2336,1 2,1168,5504,1;1,11008,1488,1 1,1488,4096,1;"
    "1,64,64,64 64,64,64,1;1,256,256,16 16,256,256,1;1,1024,1024,4 4,1024,1024,1;"
    "2,1024,512,2 4,512,1024,1;1,128,512,32;4,128,32,32"
)
TOKENS, WAYS = "1,2,4,8,16,32,64,128,256,1024,4096", "auto,bmm"
L2, OFF, EQUAL = (
    50 << 20,
    2e-2,
    0.98,
)  # bytes; relative error that is none, in bf16; as fast as plain torch

Pattern = tuple[int, int, int, int]


def product(x: Tensor, *factors: Tensor, way: str) -> Tensor:
    """x [n, i] -> [n, o]."""
    return VARIANTS[way](x, factors)


def chosen(pattern: Pattern, n: int) -> str:
    """The name of the way for one factor."""
    variant, config = choose(Problem(*pattern, n, "half"))
    return str(config.get("path", variant))


def timed(patterns: list[Pattern], n: int, ways: list[str], rounds: int, flush: Tensor) -> str:
    """The line of a layer."""
    make = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    factors = [make(*pattern) / pattern[2] ** 0.5 for pattern in patterns]
    a, _, c, d = patterns[-1]
    x, pool = make(n, a * c * d), torch.cuda.graph_pool_handle()
    wanted = product(x, *factors, way="reference").float()
    samplers: dict[str, Any] = {}
    for way in ways:
        call = partial(product, way=way)
        if not (call(x, *factors).float() - wanted).norm() < OFF * wanted.norm():
            raise SystemExit(f"{way} gives something else for {patterns}, {n} rows")
        samplers[way] = CudaSampler(call, Rotation((x, *factors), L2), flush, pool)
        samplers[way].output = None
    times = interleave(samplers, rounds, lambda name, error: print(name, error))
    found = {way: spread(each) for way, each in times.items()}
    told = [f"{w} {1e3 * s.ms:.2f} ({1e3 * s.low:.2f} to {1e3 * s.high:.2f})" for w, s in found.items()]
    gain = found["bmm"].ms / found["auto"].ms
    slower = " SLOWER" if gain < EQUAL else ""
    taken = " ".join(chosen(pattern, n) for pattern in patterns)
    return f"{patterns}, {n} tokens, {taken}: {', '.join(told)}, {gain:.2f} x plain{slower}"


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", default=LAYERS)
    parser.add_argument("--tokens", default=TOKENS)
    parser.add_argument("--ways", default=WAYS)
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    ways = [*dict.fromkeys(["auto", "bmm", *asked.ways.split(",")])]
    flush = torch.empty(2 * L2, dtype=torch.uint8, device="cuda")
    for layer in asked.layers.split(";"):
        patterns: list[Any] = [tuple(map(int, factor.split(","))) for factor in layer.split()]
        for n in map(int, asked.tokens.split(",")):
            print(timed(patterns, n, ways, asked.rounds, flush), flush=True)


if __name__ == "__main__":
    main()
