"""Decoding attention over long caches: microseconds of a layer and bytes a second, by kernel and sizes.

    python scripts/bench/attention.py [--quick] [--tokens] [--json FILE]

Each figure is of one layer of a CUDA graph over eight layers with caches of their own, more than a cache
of the GPU holds. First every kernel is compared with the reference: no time without that. With --tokens,
whole tokens of 8B shapes too, over caches of noise (`blr bench decode` takes prompts and checks logits).
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from graphs import captured

from blr.kernels.decode.attention import launch, reference

LAYERS = 8
WIDTH = 128
# query heads, key heads: Llama-3.1-8B and Llama-7B
MODELS = {"8b": (32, 8), "7b": (32, 32)}
TILES = [
    {},
    *({"BN": n, "num_warps": w, "STAGES": s} for n, w, s in ((32, 4, 3), (64, 4, 2), (64, 4, 4))),
    *({"BN": n, "num_warps": w, "STAGES": s} for n, w, s in ((128, 4, 2), (128, 8, 3), (64, 8, 3))),
]


def made(model: str, rows: int, slots: int, kind: str) -> list[dict[str, Any]]:
    """Arguments of `decode_attention` for each layer; kind: "whole" or "int8"."""
    heads, kv_heads = MODELS[model]
    like: dict[str, Any] = {"device": "cuda"}
    shape = (rows, kv_heads, slots, WIDTH)
    angle = torch.rand(slots, WIDTH // 2, **like).repeat(1, 2)
    shared = {
        "qkv": torch.randn(rows, (heads + 2 * kv_heads) * WIDTH, **like),
        **{"cos": angle.cos(), "sin": angle.sin(), "scale": WIDTH**-0.5},
        "pos": torch.full((rows,), slots - 2, **like),
        "start": torch.zeros(rows, dtype=torch.int64, **like),
    }
    layers = []
    for _ in range(LAYERS):
        if kind == "whole":
            cache = {name: torch.randn(shape, dtype=torch.bfloat16, **like) for name in "kv"}
        else:
            cache = {name: torch.randint(-127, 128, shape, dtype=torch.int8, **like) for name in "kv"}
            cache["scales"] = tuple(torch.rand(shape[:3], **like) / 127 for _ in "kv")
        layers.append({**shared, **cache})
    return layers


def runner(model: str, layers: list[dict[str, Any]], options: dict[str, Any]) -> Any:
    """A function of a layer's number."""
    (heads, kv_heads), rows = MODELS[model], len(layers[0]["qkv"])
    space = launch.attention_workspace(rows, heads, kv_heads, WIDTH, "cuda")
    out = torch.zeros(rows, heads * WIDTH, device="cuda")
    bucket = 1 << (layers[0]["k"].shape[2] - 1).bit_length()
    given = {"bucket": bucket, "workspace": space, "out": out, **options}
    return lambda n: launch.decode_attention(**layers[n], **given)


def microseconds(run: Any, replays: int = 20) -> float:
    """Of one of `LAYERS` calls in a graph, the least of three."""
    graph = captured(*(partial(run, n) for n in range(LAYERS)))
    times = []
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / replays / LAYERS)
    return min(times)


def error(layer: dict[str, Any], found: Any) -> float:
    """Relative, against the reference in float32 over the same cache, new token included."""
    own = {name: layer[name].clone() for name in "kv"}
    if "scales" in layer:
        own["scales"] = tuple(scale.clone() for scale in layer["scales"])
    else:
        own = {name: cache.float() for name, cache in own.items()}
    truth = reference.decode_attention(**{**layer, **own})
    return float((found - truth).norm() / truth.norm())


