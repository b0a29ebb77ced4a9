"""Which algorithm, and with which tiles, multiplies by one Kronecker-sparse factor.

The least cost of `cost.py` decides. The published rule takes the fused kernel from a threshold on the
predictor h(b, c) = (b + c)/(bc) on, bytes of activations for each multiplication, and the permutations
below it. On an H200 cuBLAS and copies at 3.4 TB/s move the crossing far up: the paper's thresholds would
take the fused kernel where it is up to 8 times slower.
Source: "Fast Inference with Kronecker-Sparse Matrices", section 4 and figure 7.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from blr.kernels.layers.kronecker.cost import (
    A100,
    DENSE_BYTES,
    H200,
    Machine,
    Problem,
    blocks_seconds,
    dense_seconds,
    densifiable,
    fused_seconds,
    permute_seconds,
    split_seconds,
)
from blr.kernels.layers.kronecker.tiles import DECODE_ROWS, Config, dense_config, fused_config

__all__ = ["A100", "H200", "Choice", "Machine", "Problem", "choose", "estimates", "fused_config"]

Choice = tuple[str, Config]
DENSE = (2, 4, 8, 16)  # columns d that one kernel takes as a dense block
SPLIT_MARGIN = 1.1  # "split" has to be so many times faster, since it is not IEEE arithmetic


def estimates(p: Problem, machine: Machine = H200) -> dict[str, tuple[float, Config]]:
    """Every way that fits the problem: name to (seconds, configuration of the variant).

    Names are variants, those of the fused kernels their paths ("plain", "grouped", "dense").
    """
    config = fused_config(p, machine, 0)
    ways: dict[str, tuple[float, Config]] = {config["path"]: (fused_seconds(p, config, machine), config)}
    ways["permute"] = permute_seconds(p, machine), {}
    if p.kind == "fp32":
        ways["split"] = SPLIT_MARGIN * split_seconds(p, machine), {}
    if p.d > 1 and p.n > DECODE_ROWS:
        if densifiable(p) or p.weights * p.d * p.size <= DENSE_BYTES:
            ways["blocks"] = blocks_seconds(p, machine), {}
        if p.d in DENSE and densifiable(p):
            dense = dense_config(p)
            ways["dense"] = dense_seconds(p, dense, machine), dense
    return ways


def choose(p: Problem, machine: Machine = H200) -> Choice:
    """(variant, config) for one factor; config is {path, tiles} for "fused", else empty. Up to
    `DECODE_ROWS` rows take the kernel without tensor cores, whatever the cost."""
    config = fused_config(p, machine)
    if config["path"] == "decode":
        library = p.d == 1 and p.n > 1 and p.kind == "half"  # its own kernels for few rows are faster
        return ("permute", {}) if library else ("fused", config)
    ways = estimates(p, machine)
    name = min(ways, key=lambda way: ways[way][0])
    config = ways[name][1]
    return ("fused", config) if "path" in config else (name, config)


@lru_cache(maxsize=4096)
def cached_choice(p: Problem, machine: Machine) -> tuple[str, tuple[tuple[str, Any], ...]]:
    """`choose` once for a problem; the configuration as pairs."""
    variant, config = choose(p, machine)
    return variant, tuple(config.items())
