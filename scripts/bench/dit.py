"""Times a forward pass of DiT-XL/2: dense, low rank, and BLAST b=9 by our kernels and by torch.

    python scripts/bench/dit.py [--tokens 16384 256] [--seconds 90] [--device cuda] [--blocks 28]

The transformer of the block low-rank paper (28 blocks of width 1152, 16 heads; qkv, fc1 and adaLN
replaced as in its table 3: ranks 384, 256 and 256; batch 1; bfloat16), made of torch modules here with
random weights: no diffusers is needed, and q, k and v are one matrix as there. The paper times one
step at 16K tokens. First a block of every arm is compared with one in float32 that has the composed
dense weights; then the arms are sampled in turn, each as one CUDA graph of all blocks. Arms under
torch.compile, a block each, follow as long as there is time. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blr.compressor.bench.timing import CpuSampler, CudaSampler, Rotation, interleave, spread
from blr.compressor.modeling.layers import StructuredLinear
from blr.compressor.structures.specs import BlastSpec, LowRankSpec
from blr.kernels.layers.blast import reference

WIDTH, HEADS, BLOCKS = 1152, 16, 9
RANKS = {"qkv": (3 * WIDTH, 384), "fc1": (4 * WIDTH, 256), "adaLN": (6 * WIDTH, 256)}
ARMS = ("dense", "svd", "blast-torch", "blast")
GATE = 2e-2  # relative error of one block in bfloat16


class TorchBlast(StructuredLinear):
    """The same layer by batched products of torch: what the paper starts from."""

    def forward(self, x: Any) -> Tensor:
        return reference.blast_linear(x, self.U, self.S, self.V, self.bias)


class Block(nn.Module):
    """A block of DiT: modulation by the condition, attention, MLP."""

    def __init__(self, arm: str) -> None:
        super().__init__()
        self.adaLN, self.qkv, self.fc1 = (made(arm, *RANKS[name]) for name in ("adaLN", "qkv", "fc1"))
        self.out, self.fc2 = random_linear(WIDTH, WIDTH), random_linear(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """x [1, t, d] and the condition [1, d] -> [1, t, d]."""
        shift1, scale1, gate1, shift2, scale2, gate2 = (
            part[:, None] for part in self.adaLN(F.silu(condition)).chunk(6, -1)
        )
        q, k, v = self.qkv(normed(x) * (1 + scale1) + shift1).chunk(3, -1)
        heads = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        x = x + gate1 * self.out(attended)
        middle = F.gelu(self.fc1(normed(x) * (1 + scale2) + shift2), approximate="tanh")
        return x + gate2 * self.fc2(middle)


def normed(x: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,), eps=1e-6)


class Transformer(nn.Module):
    """`blocks` of them, one after the other."""

    def __init__(self, arm: str, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(arm) for _ in range(blocks))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, condition)
        return x


def random_linear(o: int, i: int) -> nn.Linear:
    layer = nn.Linear(i, o)
    nn.init.normal_(layer.weight, std=i**-0.5)
    return layer


def made(arm: str, o: int, rank: int) -> nn.Module:
    """A layer of an arm with weights of variance 1/in, whatever its structure."""
    if arm == "dense":
        return random_linear(o, WIDTH)
    if arm == "svd":
        layer: Any = StructuredLinear(LowRankSpec(WIDTH, o, rank), bias=True)
    else:
        kind = TorchBlast if arm == "blast-torch" else StructuredLinear
        layer = kind(BlastSpec(WIDTH, o, BLOCKS, rank), bias=True)
        nn.init.normal_(layer.S)
    nn.init.normal_(layer.U, std=rank**-0.5)
    nn.init.normal_(layer.V, std=WIDTH**-0.5)
    return layer


def composed(block: Block) -> Block:
    """The dense block, in float32, of the same weights."""
    dense = Block("dense").to(next(block.parameters()).device)
    for name, layer in block.named_children():
        target: Any = getattr(dense, name)
        weight = layer.composed() if hasattr(layer, "composed") else layer.weight
        target.weight.data, target.bias.data = weight.detach().float(), layer.bias.detach().float()
    return dense


def error_of(block: Block, call: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> float:
    """Of what `call` computes with the block's weights, against float32 with composed ones."""
    single = Block.__new__(Block)
    nn.Module.__init__(single)
    for name, layer in block.named_children():
        setattr(single, name, layer)
    expected = composed(single.float())(*(t.float() for t in inputs))
    block.to(inputs[0].dtype)
    found = call(*inputs).float() - inputs[0].float()
    expected -= inputs[0].float()
    return float((found - expected).norm() / expected.norm())


