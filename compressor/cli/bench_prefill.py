"""`blr bench prefill`: time to the first token of whole models, bf16 and float8."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blr.compressor.cli import values
from blr.compressor.cli.bench_options import (
    Blocks,
    Factor,
    ModelDtype,
    Rounds,
    Seconds,
    counts,
    finish,
    words,
)
from blr.compressor.cli.options import Device, Format, FormatOption, Quiet


def prefill(
    models: Annotated[
        str,
        typer.Option(
            help="Comma-separated: 7b, 8b, 1b, minilm, bert-base, bert-large, vit-base, vit-large, pico "
            "(random weights) or checkpoint folders."
        ),
    ] = "8b",
    arms: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated: dense, lowrank, monarch, blast, each also with -fp8, pivoted; for a "
            "checkpoint, own.",
            show_default="all",
        ),
    ] = None,
    tokens: Annotated[str, typer.Option(help="Tokens of the prompt.")] = "128,512,2048,8192,16384",
    batch: Annotated[int, typer.Option(min=1, callback=values.count, help="Sequences at once.")] = 1,
    rounds: Rounds = 5,
    cf: Factor = 2.0,
    blocks: Blocks = 16,
    dtype: ModelDtype = "bfloat16",
    compiling: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile",
            help="Arms with decoder layers compiled, too.",
            show_default="compile on a GPU",
        ),
    ] = None,
    graphs: Annotated[
        bool, typer.Option("--graphs", help="Compiled arms as CUDA graphs of fixed lengths, too.")
    ] = False,
    runtime: Annotated[
        bool, typer.Option("--runtime", help="Every arm as an export takes prompts, too.")
    ] = False,
    seconds: Seconds = None,
    output: Annotated[
        Path | None,
        typer.Option(
            *("--output", "-o"), callback=values.place, help="Folder for results.json and results.csv."
        ),
    ] = None,
    device: Device = "auto",
    quiet: Quiet = False,
    format: FormatOption = Format.text,
) -> None:
    """Prompts through whole models in transformers: dense and structured, bf16 and float8."""
    from blr.compressor.bench.results import check_output, save

    if output is not None:
        check_output(output)
    from blr.compressor.base.progress import Progress

    progress = Progress(quiet)
    progress.loading()
    from blr.compressor.bench.prefill import PrefillOptions, run_prefill
    from blr.compressor.bench.summary import prefill_summary, prefill_text

    options = PrefillOptions(
        models=tuple(words(models)),
        arms=tuple(words(arms)) if arms is not None else (),
        tokens=counts("--tokens", tokens),
        batch=batch,
        rounds=rounds,
        cf=cf,
        blocks=blocks,
        device=device,
        dtype=dtype,
        compiling=compiling,
        graphs=graphs,
        runtime=runtime,
        seconds=seconds,
    )
    report, code = run_prefill(options, progress)
    summary = prefill_summary(report.rows)
    finish(report, code, summary, prefill_text, save, lambda *_: None, output, format)
