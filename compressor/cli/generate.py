"""`blr generate`: continues a prompt."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from blr.compressor.base.errors import UsageError
from blr.compressor.cli import values
from blr.compressor.cli.from_fields import (
    Checkpoint,
    Device,
    Format,
    FormatOption,
    Offline,
    Threads,
    Trust,
    Verify,
    taking,
)
from blr.compressor.recipe.option import Limits


@taking()
def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    max_new_tokens: Annotated[int, Limits(1)] = 64,
    temperature: Annotated[float, Limits(0)] = 0.0,
    top_k: Annotated[int, Limits(1)] | None = None,
    top_p: float | None = None,
    seed: int = 0,
    profile: bool = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            callback=values.dtype,
            help="Dtype to compute in.",
            show_default="float32; of exports on a GPU: as stored",
        ),
    ] = None,
    device: Device = "auto",
    threads: Threads = None,
    trust_remote_code: Trust = False,
    verify: Verify = True,
    offline: Offline = False,
    format: FormatOption = Format.text,
) -> None:
    """Continue a prompt with a decoder, written as it is generated.

    Options:
        max_new_tokens: Tokens to generate.
        temperature: Sample at this temperature; 0 takes the likeliest token.
        top_k: Sample among the K likeliest tokens.
        top_p: Sample among the likeliest tokens of this total probability.
        seed: Seed of sampling.
        profile: Time the stages of the fused runtime, on standard error.
    """
    from blr.compressor.base.progress import Progress
    from blr.compressor.base.threads import use_threads
    from blr.compressor.loading.resolve import resolve_model

    if temperature == 0 and (top_k, top_p) != (None, None):
        raise UsageError("--top-k and --top-p belong to sampling; give --temperature, as 0.8, too")
    use_threads(threads)
    folder = resolve_model(checkpoint, offline=offline).folder

    progress = Progress()
    progress.loading()
    from blr.compressor.commands import generate as library
    from blr.compressor.loading.load import load_model, load_tokenizer

    if profile:
        library.check_profile(device)
    tokenizer = load_tokenizer(folder, trust=trust_remote_code, text=prompt)
    dtype = dtype or library.default_dtype(folder, device)
    options = {"trust": trust_remote_code, "verify": verify}
    model = load_model(
        folder, "AutoModelForCausalLM", dtype=dtype, device=device, progress=progress, **options
    )
    sampling = library.Sampling(max_new_tokens, temperature, top_k, top_p, seed)
    stream = sys.stdout if format is Format.text else None
    result = library.generate(model, tokenizer, prompt, sampling, stream)
    found = library.profile(model, tokenizer, prompt) if profile else None
    if format is Format.json:
        print(json.dumps({**asdict(result), **({"profile": asdict(found)} if found else {})}))
    elif found is not None:
        print(library.profile_text(found), file=sys.stderr)
