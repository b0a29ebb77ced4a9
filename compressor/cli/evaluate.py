"""`blr eval`: the quality of a model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from blr.compressor.cli import values
from blr.compressor.cli.options import (
    Checkpoint,
    Device,
    Format,
    FormatOption,
    Offline,
    Quiet,
    Threads,
    Trust,
    Verify,
    print_result,
)
from blr.compressor.errors import UsageError


def evaluate(
    checkpoint: Checkpoint,
    text: Annotated[Path | None, typer.Option(help="Text file: perplexity of a decoder on it.")] = None,
    sts: Annotated[
        Path | None,
        typer.Option(help="CSV of sentence pairs and scores: Spearman of an encoder on it."),
    ] = None,
    window: Annotated[int, typer.Option(min=2, callback=values.count, help="Tokens a window.")] = 512,
    stride: Annotated[
        int | None,
        typer.Option(
            min=1, callback=values.count, help="Tokens between windows.", show_default="the window"
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=2, callback=values.count, help="Only the first tokens.")
    ] = None,
    batch: Annotated[
        int, typer.Option(min=1, callback=values.count, help="Windows or sentences at once.")
    ] = 8,
    dtype: Annotated[str, typer.Option(callback=values.dtype, help="Dtype to compute in.")] = "float32",
    device: Device = "auto",
    threads: Threads = None,
    trust_remote_code: Trust = False,
    verify: Verify = True,
    offline: Offline = False,
    quiet: Quiet = False,
    format: FormatOption = Format.text,
) -> None:
    """Perplexity of a decoder (--text) or STS Spearman of an encoder (--sts)."""
    from blr.compressor.loading.resolve import resolve_model
    from blr.compressor.machine.threads import use_threads

    data = text or sts
    if data is None or (text and sts):
        raise UsageError("eval needs either --text FILE (decoders) or --sts FILE (encoders)")
    use_threads(threads)
    folder = resolve_model(checkpoint, offline=offline).folder
    from blr.compressor import evaluate as library
    from blr.compressor.checkpoint.regular import read_start
    from blr.compressor.loading.load import load_model, load_tokenizer
    from blr.compressor.loading.sentences import read_sentences
    from blr.compressor.progress import Progress

    task = "AutoModelForCausalLM" if text else "AutoModel"
    tokenizer = load_tokenizer(folder, trust=trust_remote_code, text=read_start(data))
    options = {"trust": trust_remote_code, "verify": verify}
    model = load_model(folder, task, dtype=dtype, device=device, **options)
    progress = Progress(quiet)
    result: library.Perplexity | library.Spearman
    if text is not None:
        ids = library.read_tokens(text, tokenizer, max_tokens)
        result = library.perplexity(model, ids, window, stride or window, batch, progress)
    else:
        head = read_sentences(folder)
        result = library.sts_spearman(model, tokenizer, data, batch, progress, head)
    print_result(asdict(result), lambda r: "\n".join(f"{k}: {_number(v)}" for k, v in r.items()), format)


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
