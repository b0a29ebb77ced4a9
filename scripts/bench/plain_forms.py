"""Ways of a low-rank layer's two products, beside ours: is any faster where ours is the library's?

    python scripts/bench/plain_forms.py [--shapes 4096x4096x1024,…] [--tokens 512,768,…] [--rounds 41]

nt: two `nn.Linear` (V stored [r, i]); ours; nn: V stored [i, r]; zt, yt, zyt: z or y or both transposed;
lt-: the same by cuBLASLt; bias: one in the first product's epilogue.
"""

from __future__ import annotations

import sys
from functools import partial
from itertools import product

import torch
from case_files import Way, kernel_case, numbers, options, run, timer_of
from torch import Tensor
from torch.nn.functional import linear

from blr.compressor.bench.checks import Expected, expect
from blr.compressor.bench.harness import Case
from blr.compressor.bench.kernel_timer import KernelTimer
from blr.kernels.layers.lowrank.op import lowrank_linear

SHAPES, TOKENS = "4096x4096x1024,4096x4096x512,14336x4096x1536", "512,768,1024,1536,2048"


def by_lt(way: Way, *arguments: Tensor) -> Tensor:
    """A way by cuBLASLt, whose heuristics choose otherwise."""
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        return way[0](*arguments)
    finally:
        torch.backends.cuda.preferred_blas_library("cublas")


def two_linears(x: Tensor, U: Tensor, V: Tensor) -> Tensor:
    """x [n, i], U [o, r], V [r, i] -> [n, o]."""
    return linear(linear(x, V), U)


def ways(x: Tensor, U: Tensor, V: Tensor) -> dict[str, Way]:
    """Each way and its arguments."""
    given, other, zero = (x, U, V), (x, U, V.t().contiguous()), V.new_zeros(len(V))
    plain: dict[str, Way] = {
        "nt": (two_linears, given),
        "nn": (lambda x, U, V: linear(x @ V, U), other),
        "zt": (lambda x, U, V: linear(torch.mm(V, x.t()).t(), U), given),
    }
    lt: dict[str, Way] = {f"lt-{name}": (partial(by_lt, way), way[1]) for name, way in plain.items()}
    return {
        **plain,
        "ours": (lambda x, U, V: lowrank_linear(x, U, V.t()), given),
        **(lt if x.is_cuda else {}),
        "yt": (lambda x, U, V: torch.mm(U, linear(x, V).t()).t(), given),
        "zyt": (lambda x, U, V: torch.mm(U, torch.mm(V, x.t())).t(), given),
        "bias": (lambda x, U, V, b: linear(linear(x, V, b), U), (*given, zero)),
    }


def case(timer: KernelTimer, o: int, i: int, r: int, n: int) -> Case:
    """One layer."""

    def made() -> tuple[Expected, dict[str, Way]]:
        make = partial(torch.randn, device=timer.device, dtype=timer.precision.dtype)
        x, U, V = make(n, i), make(o, r) / r**0.5, make(r, i) / i**0.5
        return expect(two_linears, x, (U, V)), ways(x, U, V)

    return kernel_case(timer, f"{o} x {i}, rank {r}, {n} tokens", made)


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--tokens", default=TOKENS)
    given = parser.parse_args()
    timer = timer_of(given)
    shapes = [tuple(map(int, shape.split("x"))) for shape in given.shapes.split(",")]
    return run(given, [case(timer, *shape, n) for shape, n in product(shapes, numbers(given.tokens))])


if __name__ == "__main__":
    sys.exit(main())
