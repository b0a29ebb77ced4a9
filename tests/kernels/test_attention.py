"""Decoding attention: the reference against plain float64 attention, the kernel against it too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiling import compile_for
from tolerances import TOLERANCES
from torch import Tensor

from blr.kernels.common.available import has_triton
from blr.kernels.decode.attention import launch, reference, rounded

# query heads, key heads, head size, rotated columns, slots, positions, starts, window
SHAPES: dict[str, tuple[int, int, int, int, int, list[int], list[int], int | None]] = {
    "mha": (3, 3, 32, 32, 160, [130], [0], None),
    "first-token": (4, 2, 16, 16, 130, [0, 0], [0, 0], None),
    "gqa-ragged": (6, 2, 24, 24, 300, [5, 70, 255], [0, 3, 64], None),
    "borders": (4, 1, 16, 16, 260, [63, 64, 127, 128], [0, 0, 0, 0], None),
    "last-splits-only": (4, 2, 16, 16, 260, [256, 200], [250, 199], None),
    "window": (4, 2, 16, 16, 260, [200, 10], [0, 2], 70),
    "partial-rotary": (2, 2, 32, 8, 70, [40], [1], None),
    "seven-a-head": (7, 1, 64, 64, 140, [129], [0], None),
}
SINKING = ("mha", "gqa-ragged", "borders", "window")


def inputs(shape: str, norm: bool, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of `decode_attention`; slots that must not be read hold NaN."""
    heads, kv_heads, width, turning, length, pos, start, window = SHAPES[shape]
    generator = torch.Generator().manual_seed(len(shape))

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    cache = [random(len(pos), kv_heads, length, width).to(dtype) for _ in range(2)]
    for row, (first, last) in enumerate(zip(start, pos, strict=True)):
        for tensor in cache:
            tensor[row, :, :first] = tensor[row, :, last:] = float("nan")
    angle = torch.arange(length)[:, None] * random(turning // 2)
    angle = torch.cat((angle, angle), -1).double()
    gains = {"q_gain": random(width).to(dtype), "k_gain": random(width).to(dtype), "eps": 1e-3}
    sinks = {"sinks": 3 * random(heads).to(dtype)} if shape in SINKING else {}
    return {
        **sinks,
        "qkv": random(len(pos), (heads + 2 * kv_heads) * width).float(),
        **{"k": cache[0], "v": cache[1], "cos": angle.cos().float(), "sin": angle.sin().float()},
        **{"pos": torch.tensor(pos), "start": torch.tensor(start)},
        **{"scale": width**-0.5, "window": window, **(gains if norm else {})},
    }


def expected(given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Result and the appended keys and values, in float64, one head of one row at a time."""
    real = [n for n, v in given.items() if isinstance(v, Tensor) and v.is_floating_point()]
    given = {**given, **{n: given[n].double() for n in real}}
    k, v = given["k"].clone(), given["v"].clone()
    rows, kv_heads, _, width = k.shape
    parts = given["qkv"].unflatten(-1, (-1, width))
    heads = parts.shape[1] - 2 * kv_heads
    out = torch.empty(rows, heads, width, dtype=torch.float64)
    for row in range(rows):
        here, first = int(given["pos"][row]), int(given["start"][row])
        low = first if given["window"] is None else max(first, here - given["window"] + 1)
        for head in range(heads + kv_heads):
            gain = given.get("q_gain" if head < heads else "k_gain")
            turned = turn(
                parts[row, head], gain, given.get("eps"), given["cos"], given["sin"], here - first
            )
            if head >= heads:
                k[row, head - heads, here] = turned
                v[row, head - heads, here] = parts[row, head + kv_heads]
            else:
                out[row, head] = turned
        for head in range(heads):
            own = head * kv_heads // heads
            scores = k[row, own, low : here + 1] @ out[row, head] * given["scale"]
            sink = given["sinks"][head : head + 1] if "sinks" in given else scores[:0]
            weights = torch.cat((scores, sink)).softmax(0)[: len(scores)]
            out[row, head] = weights @ v[row, own, low : here + 1]
    return out.flatten(1), k, v


# query heads a key head, size of a head, slots, position, start, window
PACKED: dict[str, tuple[int, int, int, int, int, int | None]] = {
    "mha": (1, 64, 150, 129, 0, None),
    "two": (2, 128, 140, 127, 3, None),
    "three": (3, 96, 140, 100, 0, 70),
    "four": (4, 64, 300, 255, 17, None),
    "eight": (8, 128, 140, 128, 0, None),
    "first": (4, 64, 130, 0, 0, None),
}


def packed_inputs(shape: str) -> dict[str, Any]:
    """Arguments of `decode_attention` on a cache in int8 of two rows, one shorter; what must not be
    read has a scale that is no number."""
    group, width, length, here, first, window = PACKED[shape]
    heads, generator = 2, torch.Generator().manual_seed(group)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    cache, scales = zip(*(rounded.pack(random(2, heads, length, width)) for _ in "kv"), strict=True)
    pos, start = torch.tensor([here, here * 2 // 3]), torch.tensor([first, first // 2])
    for scale in scales:
        for row in range(2):
            scale[row, :, : start[row]] = scale[row, :, pos[row] :] = float("nan")
    angle = torch.arange(length)[:, None] * random(width // 2).repeat(2)
    return {
        "qkv": random(2, heads * (group + 2) * width),
        **{"k": cache[0], "v": cache[1], "scales": scales, "cos": angle.cos(), "sin": angle.sin()},
        **{"pos": pos, "start": start, "scale": width**-0.5, "window": window},
        **({"q_gain": random(width), "k_gain": random(width), "eps": 1e-3} if group == 3 else {}),
    }


def copied(given: dict[str, Any]) -> dict[str, Any]:
    """The same, with a cache of its own."""
    own = {name: given[name].clone() for name in ("k", "v")}
    return {**given, **own, "scales": tuple(scale.clone() for scale in given["scales"])}


@pytest.mark.parametrize("shape", PACKED)
def test_reference_of_int8_equals_float64(shape: str) -> None:
    """What was there counts as what it stands for, what is new as what it is kept as."""
    given = packed_inputs(shape)
    whole = {
        n: rounded.unpack(given[n], s, torch.float32) for n, s in zip("kv", given["scales"], strict=True)
    }
    plain = {n: v for n, v in given.items() if n != "scales"}
    _, keys, values = expected({**plain, **whole})
    out = reference.decode_attention(**given)
    rows, heads = torch.arange(2), given["k"].shape[1]
    for held, scale, new in zip((given["k"], given["v"]), given["scales"], (keys, values), strict=True):
        kept = rounded.unpack(held, scale, torch.float32)[rows, :, given["pos"]]
        new = new[rows, :, given["pos"]]
        assert ((kept - new).abs() <= new.abs().amax(-1, keepdim=True) / 253).all()
    found = {
        n: rounded.unpack(given[n], s, torch.float64) for n, s in zip("kv", given["scales"], strict=True)
    }
    truth = whole_attention(given, found["k"], found["v"], heads)
    assert (out - truth).norm() <= TOLERANCES[torch.float32] * truth.norm()


def whole_attention(given: dict[str, Any], k: Tensor, v: Tensor, heads: int) -> Tensor:
    """In float64 over a cache that has the new token already."""
    width, rows = k.shape[3], []
    for row in range(2):
        here, first = int(given["pos"][row]), int(given["start"][row])
        low = first if given["window"] is None else max(first, here - given["window"] + 1)
        queries = given["qkv"][row].double().view(-1, width)[: -2 * heads]
        tables = (given["cos"].double(), given["sin"].double(), here - first)
        gain = given["q_gain"].double() if "q_gain" in given else None
        for n, query in enumerate(queries):
            own = n * heads // len(queries)
            query = turn(query, gain, given.get("eps", 0.0), *tables)
            scores = k[row, own, low : here + 1] @ query * given["scale"]
            rows.append(scores.softmax(0) @ v[row, own, low : here + 1])
    return torch.stack(rows).view(2, -1)


@pytest.mark.sampled(4)
@pytest.mark.skipif(not has_triton(), reason="needs triton")
@pytest.mark.parametrize("splits", [None, 1])
@pytest.mark.parametrize("exact", [True, False], ids=["float32", "dot"])
@pytest.mark.parametrize("shape", PACKED)
def test_streamed_int8_equals_the_reference(shape: str, exact: bool, splits: int | None) -> None:
    given = packed_inputs(shape)
    own = copied(given)
    wanted = reference.decode_attention(**given)
    found, counter = run_kernel(own, splits, exact=exact)
    tolerance = TOLERANCES[torch.float32 if exact or PACKED[shape][0] == 1 else torch.float16]
    assert (found - wanted).norm() <= tolerance * wanted.norm()
    assert int(counter.abs().sum()) == 0
    for name, ours, right in zip("kv", own["scales"], given["scales"], strict=True):
        assert torch.allclose(ours, right, rtol=1e-6, equal_nan=True)
        assert int((own[name].int() - given[name].int()).abs().max()) <= 1  # ties


def turn(x: Tensor, gain: Tensor | None, eps: float, cos: Tensor, sin: Tensor, position: int) -> Tensor:
    """One head [D] normalized and rotated, from the definition: pairs as complex numbers."""
    if gain is not None:
        x = x / (x.square().mean() + eps).sqrt() * gain
    half = cos.shape[1] // 2
    angle = torch.complex(cos[position, :half], sin[position, :half])
    pair = torch.complex(x[:half], x[half : 2 * half]) * angle
    return torch.cat((pair.real, pair.imag, x[2 * half :]))


def check(found: Tensor, given: dict[str, Any], truth: tuple[Tensor, Tensor, Tensor]) -> None:
    """Compare the result and the slots written; nothing else of the cache may change."""
    tolerance = TOLERANCES[given["k"].dtype]
    assert (found - truth[0]).norm() <= tolerance * truth[0].norm()
    for cache, wanted in zip((given["k"], given["v"]), truth[1:], strict=True):
        same = torch.isnan(cache) & torch.isnan(wanted)
        difference = (cache - wanted).masked_fill(same, 0)
        assert difference.norm() <= tolerance * wanted.nan_to_num().norm()


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("shape", SHAPES)
def test_reference_equals_float64(shape: str, norm: bool) -> None:
    given = inputs(shape, norm, torch.float32)
    truth = expected(given)
    check(reference.decode_attention(**given), given, truth)


@pytest.mark.sampled(5)
@pytest.mark.skipif(not has_triton(), reason="needs triton")
@pytest.mark.parametrize("splits", [None, 1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_equals_float64(shape: str, dtype: torch.dtype, splits: int | None) -> None:
    given = inputs(shape, shape in ("mha", "gqa-ragged"), dtype)
    truth = expected(given)
    found, counter = run_kernel(given, splits)
    check(found, given, truth)
    assert int(counter.abs().sum()) == 0, "the next launch counts on zeros"


@pytest.mark.skipif(not has_triton(), reason="needs triton")
def test_kernel_for_tensor_cores_equals_float64() -> None:
    given = inputs("gqa-ragged", True, torch.float16)
    truth = expected(given)
    found, _ = run_kernel(given, None, DOT=True, GP=16, BN=32)
    check(found, given, truth)


def run_kernel(given: dict[str, Any], splits: int | None, **config: Any) -> tuple[Tensor, Tensor]:
    """The kernel's result, in a poisoned buffer, and its counters."""
    rows, kv_heads, length, width = given["k"].shape
    heads = given["qkv"].shape[1] // width - 2 * kv_heads
    workspace = launch.attention_workspace(rows, heads, kv_heads, width, torch.device("cpu"))
    workspace["partial"].fill_(float("nan"))
    workspace["state"].fill_(float("nan"))
    out = torch.full((rows, heads * width), float("nan"))
    bucket = 1 << (length - 1).bit_length()
    options = {"bucket": bucket, "workspace": workspace, "out": out, "splits": splits, **config}
    return launch.decode_attention(**given, **options), workspace["counter"]


@pytest.mark.sampled(3)
@pytest.mark.skipif(not has_triton(), reason="needs triton")
@pytest.mark.parametrize("count", [3, 7, 16])
@pytest.mark.parametrize("shape", ["window", "last-splits-only", "borders"])
def test_what_a_row_sees_is_shared_out_evenly(
    shape: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any number of splits; rows that see little leave the most of them without work."""
    monkeypatch.setattr(launch, "even_count", lambda *_: count)
    given = inputs(shape, False, torch.float32)
    truth = expected(given)
    found, counter = run_kernel(given, None, BN=16)
    check(found, given, truth)
    assert int(counter.abs().sum()) == 0


def test_even_splits_fill_a_large_gpu() -> None:
    assert launch.even_count(8, 65536, launch.PROGRAMS) == 32
    assert launch.even_count(8, 65536, launch.STREAMING) == 49
    assert launch.even_count(32, 65536, launch.STREAMING) == 12
    assert launch.even_count(8, 128, launch.PROGRAMS) == 128 // launch.MIN_CHUNK
    assert launch.even_count(1, 1 << 17, launch.STREAMING) == launch.MAX_SPLITS
    assert launch.even_count(1000, 1 << 17, launch.STREAMING) == 1


def test_splits_fill_a_large_gpu_but_are_never_short() -> None:
    for programs in (1, 8, 32, 256, 1024):
        for bucket in (128, 1024, 131072):
            splits = launch.even_count(programs, bucket, launch.PROGRAMS)
            assert 1 <= splits <= launch.MAX_SPLITS
            assert splits == 1 or bucket // splits >= launch.MIN_CHUNK
            assert splits * programs <= max(launch.PROGRAMS, programs)


SIGNATURE = {
    **dict.fromkeys(("qkv", "cos", "sin", "out", "partial", "state"), "*fp32"),
    **dict.fromkeys(("k", "v", "q_gain", "k_gain"), "*bf16"),
    **{"pos": "*i64", "start": "*i64", "counter": "*i32", "eps": "fp32", "scale": "fp32"},
    **dict.fromkeys(("qkv_row", "cache_row", "cache_head", "table_row", "out_row"), "i32"),
    **dict.fromkeys(("kv_heads", "sequences", "D", "R", "window", "chunk"), "i32"),
}


@pytest.mark.sampled(3)
@pytest.mark.skipif(not has_triton(), reason="needs triton")
@pytest.mark.parametrize(
    ("group", "width", "capability"), [(1, 128, 80), (4, 64, 80), (4, 128, 90), (8, 128, 90)]
)
def test_registers_hold_everything(group: int, width: int, capability: int) -> None:
    """The sizes of models in use compile without spilling to memory."""
    tile = launch.tile_shape(group, width, torch.bfloat16)
    warps = tile.pop("num_warps")
    constants = {"G": group, "DP": width, "SPLITS": 8, "NORM": True, "WINDOW": False, **tile}
    constants["sinks"] = None
    constants["PDL"] = capability >= 90
    made = compile_for(
        "blr.kernels.decode.attention.triton",
        "attention_kernel",
        SIGNATURE,
        constants,
        capability,
        num_warps=warps,
    )
    assert made["spills"] == 0


@pytest.mark.skipif(not has_triton(), reason="needs triton")
def test_int8_streams_through_shared_memory() -> None:
    """Keys, values and scales are copied ahead of products on the tensor cores; nothing spills."""
    tile = launch.stream_shape(4, 128, True)
    warps = tile.pop("num_warps")
    constants = {"G": 4, "DP": 128, "SPLITS": 32, "NORM": False, "WINDOW": False, **tile}
    constants |= {"HALF": False, "PDL": True, "sinks": None}
    strides = dict.fromkeys(("scale_row", "scale_head"), "i32")
    signature = {**SIGNATURE, "k": "*i8", "v": "*i8", "k_scale": "*fp32", "v_scale": "*fp32", **strides}
    kernel = ("blr.kernels.decode.attention.streamed", "streamed_kernel")
    made = compile_for(*kernel, signature, constants, 90, num_warps=warps)
    assert made["spills"] == 0
    ptx = made["asm"]["ptx"]
    assert ptx.count("cp.async.c") >= 3 * 8 and "mma.sync" in ptx
