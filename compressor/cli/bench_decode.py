"""`blr bench decode`: tokens a second of our decoder beside transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blr.compressor.cli.benching import counts, finish, words
from blr.compressor.cli.commands import Device, Format, FormatOption, Quiet
from blr.compressor.errors import UsageError


def decode(
    models: Annotated[
        str,
        typer.Option(help="Comma-separated: 7b, 8b, 1b, pico (random weights) or checkpoint folders."),
    ] = "7b,8b",
    arms: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated: hf- or ours- with dense, lowrank, blast, monarch (ours only) or, for "
            "a checkpoint, own; ours may go on with -int8 or -int4, then -head8 or -head4 for the "
            "output head, then -graph, -persistent or -eager [all usual ones]."
        ),
    ] = None,
    contexts: Annotated[str, typer.Option(help="Tokens of the prompt.")] = "128,1024,3072,6144",
    batches: Annotated[str, typer.Option(help="Sequences at once, at most 16.")] = "1",
    steps: Annotated[int, typer.Option(min=1, help="Tokens of a measurement.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each arm.")] = 3,
    cf: Annotated[float, typer.Option(help="Compression factor of structured layers.")] = 2.0,
    blocks: Annotated[int, typer.Option(min=2, help="Blocks of BLAST and Monarch.")] = 16,
    dtype: Annotated[str, typer.Option(help="float32, float16 or bfloat16.")] = "bfloat16",
    ops: Annotated[str, typer.Option(help="Ours: auto, triton or torch (references).")] = "auto",
    mode: Annotated[
        str, typer.Option(help="Ours, where the arm names none: auto, graph, persistent or eager.")
    ] = "auto",
    compiling: Annotated[
        bool | None,
        typer.Option("--compile/--no-compile", help="torch.compile transformers' step [on a GPU]."),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.0, help="Start no further case after this many seconds.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder for results.json, results.csv and decode.png."),
    ] = None,
    device: Device = "auto",
    quiet: Quiet = False,
    format: FormatOption = Format.text,
) -> None:
    """Decoding of whole models: transformers compiled, ours dense, structured and quantized."""
    if cf <= 1:
        raise UsageError(f"cf is {cf:g}: expected a compression factor over 1")
    from blr.compressor.bench.results import check_output

    if output is not None:
        check_output(output)
    from blr.compressor.bench.decode import DecodeOptions, run_decode
    from blr.compressor.bench.decode_report import decode_text, draw, save, summary
    from blr.compressor.progress import Progress

    options = DecodeOptions(
        models=tuple(words(models)),
        arms=tuple(words(arms or "")),
        contexts=counts("--contexts", contexts),
        batches=counts("--batches", batches, most=16),
        steps=steps,
        rounds=rounds,
        cf=cf,
        blocks=blocks,
        device=device,
        dtype=dtype,
        ops=ops,
        mode=mode,
        compiling=compiling,
        seconds=seconds,
    )
    report, code = run_decode(options, Progress(quiet))
    finish(report, code, summary(report.rows), decode_text, save, draw, output, format)
