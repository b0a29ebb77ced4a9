"""What other grids than integers would gain at two bits: errors of rounding a model's own layers.

    python scripts/bench/grids.py MODEL TEXT [--blocks 1,3] [--windows 32]

For every linear layer of some blocks, the error that its inputs see, tr(E H Eᵀ) / tr(W H Wᵀ), behind
compensation (GPTQ), as a mean by grid:

    int2 gG           as blr stores it, scales for G numbers
    int2 rotated      inputs and outputs in random orthogonal bases, a scale a row
    E8P gG, rotated   vectors of eight, each one of 2^16 points around E8 (QuIP#, arXiv 2402.04396);
                      eight columns are rounded at once, those behind make good their error

and the mean squared error of a Gaussian of variance 1 at its best scale, where 2 bits can give .0625.
Bits a weight with their scales stand in brackets, for layers of 4096 inputs.
"""

from __future__ import annotations

import argparse
import itertools
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blr.compressor.structures.gptq import compensation, gptq

DIMENSIONS, CHUNK = 8, 4096
RATIOS = (0.8, 0.9, 1.0, 1.1, 1.2)  # of scales tried


def patterns() -> Tensor:
    """The 256 magnitudes [256, 8]: all of half-integers whose squares sum to 10 at most, 29 of 12."""
    every = torch.tensor(list(itertools.product((0.5, 1.5, 2.5), repeat=DIMENSIONS)))
    squares = every.square().sum(1)
    return torch.cat([every[squares <= 10], every[squares == 12][:29]])


def nearest(x: Tensor, magnitudes: Tensor) -> Tensor:
    """The nearest points of E8P to vectors `x` [n, 8]."""
    return torch.cat([_nearest(part, magnitudes) for part in x.split(CHUNK)])


def _nearest(x: Tensor, magnitudes: Tensor) -> Tensor:
    odd = magnitudes.sum(1) % 2 == 1
    best, found = x.new_full((len(x),), float("inf")), torch.zeros_like(x)
    for shift in (0.25, -0.25):
        y = x - shift
        signs = torch.where(y < 0, -1.0, 1.0)
        wrong = ((signs < 0).sum(1) % 2 == 1)[:, None] != odd  # an even sum asks for one flip more
        flips = (y.abs()[:, None] * magnitudes).min(2)
        costs = y.square().sum(1)[:, None] - 2 * y.abs() @ magnitudes.mT + magnitudes.square().sum(1)
        cost, chosen = (costs + 4 * flips.values * wrong).min(1)
        flipped = wrong.gather(1, chosen[:, None])[:, 0]
        at = flips.indices.gather(1, chosen[:, None])
        signs = torch.where(flipped[:, None], signs.scatter(1, at, -signs.gather(1, at)), signs)
        better = cost < best
        found[better] = (signs * magnitudes[chosen] + shift)[better]
        best = torch.minimum(best, cost)
    return found


def vectors(weight: Tensor, root: Tensor, group: int, ratio: float, magnitudes: Tensor) -> Tensor:
    """`weight` [o, i] rounded eight columns at a time; scales are `ratio` of what gives a group of a row
    the points' mean square, as it stands when its turn comes."""
    left, value = weight.clone(), torch.empty_like(weight)
    mean_square = magnitudes.square().sum(1).mean() / DIMENSIONS
    for first in range(0, weight.shape[1], group):
        own = left[:, first : first + group]
        scale = ratio * (own.square().mean(1, keepdim=True) / mean_square).sqrt()
        for start in range(first, first + own.shape[1], DIMENSIONS):
            at, behind = slice(start, start + DIMENSIONS), slice(start + DIMENSIONS, None)
            value[:, at] = nearest(left[:, at] / scale, magnitudes) * scale
            error = left[:, at] - value[:, at]
            missed = torch.linalg.solve_triangular(root[at, at], error, upper=True, left=False)
            left[:, behind] -= missed @ root[at, behind]
    return value


def orthogonal(size: int) -> Tensor:
    return torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))[0]


def errors(weight: Tensor, gram: Tensor, magnitudes: Tensor) -> dict[str, float]:
    """By grid, of `weight` [o, i] behind inputs of Gram matrix `gram` [i, i], both float64."""
    found: dict[str, float] = {}

    def add(name: str, value: Tensor, w: Tensor, h: Tensor) -> None:
        missed = w - value
        error = float((missed @ h * missed).sum() / (w @ h * w).sum())
        found[name] = min(error, found.get(name, error))

    def vectored(name: str, w: Tensor, h: Tensor, group: int) -> None:
        root = compensation(h)
        for ratio in RATIOS:
            add(name, vectors(w, root, group, ratio, magnitudes), w, h)

    root, rows = compensation(gram), weight.shape[1]
    for group in (128, 64):
        bits = f"g{group} ({2 + 16 / group:.3f})"
        add(f"int2 {bits}", gptq(weight, root, 2, group, torch.float32).value, weight, gram)
        vectored(f"E8P {bits}", weight, gram, group)
    left, right = orthogonal(weight.shape[0]), orthogonal(rows)
    w, h = left @ weight @ right, right.mT @ gram @ right
    add("int2 rotated (2.004)", gptq(w, compensation(h), 2, rows, torch.float32).value, w, h)
    vectored("E8P rotated (2.004)", w, h, rows)
    return found


def gaussian(magnitudes: Tensor) -> float:
    """Mean squared error of E8P of numbers of variance 1."""
    x = torch.randn(1 << 15, DIMENSIONS, dtype=torch.float64)
    tried = (r / 10 for r in range(6, 14))
    return min(float((nearest(x / s, magnitudes) * s - x).square().mean()) for s in tried)


def grams(model: Any, ids: Tensor, blocks: list[int]) -> dict[str, tuple[Tensor, Tensor]]:
    """Weight and Σ x xᵀ, float64, of every linear layer of those blocks."""
    found: dict[str, tuple[Tensor, Tensor]] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(module: Any, given: tuple[Tensor, ...], _: Tensor) -> None:
            x = given[0].flatten(0, -2).double()
            found[name] = module.weight.detach().double(), x.mT @ x

        return hook

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and any(f".layers.{n}." in name for n in blocks):
            module.register_forward_hook(note(name))
    with torch.no_grad():
        model(input_ids=ids)
    return found


def main() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--blocks", default="1,3")
    parser.add_argument("--windows", type=int, default=32)
    given = parser.parse_args()
    torch.manual_seed(0)
    magnitudes = patterns().double()
    print(f"Gaussian: E8P {gaussian(magnitudes):.4f} (four levels at best .1175)")
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    text = given.text.read_text(encoding="utf-8")[: 4096 * given.windows]
    ids = AutoTokenizer.from_pretrained(given.model)(text, return_tensors="pt").input_ids[0]
    ids = ids[: 512 * given.windows].view(-1, 512)
    by_grid: dict[str, list[float]] = defaultdict(list)
    for name, (weight, gram) in grams(model, ids, list(map(int, given.blocks.split(",")))).items():
        found = errors(weight, gram, magnitudes)
        print(
            f"{name:40s}", ", ".join(f"{grid} {error:.4f}" for grid, error in found.items()), flush=True
        )
        for grid, error in found.items():
            by_grid[grid].append(error)
    print("mean", ", ".join(f"{grid} {sum(e) / len(e):.4f}" for grid, e in by_grid.items()))


if __name__ == "__main__":
    main()
