"""Products of bytes on a GPU: every format at sizes that ask for them, in CUDA graphs; and the loss of a
model in few bits, decoded a token at a time, beside the same in transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import compress_to
from rows import Row, bounded, relative
from tolerances import TOLERANCES
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from blr.compressor.runtime.decoder import Decoder
from blr.kernels.decode.gemv.segments import Correction, How, Narrow, QuantizedSegment
from blr.kernels.decode.quantized.reference import quantize, unpack

pytestmark = pytest.mark.gpu
Judge = Callable[[Iterable[Row]], None]
# Rows of the stages of one launch, and their columns: of an 8B, of widths that no tile fills, and of 4
# bits so wide that another kernel takes them.
SHAPES = (
    ((4096, 1024, 1024), 4096),
    ((4096,), 4096),
    ((4096,), 14336),
    ((2560, 640), 5120),
    ((5000,), 1999),
    ((2056,), 8192),
)
FINE, COARSE = TOLERANCES[torch.float16], TOLERANCES[torch.bfloat16]
TOKENS, WINDOWS = 768, 6  # of a text, whose loss is compared
SAME = 1e-3  # relative difference of two losses of one model


@pytest.mark.parametrize("bits, group", [(2, 128), (2, 64), (3, 128), (3, 64), (4, 128), (4, 32)])
def test_products(bits: int, group: int, on_cuda: str, judge: Judge) -> None:
    judge(compared(bits, group, on_cuda))


def compared(bits: int, group: int, device: str) -> Iterator[Row]:
    from blr.kernels.decode import choice

    limit = COARSE if bits == 3 else FINE
    for rows, K in SHAPES:
        for rank in (0, 16):
            torch.manual_seed(K)
            x, gain = torch.randn(1, K, device=device), torch.rand(K, device=device)
            made = [stage(x, n, bits, group, rank) for n in rows]
            name = f"{' '.join(map(str, rows))} x {K}, rank {rank}"
            options = {"gain": gain, "eps": 1e-5}
            expected = [replace(s, x=x.double()).product(**options) for s in made]
            run = choice.stages(made, How(**options, pdl=True))
            for n, y, wanted in zip(rows, replayed(run, made), expected, strict=True):
                yield bounded(f"bytes {bits}/{group}", f"{name}: {n}", relative(y, wanted), limit)
            yield from pairs(x, gain, rows[0], (bits, group, rank), limit)


def pairs(x: Tensor, gain: Tensor, rows: int, form: tuple[int, int, int], limit: float) -> Iterator[Row]:
    from blr.kernels.decode import choice

    gate, up = (stage(x, rows, *form) for _ in range(2))
    options = {"gain": gain, "eps": 1e-5}
    wide = [replace(s, x=x.double()).product(**options) for s in (gate, up)]
    expected = torch.nn.functional.silu(wide[0]) * wide[1]
    (found,) = replayed(choice.stages([gate, up], How(**options, activation="silu", pdl=True)), [up])
    yield bounded(f"bytes {form[0]}/{form[1]}", f"pair of {rows}", relative(found, expected), 3 * limit)


def replayed(run: Callable[[], Any], stages: Sequence[QuantizedSegment]) -> list[Tensor]:
    """Results of a run in a CUDA graph, replayed over what is no number."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for s in stages:
        s.y.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    return [s.y for s in stages]


def stage(x: Tensor, rows: int, bits: int, group: int, rank: int) -> QuantizedSegment:
    """A stage of random weights, corrected if there is a rank."""
    found = quantized(x, rows, bits, group)
    if not rank:
        return found
    packed, scale = quantize(torch.randn(1, rows, rank, device=x.device) / rank, 4, group=32)
    levels = unpack(packed, 4, 32)[..., :rank].contiguous()
    made = Correction(quantized(x, rank, 4, 64), Narrow(levels, scale, 32))
    return replace(found, correction=made)


def quantized(x: Tensor, rows: int, bits: int, group: int) -> QuantizedSegment:
    w = torch.randn(1, rows, x.shape[1], device=x.device) / x.shape[1] ** 0.5
    packed, scale = quantize(w, bits, group=group)
    y = torch.zeros(1, rows, device=x.device)
    return QuantizedSegment(x, packed, scale.bfloat16(), bits, x.shape[1], y, group=group)


@pytest.mark.parametrize("base, rank", [("int2", 0), ("int2", 16), ("int3", 16), ("int4", 0)])
def test_losses_are_those_of_the_model(
    base: str,
    rank: int,
    on_cuda: str,
    judge: Judge,
    tiny: Path,
    sample: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`blr eval` reads windows at once, by other kernels."""
    from blr.kernels.decode import choice

    always = [rule._replace(weights=(0, choice.ENDLESS)) for rule in choice.STAGES]
    monkeypatch.setitem(choice.RULES, "stages", always)
    monkeypatch.setattr(choice, "chosen", choice.chosen.__wrapped__)
    how = (
        {"method": "svd", "base": base, "rank": rank} if rank else {"method": "dense", "quantize": base}
    )
    folder = compress_to(tiny, tmp_path / "few", group=64, **how)
    judge(losses(folder, sample.read_text(), f"{base}, rank {rank}", on_cuda))


def losses(folder: Path, text: str, name: str, device: str) -> Iterator[Row]:
    load = AutoModelForCausalLM.from_pretrained
    exact, model = (
        load(folder, trust_remote_code=True, dtype=dtype).to(device).eval()
        for dtype in (torch.float32, torch.bfloat16)
    )
    decoder = Decoder(model, batch=1, context=TOKENS + 1, ops="triton", mode="graph")
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids.to(device)
    expected = found = 0.0
    with torch.no_grad():
        for window in ids.split(TOKENS, 1)[:WINDOWS]:
            expected += loss_of(exact(window).logits[0, :-1], window[0, 1:])
            steps = [decoder.prefill(window[:, :1]), *map(decoder.step, window[0, 1:-1].split(1))]
            found += loss_of(torch.cat(steps), window[0, 1:])
    yield bounded("bytes loss", name, abs(found / expected - 1), SAME, f"{expected / WINDOWS:.4f} nats")


def loss_of(logits: Tensor, following: Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(logits.float(), following))
