"""Decoding attention on a GPU: whole and int8 caches, long contexts, every ratio of heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from rows import Row, bounded, relative
from tolerances import TOLERANCES

from blr.kernels.decode.attention import launch, reference, rounded

pytestmark = pytest.mark.gpu
Judge = Callable[[Iterable[Row]], None]
HEADS = 2  # of keys
# queries a key head, size of a head, slots, position of the longer row
SHAPES = ((1, 128, 4099, 4097), (2, 96, 1027, 1024), (3, 64, 700, 513), (4, 128, 33001, 32768),
          (5, 64, 300, 0), (7, 96, 2050, 2047), (8, 128, 8200, 8191), (8, 32, 140, 63))  # fmt: skip
SPLITS: dict[str, dict[str, Any]] = {"its own splits": {}, "one split": {"splits": 1}}
SHORT = 1100  # slots that an interpreter takes


def inputs(group: int, width: int, length: int, here: int, dtype: Any, device: str) -> dict[str, Any]:
    """Two rows, the second of half the tokens; whole keys and values."""
    generator = torch.Generator(device).manual_seed(group)

    def random(*size: int) -> Any:
        return torch.randn(size, generator=generator, device=device)

    angle = torch.arange(length, device=device)[:, None] * random(width // 2).repeat(2)
    return {
        "qkv": random(2, HEADS * (group + 2) * width),
        **{name: random(2, HEADS, length, width).to(dtype) for name in "kv"},
        **{"cos": angle.cos(), "sin": angle.sin(), "scale": width**-0.5},
        "pos": torch.tensor([here, here // 2], device=device),
        "start": torch.tensor([here // 3, 0], device=device),
    }


def packed(given: dict[str, Any]) -> dict[str, Any]:
    """The same in int8."""
    k, v = (rounded.pack(given[name]) for name in "kv")
    return {**given, "k": k[0], "v": v[0], "scales": (k[1], v[1])}


def run(given: dict[str, Any], **options: Any) -> Any:
    rows, kv_heads, length, width = given["k"].shape
    heads = given["qkv"].shape[1] // width - 2 * kv_heads
    device = given["k"].device
    space = launch.attention_workspace(rows, heads, kv_heads, width, device)
    out = torch.full((rows, heads * width), float("nan"), device=device)
    bucket = 1 << (length - 1).bit_length()
    return launch.decode_attention(**given, bucket=bucket, workspace=space, out=out, **options)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention(shape: tuple[int, int, int, int], device: str, judge: Judge) -> None:
    """Every kernel against the reference in float64, over what the cache stands for."""
    if device == "cpu" and shape[2] > SHORT:
        pytest.skip("takes minutes in the interpreter")
    judge(compare(shape, device))


def compare(shape: tuple[int, int, int, int], device: str) -> Iterator[Row]:
    half = torch.bfloat16 if device == "cuda" else torch.float16
    for dtype in (torch.float32, half):
        given = inputs(*shape, dtype, device)
        truth = exact(given)
        for name, options in SPLITS.items():
            error = relative(run(given, **options), truth)
            yield bounded(f"attention {shape}", f"{name} {dtype}", error, TOLERANCES[dtype])
    given = packed(inputs(*shape, torch.float32, device))
    truth = exact(given)
    for name, options, dtype in (("float32", {"exact": True}, torch.float32), ("16 bits", {}, half)):
        found = run({**given, "k": given["k"].clone(), "v": given["v"].clone()}, **options)
        yield bounded(f"attention {shape}", f"int8, {name}", relative(found, truth), TOLERANCES[dtype])


def exact(given: dict[str, Any]) -> Any:
    """By the reference in float64, on a cache of its own."""
    own = {name: given[name].clone() for name in "kv"}
    wide = {name: given[name].double() for name in ("qkv", "cos", "sin")}
    if "scales" in given:
        own["scales"] = tuple(scale.clone() for scale in given["scales"])
    else:
        own = {name: cache.double() for name, cache in own.items()}
    return reference.decode_attention(**{**given, **own, **wide}).float()
