"""Times the weighted BLAST fit of one Llama-7B decoder layer and its peak device memory.

    python scripts/bench/fit_layer.py [--rounds 100] [--device cuda]

Synthetic: weights with a spectrum falling as k^-0.5, inputs with one falling as k^-1 in a random
basis. Ranks are those of the published CF 2 configuration (b=16). The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from blr.compressor.structures import blast, lowrank
from blr.compressor.structures.base import FitOptions, relative_error
from blr.compressor.structures.specs import BlastSpec, LowRankSpec

PROJECTIONS = {  # name: (out, in, rank)
    **dict.fromkeys(["q", "k", "v", "o"], (4096, 4096, 1024)),
    **dict.fromkeys(["gate", "up"], (11008, 4096, 1488)),
    "down": (4096, 11008, 1488),
}


def random_weight(o: int, i: int, device: str) -> torch.Tensor:
    """[o, i] with singular values falling as k^-0.5."""
    small = min(o, i)
    left = torch.linalg.qr(torch.randn(o, small, device=device))[0]
    right = torch.linalg.qr(torch.randn(i, small, device=device))[0]
    return (left * torch.arange(1, small + 1, device=device) ** -0.5) @ right.mT


def random_gram(i: int, device: str) -> torch.Tensor:
    """[i, i] with eigenvalues falling as k^-1 and mean diagonal 1."""
    basis = torch.linalg.qr(torch.randn(i, i, device=device))[0]
    values = 1.0 / torch.arange(1, i + 1, device=device)
    gram = (basis * values) @ basis.mT
    return gram / gram.diagonal().mean()


def measure(name: str, rounds: int, device: str) -> dict[str, object]:
    """Seconds, peak memory and errors of one projection."""
    o, i, rank = PROJECTIONS[name]
    weight, gram = random_weight(o, i, device), random_gram(i, device)
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    started = time.monotonic()
    spec = BlastSpec(i, o, 16, rank)
    fit = blast.fit(weight, spec, gram, FitOptions(rounds=rounds))
    if cuda:
        torch.cuda.synchronize()
    seconds = time.monotonic() - started
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
    low = LowRankSpec(i, o, rank)
    base = lowrank.reconstruct(lowrank.fit(weight, low, gram).tensors, low)
    return {
        "projection": name,
        "seconds": round(seconds, 2),
        "peak_gib": peak and round(peak, 2),
        "error": relative_error(weight, blast.reconstruct(fit.tensors, spec), gram),
        "low_rank_error": relative_error(weight, base, gram),
        "rounds": len(fit.losses) - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=blast.ROUNDS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for name in PROJECTIONS:
        rows.append(measure(name, arguments.rounds, arguments.device))
        print(rows[-1], flush=True)
    total = sum(float(row["seconds"]) for row in rows)
    peaks = [float(row["peak_gib"] or 0) for row in rows]
    print(json.dumps({"layer_seconds": round(total, 1), "peak_gib": max(peaks), "rows": rows}))


if __name__ == "__main__":
    main()
