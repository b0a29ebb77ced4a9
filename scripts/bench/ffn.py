"""A low-rank feed-forward layer alone: unfused, ours within a bound, FlashSVD's V1 and V2.

    python scripts/bench/ffn.py [--json FILE]

BERT-base's (768, 3072, GELU) and a gated one of Llama-7B's width, bf16, at several ranks: milliseconds
of a CUDA graph and of a call, MiB beside input and result, error against float32. First every result
is compared: no time without that.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from graphs import captured
from published import ffn
from torch import nn

from blr.compressor.bench.memory.run import milliseconds
from blr.compressor.bench.memory.track import transient_bytes
from blr.compressor.modeling.fused_activation import fuse_activations
from blr.compressor.modeling.layers import StructuredLinear
from blr.compressor.modeling.slices import bound_mlp
from blr.compressor.structures.specs import LowRankSpec
from blr.kernels.common.transient import VARIABLE

CASES = [
    *(("gelu", 32768, 768, 3072, rank) for rank in (192, 384, 768)),
    *(("silu", 8192, 4096, 11008, rank) for rank in (512, 1488)),
]
LIMIT = 3e-2
BOUNDS = (32, 64, 128)


class Mlp(nn.Module):
    """Of one case; `run` by an arm's name."""

    def __init__(self, activation: str, width: int, middle: int, rank: int) -> None:
        super().__init__()
        self.activation = activation
        self.act = nn.SiLU() if activation == "silu" else nn.GELU()
        for name in ("up", "gate", "down") if activation == "silu" else ("up", "down"):
            sizes = (middle, width) if name == "down" else (width, middle)
            self.add_module(name, StructuredLinear(LowRankSpec(*sizes, rank), bias=activation == "gelu"))
        self.to("cuda", torch.bfloat16).requires_grad_(False)
        fuse_activations(self)
        bound_mlp(self)

    def forward(self, x: Any) -> Any:
        if "gate" in self._modules:
            return self.down(self.act(self.gate(x)) * self.up(x))
        return self.down(self.act(self.up(x)))

    def run(self, arm: str, x: Any) -> Any:
        """The result for x [1, n, i]."""
        if arm in ffn.FORMS:
            layers = {n: f for n, f in self.named_children() if n != "act"}
            made = {n: ffn.Factors(f.U, f.V, f.bias) for n, f in layers.items()}
            return ffn.FORMS[arm](x[0], made["up"], made["down"], self.activation, made.get("gate"))[
                None
            ]
        os.environ[VARIABLE] = "off" if arm == "unfused" else arm.partition("-")[2]
        return self(x)


def case(activation: str, n: int, width: int, middle: int, rank: int) -> list[dict[str, Any]]:
    """All arms of one case."""
    device = torch.device("cuda", 0)
    layers, x = Mlp(activation, width, middle, rank), torch.randn(1, n, width, device=device)
    x, rows = x.bfloat16(), []
    truth = layers.run("unfused", x).float()
    for arm in ("unfused", *(f"ours-{mib}" for mib in BOUNDS), *ffn.FORMS):
        told = {"activation": activation, "n": n, "rank": rank, "arm": arm}
        try:
            found = layers.run(arm, x)
            told["error"] = float((found - truth).norm() / truth.norm())
            del found
            if told["error"] <= LIMIT:
                run = lambda arm=arm: layers.run(arm, x)  # noqa: E731
                told["mib"] = transient_bytes(run, device) / 2**20
                told["ms"] = min(milliseconds(run, device) for _ in range(5))
                graph = captured(run)
                told["graph"] = min(milliseconds(graph.replay, device) for _ in range(5))
        except Exception as reason:  # the next arm may run where this one does not
            told["failed"] = f"{type(reason).__name__}: {str(reason).splitlines()[0][:120]}"
        rows.append(told)
        words = (f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in told.items())
        print(" ".join(words), flush=True)
        torch.cuda.empty_cache()
    return rows


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [row for settings in CASES for row in case(*settings)]
    if options.json:
        options.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
