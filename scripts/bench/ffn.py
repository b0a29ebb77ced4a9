"""A low-rank feed-forward layer: whole, in slices of tokens, and by FlashSVD's V1 and V2; us and MiB.

    python scripts/bench/ffn.py [--cases gelu:32768:768:3072:192,silu:8192:4096:11008:1488]

A case is an activation, tokens, width, middle and rank; silu has a gate. BERT-base's and Llama-7B's by
default. What bounded passes of whole models take is `blr bench memory`'s.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from case_files import Way, kernel_case, options, run, timer_of
from published.ffn import FORMS, Factors, reference
from torch import Tensor

from blr.compressor.bench.checks import Expected, expect
from blr.compressor.bench.harness import Case
from blr.compressor.bench.layer_problem import KernelTimer

CASES = (
    "gelu:32768:768:3072:192,gelu:32768:768:3072:384,gelu:32768:768:3072:768,"
    "silu:8192:4096:11008:512,silu:8192:4096:11008:1488"
)
LIMIT = 3e-2  # relative error in bf16
BOUNDS = (32, 64, 128)  # MiB of the middle of a slice


def sliced(rows: int, x: Tensor, *rest: Any) -> Tensor:
    """The layer on so many tokens at a time, as bounded passes of models run it."""
    return torch.cat([reference(part, *rest) for part in x.split(max(rows, 1))])


def layers(tensors: tuple[Tensor, ...]) -> tuple[Factors, Factors, Factors | None]:
    """Up, down and gate of their factors."""
    made = [Factors(u, v) for u, v in zip(tensors[::2], tensors[1::2], strict=True)]
    return made[0], made[1], made[2] if len(made) > 2 else None


def case(timer: KernelTimer, activation: str, n: int, width: int, middle: int, rank: int) -> Case:
    """All forms of one layer."""
    form = lambda run: lambda x, *t: run(x, *layers(t)[:2], activation, layers(t)[2])  # noqa: E731

    def made() -> tuple[Expected, dict[str, Way]]:
        make = partial(torch.randn, device=timer.device, dtype=timer.precision.dtype)
        sizes = [(width, middle), (middle, width), (width, middle)][: 3 if activation == "silu" else 2]
        pairs = ((make(o, rank) / rank**0.5, make(i, rank) / i**0.5) for i, o in sizes)
        arguments = (make(n, width), *(tensor for pair in pairs for tensor in pair))
        widest = middle * arguments[0].element_size() * (len(sizes) - 1)  # bytes of a token
        cuts = {f"slices of {mib} MiB": partial(sliced, (mib << 20) // widest) for mib in BOUNDS}
        runs = {"whole": reference, **cuts, **FORMS}
        expected = expect(form(reference), arguments[0], arguments[1:])
        return expected, {name: (form(run), arguments) for name, run in runs.items()}

    title = f"{activation}, {n} x {width}, {middle}, rank {rank}"
    return kernel_case(timer, title, made, LIMIT, memory=True)


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--cases", default=CASES)
    given = parser.parse_args()
    timer, split = timer_of(given), [text.split(":") for text in given.cases.split(",")]
    return run(given, [case(timer, act, *map(int, sizes)) for act, *sizes in split])


if __name__ == "__main__":
    sys.exit(main())
