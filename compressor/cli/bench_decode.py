"""`blr bench decode`: tokens a second of our decoder beside transformers'."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

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
            "a checkpoint, own; ours may end in -int8 or -int4 [all usual ones]."
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
    mode: Annotated[str, typer.Option(help="Ours: graph or eager.")] = "graph",
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
    from blr.compressor.bench.decode_report import decode_text, save, summary
    from blr.compressor.progress import Progress

    options = DecodeOptions(
        models=_words(models),
        arms=_words(arms or ""),
        contexts=_counts("--contexts", contexts),
        batches=_counts("--batches", batches, most=16),
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
    found = summary(report.rows)
    if output is not None:
        save(report, found, output)
        _draw(report, output)
    if format is Format.json:
        print(json.dumps(report.to_dict(found)))
    else:
        print(decode_text(report))
        print(json.dumps(report.to_dict(found, rows=False)))
    if report.stopped:
        print(f"blr: stopped: {report.stopped}; results are of the cases before", file=sys.stderr)
    if code:
        raise typer.Exit(code)


def _draw(report: object, output: Path) -> None:
    from blr.compressor.bench.decode_report import draw
    from blr.compressor.bench.plots import HINT

    try:
        draw(report, output)
    except ImportError:
        print(f"blr: note: {HINT}", file=sys.stderr)


def _words(text: str) -> tuple[str, ...]:
    """Comma-separated words, each once."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def _counts(option: str, text: str, most: int | None = None) -> tuple[int, ...]:
    """Comma-separated positive integers. Raises UsageError."""
    words = _words(text)
    good = all(w.isascii() and w.isdigit() and 0 < int(w) <= (most or int(w)) for w in words)
    if not words or not good:
        limit = "" if most is None else f" up to {most}"
        raise UsageError(f"{option} is {text!r}: expected positive integers{limit} such as 1,2,4")
    return tuple(map(int, words))