def models(device: str, dtype: torch.dtype, blocks: int) -> Iterator[tuple[str, Transformer]]:
    """Every arm with random weights, rounded to `dtype`."""
    for arm in ARMS:
        torch.manual_seed(0)
        yield arm, Transformer(arm, blocks).to(device).to(dtype).eval().requires_grad_(False)


def compiled(model: Transformer) -> Transformer:
    """The same weights, every block by one compiled function."""
    copy = Transformer.__new__(Transformer)
    nn.Module.__init__(copy)
    call = torch.compile(Block.forward, dynamic=False)
    copy.blocks = nn.ModuleList()
    for block in model.blocks:
        wrapped = Block.__new__(Block)
        nn.Module.__init__(wrapped)
        for name, layer in block.named_children():
            setattr(wrapped, name, layer)
        wrapped.forward = call.__get__(wrapped)  # type: ignore[method-assign]
        copy.blocks.append(wrapped)
    return copy


@torch.no_grad()
def measure(arms: dict[str, Any], inputs: tuple[Tensor, ...], rounds: int) -> dict[str, Any]:
    """Milliseconds of every arm, sampled in turn."""
    cuda, samplers = inputs[0].is_cuda, {}
    flush = torch.empty(1 << 27, dtype=torch.uint8, device=inputs[0].device)
    pool = torch.cuda.graph_pool_handle() if cuda else None
    for name, call in arms.items():
        call(*inputs)
        rotation = Rotation(inputs, l2=1)
        samplers[name] = CudaSampler(call, rotation, flush, pool) if cuda else CpuSampler(call, rotation)
        samplers[name].output = None
    times = interleave(samplers, rounds, lambda name, error: print(f"{name}: {error}"), 5.0)
    return {name: spread(found) for name, found in times.items()}


def row(tokens: int, name: str, found: Any, dense: float, error: float) -> str:
    quartiles = f"{found.low:.3f}–{found.high:.3f}"
    return f"| {tokens} | {name} | {found.ms:.3f} | {quartiles} | {dense / found.ms:.2f} | {error:.1e} |"


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 256])
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--blocks", type=int, default=28)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    started, dtype = time.monotonic(), getattr(torch, options.dtype)
    made_of = dict(models(options.device, dtype, options.blocks))
    results: list[dict[str, Any]] = []
    print("| tokens | arm | ms | quartiles | × dense | error of a block |\n|---|---|---|---|---|---|")
    for turn, tokens in enumerate(options.tokens):
        inputs = (
            torch.randn(1, tokens, WIDTH, device=options.device, dtype=dtype),
            torch.randn(1, WIDTH, device=options.device, dtype=dtype),
        )
        arms: dict[str, Any] = {}
        errors: dict[str, float] = {}
        share = options.seconds * (turn + 0.6) / len(options.tokens)
        for kind in ("", "-compiled"):
            for name, model in made_of.items():
                if kind and time.monotonic() - started > share:
                    print(f"{name}{kind}: not compiled, out of time")
                    continue
                arm = compiled(model) if kind else model
                error = errors[name + kind] = error_of(model.blocks[0], arm.blocks[0], inputs)
                if not error < GATE:
                    print(f"{name}{kind}: wrong by {error:.2e}, not timed")
                    continue
                arms[name + kind] = arm
        found = measure(arms, inputs, options.rounds)
        for name, timed in found.items():
            print(row(tokens, name, timed, found["dense"].ms, errors[name]), flush=True)
            results.append({"tokens": tokens, "arm": name, "ms": timed.ms, "error": errors[name]})
    device = torch.cuda.get_device_name() if options.device.startswith("cuda") else "cpu"
    about = {"device": device, "torch": torch.__version__, "seconds": time.monotonic() - started}
    print(json.dumps({**about, "blocks": options.blocks, "rows": results}))


if __name__ == "__main__":
    main()