def case(model: str, rows: int, slots: int, quick: bool) -> list[dict[str, Any]]:
    """All arms of one shape, the fastest first."""
    found = []
    for kind in ("whole", "int8"):
        layers = made(model, rows, slots, kind)
        tokens = layers[0]["k"].nbytes + layers[0]["v"].nbytes
        size = tokens + sum(scale.nbytes for scale in layers[0].get("scales", ()))
        arms = [("registers", {"streamed": False})] if kind == "whole" else []
        arms += [("streamed", {"streamed": True, **tile}) for tile in (TILES[:1] if quick else TILES)]
        programs = rows * MODELS[model][1]
        splits = {launch.even_count(programs, slots, launch.PROGRAMS) * n for n in (1, 2, 4)}
        splits = sorted(n for n in splits if n <= launch.MAX_SPLITS and slots // n >= 64)
        for (name, options), count in product(arms, splits):
            told = {"model": model, "rows": rows, "slots": slots, "cache": kind, "kernel": name}
            told |= {k: v for k, v in options.items() if k != "streamed"} | {"splits": count}
            try:
                run = runner(model, layers, {**options, "splits": count})
                wrong = error(layers[0], run(0).clone())
                told["error"] = wrong
                if wrong <= 2.4e-2:
                    told["us"] = microseconds(run)
                    told["tbps"] = size / told["us"] * 1e-6
            except Exception as reason:  # the next arm may fit where this one does not
                told["failed"] = f"{type(reason).__name__}: {str(reason).splitlines()[0][:120]}"
            found.append(told)
        del layers
        torch.cuda.empty_cache()
    return sorted(found, key=lambda told: (told["cache"], told.get("us", 1e9)))


def whole_tokens(model: Any, structure: str, cache: str, rows: int, context: int) -> dict[str, Any]:
    """Milliseconds of a decoded token of `model` behind `context` slots."""
    from blr.compressor.runtime.decoder import Decoder

    decoder = Decoder(model, batch=rows, context=context + 130, mode="graph", cache=cache)
    held = decoder.state.kv
    held.data.random_(-127, 128) if cache == "int8" else held.data.normal_()
    if held.scale_data is not None:
        held.scale_data.uniform_(0, 2 / 127)
    decoder.rows, decoder.position = rows, context
    decoder.state.pos[:rows] = context
    token = torch.zeros(rows, dtype=torch.int64, device="cuda")
    times = []
    for _ in range(4):
        torch.cuda.synchronize()
        begun = perf_counter()
        for _ in range(32):
            decoder.step(token)
        torch.cuda.synchronize()
        times.append((perf_counter() - begun) * 1e3 / 32)
    attention = [phase for phase in decoder.plan.phases if phase.kind == "attention"]
    return {
        **{"token": structure, "cache": cache, "rows": rows, "context": context, "ms": min(times[1:])},
        "cache_gb": sum(decoder.bytes_of(phase) for phase in attention) / 1e9,
    }


@torch.no_grad()
def all_tokens() -> list[dict[str, Any]]:
    """Dense, low-rank and int4 models, whole and int8 caches."""
    from blr.compressor.bench.decode.models import Models, find_subject

    models = Models(find_subject("8b"), torch.device("cuda"), torch.bfloat16, 33000)
    found = []
    for structure, kind in (("lowrank", ""), ("lowrank", "int4"), ("dense", "")):
        model = models.get(structure, kind)
        for rows, context in ((1, 8192), (1, 32768), (4, 32768)):
            base = None
            for cache in ("whole", "int8"):
                told = whole_tokens(model, f"{structure}-{kind}".rstrip("-"), cache, rows, context)
                base = base or told["ms"]
                found.append({**told, "faster": base / told["ms"]})
                say(found[-1])
    return found


def say(told: dict[str, Any]) -> None:
    """One line."""
    words = (f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in told.items())
    print(" ".join(words), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the default tiles only")
    parser.add_argument("--tokens", action="store_true", help="whole tokens first")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--shapes", default="8b:1:32768,8b:1:8192,8b:4:32768,7b:1:8192")
    options = parser.parse_args()
    rows = all_tokens() if options.tokens else []
    for shape in options.shapes.split(","):
        model, batch, slots = shape.split(":")
        found = case(model, int(batch), int(slots), options.quick)
        rows += found
        for told in found:
            say(told)
    if options.json:
        options.json.write_text(json.dumps(rows))
    if any("error" in told and not told["error"] <= 2.4e-2 for told in rows):
        sys.exit("some results are wrong: these have no times")


if __name__ == "__main__":
    main()
