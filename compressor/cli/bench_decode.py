"""`blr bench decode`: tokens a second of our decoder beside transformers'."""

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


def decode(
    models: Annotated[
        str,
        typer.Option(help="Comma-separated: 7b, 8b, 1b, pico (random weights) or checkpoint folders."),
    ] = "7b,8b",
    arms: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated: hf- or ours- with dense, lowrank or, for a checkpoint, own; ours- "
            "also with pivoted, blast, monarch or, in few bits, corrected. Ours may go on with -int8, "
            "-int4, -int3 or -int2, then -head8 or -head4 for the output head, -kv8 for keys and values "
            "in int8, then -graph or -eager.",
            show_default="all usual ones",
        ),
    ] = None,
    contexts: Annotated[str, typer.Option(help="Tokens of the prompt.")] = "128,1024,3072,6144",
    batches: Annotated[str, typer.Option(help="Sequences at once, at most 16.")] = "1",
    steps: Annotated[
        int, typer.Option(min=1, callback=values.count, help="Tokens of a measurement.")
    ] = 64,
    rounds: Rounds = 3,
    cf: Factor = 2.0,
    blocks: Blocks = 16,
    rank: Annotated[
        int, typer.Option(min=1, callback=values.count, help="Rank of corrections, in int4.")
    ] = 16,
    dtype: ModelDtype = "bfloat16",
    ops: Annotated[str, typer.Option(help="Ours: auto, triton or torch (references).")] = "auto",
    mode: Annotated[
        str, typer.Option(help="Ours, where the arm names none: auto, graph or eager.")
    ] = "auto",
    compiling: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile",
            help="torch.compile transformers' step.",
            show_default="compile on a GPU",
        ),
    ] = None,
    seconds: Seconds = None,
    output: Annotated[
        Path | None,
        typer.Option(
            *("--output", "-o"),
            callback=values.place,
            help="Folder for results.json, results.csv and decode.png.",
        ),
    ] = None,
    device: Device = "auto",
    quiet: Quiet = False,
    format: FormatOption = Format.text,
) -> None:
    """Decoding of whole models: transformers compiled, ours dense, structured and quantized."""
    from blr.compressor.bench.results import check_output, save

    if output is not None:
        check_output(output)
    from blr.compressor.base.progress import Progress

    progress = Progress(quiet)
    progress.loading()
    from blr.compressor.bench.decode.run import DecodeOptions, run_decode
    from blr.compressor.bench.plots import draw_decode
    from blr.compressor.bench.summary import decode_summary, decode_text

    options = DecodeOptions(
        models=tuple(words(models)),
        arms=tuple(words(arms)) if arms is not None else (),
        contexts=counts("--contexts", contexts),
        batches=counts("--batches", batches, most=16),
        steps=steps,
        rounds=rounds,
        cf=cf,
        blocks=blocks,
        rank=rank,
        device=device,
        dtype=dtype,
        ops=ops,
        mode=mode,
        compiling=compiling,
        seconds=seconds,
    )
    report, code = run_decode(options, progress)
    summary = decode_summary(report.rows)
    finish(report, code, summary, decode_text, save, draw_decode, output, format)
