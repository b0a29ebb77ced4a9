"""Checks the decoding runtime on a GPU against transformers, and times it.

    python scripts/runtime_check.py --checkpoint tests/data/tiny-llama
    python scripts/runtime_check.py --speed 7b --structure svd --mode persistent

`--checkpoint`: one PASS or FAIL row a property, the verdict last; exit code 1 if any failed.
`--speed`: a random model of a published shape, made on the GPU: tokens a second and microseconds a
phase beside the rate of a copy; the last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from tolerances import TOLERANCES

from blr.compressor.load import load_model, load_tokenizer
from blr.compressor.modeling.layers import replace_layers
from blr.compressor.runtime.decoder import Decoder
from blr.compressor.runtime.modes import MODES
from blr.compressor.runtime.profile import average

SAMPLE = Path(__file__).parents[1] / "tests" / "data" / "sample.txt"
# hidden, inner, layers, query heads, key heads, head size, vocabulary, tied
SHAPES = {
    "7b": (4096, 11008, 32, 32, 32, 128, 32000, False),
    "8b": (4096, 14336, 32, 32, 8, 128, 128256, False),
    "1b": (2048, 8192, 16, 32, 8, 64, 128256, True),
}
PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
PROJECTIONS += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


class Report:
    """PASS and FAIL rows as they come."""

    def __init__(self) -> None:
        self.failed = 0

    def row(self, passed: bool, what: str, detail: str = "") -> None:
        self.failed += not passed
        print("PASS" if passed else "FAIL", what, detail, flush=True)


def prompt_ids(folder: Path, vocabulary: int, length: int) -> Tensor:
    """[1, length] tokens of the sample text, repeated as needed; random ones without a tokenizer."""
    try:
        ids = load_tokenizer(folder)(SAMPLE.read_text("utf-8"), return_tensors="pt")["input_ids"]
    except Exception as error:
        print(f"no tokenizer ({error}): random tokens", flush=True)
        ids = torch.randint(5, vocabulary, (1, length), generator=torch.Generator().manual_seed(0))
    return ids.repeat(1, -(-length // ids.shape[1]))[:, :length]


def native(model: Any, ids: Tensor, new: int, mask: Tensor | None = None) -> list[list[int]]:
    """Greedy tokens by transformers."""
    mask = torch.ones_like(ids) if mask is None else mask
    arguments = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    moved = {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}
    return model.generate(**moved, **arguments)[:, ids.shape[1] :].tolist()


def margin(model: Any, ids: Tensor, tokens: list[int], at: int) -> str:
    """How close the two best logits are where two continuations part."""
    text = torch.cat((ids[0], torch.tensor(tokens[:at])))[None].to(model.device)
    with torch.no_grad():
        best = model(text).logits[0, -1].float().topk(2).values
    return f"differ at token {at}, where the best two logits are {float(best[0] - best[1]):.2e} apart"


def compare(
    report: Report, what: str, found: list[list[int]], wanted: list[list[int]], why: Any
) -> None:
    """A row for two lists of continuations; `why(row, at)` explains the first difference."""
    for row, (a, b) in enumerate(zip(found, wanted, strict=True)):
        if a != b:
            at = next(
                (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
            )
            report.row(False, what, f"row {row}: " + why(row, at))
            return
    report.row(True, what, f"{sum(map(len, found))} tokens")


def check_float32(report: Report, folder: Path, mode: str) -> None:
    """Greedy tokens in float32: `mode`, eager and transformers on both devices, batches, borders."""
    model = load_model(folder, "AutoModelForCausalLM", dtype="float32", device="cuda")
    limit = model.config.max_position_embeddings
    length, context = 100, min(limit, 2048)
    new = min(256, context - length)
    ids = prompt_ids(folder, model.config.vocab_size, context)
    short = ids[:, :length]
    graph = Decoder(model, batch=rows_of(mode)[-1], context=context, mode=mode)
    found, wanted = graph.generate(short, max_new_tokens=new), native(model, short, new)
    compare(
        report,
        f"{mode} = transformers",
        found,
        wanted,
        lambda _, at: margin(model, short, wanted[0], at),
    )
    print("     distinct tokens:", len(set(found[0])), "pdl:", graph.pdl, flush=True)
    again = graph.generate(short, max_new_tokens=new)
    compare(report, f"{mode} = {mode} again", again, found, lambda _, at: f"at token {at}")
    modes = {"eager": {"mode": "eager"}, "fixed splits": {"deterministic": True, "mode": mode}}
    for name, options in modes.items():
        other = Decoder(model, context=context, **options).generate(short, max_new_tokens=new)
        compare(report, f"{name} = transformers", other, wanted, lambda _, at: f"at token {at}")
    on_cpu = load_model(folder, "AutoModelForCausalLM", dtype="float32", device="cpu")
    compare(report, f"{mode} = transformers on the CPU", found, native(on_cpu, short, new),
            lambda _, at: margin(model, short, found[0], at))  # fmt: skip
    check_batches(report, model, graph, ids)
    check_lengths(report, model, graph, ids, context)
    check_logits(report, model, graph, ids[:, : length + 64], length, torch.float32)


def rows_of(mode: str) -> tuple[int, ...]:
    """Batches that a mode takes."""
    return (1, 2) if mode == "persistent" else (1, 2, 3, 8)


def check_batches(report: Report, model: Any, graph: Decoder, ids: Tensor) -> None:
    """Rows of different lengths, padded on the left and on the right."""
    for rows in rows_of(graph.mode):
        lengths = [60 - 7 * row for row in range(rows)]
        batch, mask = torch.zeros(2, rows, 60, dtype=torch.int64)
        for row, n in enumerate(lengths):
            batch[row, 60 - n :], mask[row, 60 - n :] = ids[0, row : row + n], 1
        wanted = native(model, batch, 48, mask)
        found = graph.generate(batch, mask, max_new_tokens=48)
        explain = lambda row, at: f"length {lengths[row]}, token {at}"  # noqa: B023, E731
        compare(report, f"batch {rows}, left padding", found, wanted, explain)
        right = [
            torch.stack([t[row].roll(n - 60) for row, n in enumerate(lengths)]) for t in (batch, mask)
        ]
        moved = graph.generate(*right, max_new_tokens=48)
        compare(report, f"batch {rows}, right padding", moved, found, explain)


def check_lengths(report: Report, model: Any, graph: Decoder, ids: Tensor, context: int) -> None:
    """Prompts whose continuation crosses buckets, splits and chunks."""
    for length in (1, 63, 64, 120, 127, 128, 129, 140, 250, 511, 512, 513, 1020, 1023, 1024, 1030):
        new = min(16, context - length)
        if new < 1:
            continue
        part = ids[:, :length]
        wanted = native(model, part, new)
        explain = lambda _, at: margin(model, part, wanted[0], at)  # noqa: B023, E731
        compare(report, f"prompt of {length}", graph.generate(part, max_new_tokens=new), wanted, explain)


def check_logits(
    report: Report, model: Any, decoder: Decoder, ids: Tensor, length: int, dtype: torch.dtype
) -> None:
    """Logits of a given text, token by token, against the same weights in float32."""
    with torch.no_grad():
        truth = model(ids.to("cuda")).logits[0, length - 1 : -1].float()
    steps = [decoder.prefill(ids[:, :length])[0]]
    steps += [decoder.step(ids[:, at])[0] for at in range(length, ids.shape[1] - 1)]
    error = float((torch.stack(steps) - truth).norm() / truth.norm())
    allowed = TOLERANCES[dtype] * model.config.num_hidden_layers**0.5
    report.row(
        error <= allowed, f"logits in {dtype}", f"relative error {error:.2e}, allowed {allowed:.2e}"
    )


def check_half(report: Report, folder: Path, mode: str) -> None:
    """Logits in bfloat16 against the same rounded weights in float32, beside those of transformers."""
    half = load_model(folder, "AutoModelForCausalLM", dtype="bfloat16", device="cuda")
    exact = load_model(folder, "AutoModelForCausalLM", dtype="float32", device="cuda")
    exact.load_state_dict({n: t.float() for n, t in half.state_dict().items()})
    context = min(half.config.max_position_embeddings, 512)
    ids = prompt_ids(folder, half.config.vocab_size, min(164, context))
    for rows in (1, 2 if mode == "persistent" else 4):
        decoder = Decoder(half, context=context, batch=rows, mode=mode)
        check_logits(report, exact, Repeated(decoder, rows), ids, ids.shape[1] - 64, torch.bfloat16)
    with torch.no_grad():
        ours, truth = (m(ids.to("cuda")).logits[0].float() for m in (half, exact))
    print(
        f"     transformers in bfloat16: {float((ours - truth).norm() / truth.norm()):.2e}", flush=True
    )
    runs = [decoder.generate(ids, max_new_tokens=32, temperature=0.8, top_k=50, top_p=0.9, seed=s)
            for s in (1, 1, 2)]  # fmt: skip
    report.row(runs[0] == runs[1] != runs[2], "sampling follows the seed")


class Repeated:
    """A decoder that takes the same prompt in every row, to check batches by their first row."""

    def __init__(self, decoder: Decoder, rows: int) -> None:
        self._decoder, self._rows = decoder, rows

    def prefill(self, ids: Tensor) -> Tensor:
        return self._decoder.prefill(ids.repeat(self._rows, 1))

    def step(self, tokens: Tensor) -> Tensor:
        return self._decoder.step(tokens.repeat(self._rows))


def build(shape: str, structure: str, blocks: int) -> Any:
    """A random bfloat16 Llama of a published shape on the GPU, its projections at half the size."""
    hidden, inner, layers, heads, kv_heads, width, vocabulary, tied = SHAPES[shape]
    config = transformers.LlamaConfig(
        **{"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers},
        **{"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": width},
        **{"vocab_size": vocabulary, "tie_word_embeddings": tied, "max_position_embeddings": 8192},
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
        modules = dict(model.named_modules())
        names = [f"model.layers.{n}.{p}" for n in range(layers) for p in PROJECTIONS]
        if structure != "dense":
            replace_layers(model, {n: fields(structure, modules[n], blocks) for n in names})
    model = model.to(torch.bfloat16).to_empty(device="cuda").eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to("cuda")
    model.tie_weights()
    for name, parameter in model.named_parameters():
        parameter.data.fill_(1) if "norm" in name else parameter.data.normal_(0, 0.02)
    return model


def fields(structure: str, linear: Any, blocks: int) -> dict[str, Any]:
    """The spec of a layer at half the parameters of `linear`; ranks are multiples of 16."""
    i, o = linear.in_features, linear.out_features
    extra = blocks**2 if structure == "blast" else 0
    rank = max(i * o // (2 * (i + o + extra)) // 16 * 16, 16)
    known = {"structure": structure, "in_features": i, "out_features": o}
    if structure == "svd":
        return {**known, "rank": rank}
    size = {"rank": rank} if structure == "blast" else {"block_rank": max(rank // blocks, 1)}
    return {**known, "blocks": blocks, **size}


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a copy of 1 GiB."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / average(lambda: target.copy_(source), 20, source.device)


def speed(arguments: argparse.Namespace) -> None:
    """Tokens a second, and the phases of one layer."""
    begun, bandwidth = perf_counter(), copy_bandwidth()
    model = build(arguments.speed, arguments.structure, arguments.blocks)
    torch.cuda.synchronize()
    print(f"built in {perf_counter() - begun:.1f} s; copy {bandwidth / 1e12:.2f} TB/s", flush=True)
    rows, length = arguments.batch, arguments.context
    decoder = Decoder(model, batch=rows, context=length + 512, mode=arguments.mode)
    if arguments.no_pdl:
        decoder.pdl = False
    ids = torch.randint(5, 30000, (rows, length))
    decoder.prefill(ids)
    table = decoder.profile(arguments.steps)
    print(f"{'phase':<22}{'us':>9}{'MB':>9}{'TB/s':>7}{'of copy':>9}")
    for name, us, size in table:
        rate = size / us / 1e6
        print(f"{name:<22}{us:>9.2f}{size / 1e6:>9.2f}{rate:>7.2f}{rate * 1e12 / bandwidth:>9.1%}")
    _, us, size = table[-1]
    seconds = wall_time(lambda n: decoder.generate(ids, max_new_tokens=n))
    result = {"shape": arguments.speed, "structure": arguments.structure, "batch": rows}
    result |= {"mode": arguments.mode}
    result |= {"context": length, "tokens_per_second": rows * 1e6 / us, "bytes": size}
    result |= {"of_copy": size / us * 1e6 / bandwidth, "generate_tokens_per_second": rows / seconds}
    result |= {"phases": {name: round(us, 2) for name, us, _ in table}, "pdl": decoder.pdl}
    print(f"total {perf_counter() - begun:.1f} s")
    print(json.dumps(result))


def wall_time(generate: Callable[[int], Any], tokens: int = 256) -> float:
    """Seconds of a token by the clock of the host, without the prompt."""
    taken = []
    for count in (tokens, 1, tokens):  # the first captures the graphs
        torch.cuda.synchronize()
        begun = perf_counter()
        generate(count)
        torch.cuda.synchronize()
        taken.append(perf_counter() - begun)
    return (taken[2] - taken[1]) / (tokens - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, nargs="+", default=[])
    parser.add_argument("--speed", choices=SHAPES)
    parser.add_argument("--structure", choices=["dense", "svd", "blast", "monarch"], default="svd")
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--mode", choices=MODES, default="graph")
    parser.add_argument("--no-pdl", action="store_true")
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    report = Report()
    for folder in arguments.checkpoint:
        print(f"== {folder.name}", flush=True)
        check_float32(report, folder, arguments.mode)
        check_half(report, folder, arguments.mode)
        gc.collect()
        torch.cuda.empty_cache()
    if arguments.speed:
        speed(arguments)
    if arguments.checkpoint:
        print("PASS: all rows" if not report.failed else f"FAIL: {report.failed} rows")
        sys.exit(report.failed > 0)


if __name__ == "__main__":
    main()
