"""`blr bench memory`: what a forward pass takes beside the weights, and how long it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blr.compressor.base.errors import UsageError
from blr.compressor.cli import values
from blr.compressor.cli.bench_options import (
    ModelDtype,
    Rounds,
    Seconds,
    counts,
    finish,
    words,
)
from blr.compressor.cli.options import Device, Format, FormatOption, Quiet


def memory(
    models: Annotated[
        str,
        typer.Option(
            help="Some of bert-base, roberta-base, llama-7b, llama-3.1-8b, pico-bert, pico-llama."
        ),
    ] = "bert-base",
    arms: Annotated[
        str,
        typer.Option(
            help="Some of dense, naive (low rank by plain torch), whole (ours without a bound), ours, "
            "and ours-N for a bound of N MiB."
        ),
    ] = "dense,naive,whole,ours",
    keep: Annotated[
        str, typer.Option(help="Shares of the parameters of the replaced layers.")
    ] = "0.5,0.75",
    batches: Annotated[str, typer.Option(help="Sequences at once.")] = "1,16,32,64",
    lengths: Annotated[str, typer.Option(help="Tokens of a sequence.")] = "128,256,512,1024",
    pairs: Annotated[
        str | None,
        typer.Option(help="These cases in place of batches and lengths: 4x1024,1x16384."),
    ] = None,
    heads: Annotated[str, typer.Option(help="q, k and v factorized whole or per-head.")] = "whole",
    padding: Annotated[
        float,
        typer.Option(
            min=0.0, max=0.9, callback=values.number, help="Share of padding in the shortest row."
        ),
    ] = 0.0,
    rounds: Rounds = 5,
    dtype: ModelDtype = "bfloat16",
    graphs: Annotated[
        bool, typer.Option("--graphs", help="Time passes as CUDA graphs: without the host.")
    ] = False,
    seconds: Seconds = None,
    output: Annotated[
        Path | None,
        typer.Option(
            *("--output", "-o"),
            callback=values.place,
            help="Folder for results.json, results.csv and memory.png.",
        ),
    ] = None,
    device: Device = "auto",
    quiet: Quiet = False,
    format: FormatOption = Format.text,
) -> None:
    """Memory and time of a forward pass: dense, low rank as it is, and ours within a bound."""
    from blr.compressor.bench.results import check_output, save

    cases = _pairs(pairs, counts("--batches", batches), counts("--lengths", lengths))
    if heads not in ("whole", "per-head"):
        raise UsageError(f"--heads is {heads!r}: expected whole or per-head")
    shares = _shares(keep)
    if output is not None:
        check_output(output)
    from blr.compressor.base.progress import Progress

    progress = Progress(quiet)
    progress.loading()
    from blr.compressor.bench.memory.run import MemoryOptions, run_memory
    from blr.compressor.bench.memory.table import memory_summary, memory_text
    from blr.compressor.bench.plots import draw_memory

    options = MemoryOptions(
        models=words(models),
        arms=words(arms),
        keeps=shares,
        pairs=cases,
        per_head=heads == "per-head",
        padding=padding,
        rounds=rounds,
        device=device,
        dtype=dtype,
        seconds=seconds,
        graphs=graphs,
    )
    report, code = run_memory(options, progress)
    finish(report, code, memory_summary(report.rows), memory_text, save, draw_memory, output, format)


def _pairs(text: str | None, batches: list[int], lengths: list[int]) -> list[tuple[int, int]]:
    if text is None:
        return [(batch, length) for batch in batches for length in lengths]
    found = []
    for word in words(text):
        sizes = word.split("x")
        if len(sizes) != 2:
            raise UsageError(f"--pairs is {text!r}: expected batch x length such as 4x1024,1x16384")
        found.append((counts("--pairs", sizes[0])[0], counts("--pairs", sizes[1])[0]))
    return found


def _shares(text: str) -> list[float]:
    try:
        found = [float(word) for word in words(text)]
    except ValueError:
        found = []
    if not found or not all(0 < share < 1 for share in found):
        raise UsageError(f"--keep is {text!r}: expected shares between 0 and 1 such as 0.5,0.75")
    return found
