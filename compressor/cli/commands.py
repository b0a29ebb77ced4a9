"""The commands: options in, library call, result out. Torch is imported inside, when needed."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from blr.compressor.errors import UsageError, VerifyError


class Format(StrEnum):
    """How results are printed."""

    text = "text"
    json = "json"


Model = Annotated[
    str,
    typer.Argument(help="A checkpoint folder, a hub id (owner/name) or a short name (llama-7b)."),
]
Checkpoint = Annotated[str, typer.Argument(help="A checkpoint folder or a hub id.")]
FormatOption = Annotated[Format, typer.Option("--format", help="text, or one JSON object.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on standard error.")]
Offline = Annotated[bool, typer.Option("--offline", help="Never open a socket.")]
Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run modeling code found in the checkpoint.")
]

MaxShardSize = Annotated[str, typer.Option(help="Largest shard, as 500MB or 5GB.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an output folder that blr wrote.")]
Restart = Annotated[bool, typer.Option("--restart", help="Discard what an interrupted run left.")]
AllowPickle = Annotated[
    bool, typer.Option("--allow-pickle", help="Read pytorch_model.bin (weights only).")
]


def compress(
    model: Model,
    method: Annotated[
        str | None,
        typer.Option(
            "--method", "-m", help="svd [default], monarch, blast, ks (Kronecker-sparse), auto."
        ),
    ] = None,
    cf: Annotated[
        float | None, typer.Option(help="Compression factor of the replaced layers [2], over 1.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder to write [default: NAME-METHOD-cfCF here]."),
    ] = None,
    rank: Annotated[int | None, typer.Option(help="Fixed rank in place of --cf.")] = None,
    blocks: Annotated[int | None, typer.Option(help="Blocks b of Monarch [4] and BLAST [16].")] = None,
    pattern: Annotated[
        str | None,
        typer.Option(help="Kronecker-sparse chain: '(1,192,48,2)(2,48,192,1)' or butterfly."),
    ] = None,
    heads: Annotated[
        str | None, typer.Option(help="Attention by svd: whole [default], grouped:G, per-head or auto.")
    ] = None,
    solver: Annotated[str | None, typer.Option(help="BLAST: varpro or precgd.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds or steps of the solver.")] = None,
    include: Annotated[
        list[str] | None, typer.Option(help="Only modules matching this glob; repeatable.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="Not the modules matching this glob; repeatable.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Stored dtype of the factors [default: the weight's own].")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of solvers that start at random [0].")] = None,
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", "-r", help="Shipped name or YAML file; options given here win."),
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(help="Text file, .jsonl or data set: fit to the activations it causes."),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="Calibration windows or sentences at most [256].")
    ] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens a calibration window [512].")] = None,
    allocation: Annotated[
        str | None,
        typer.Option(help="uniform, or sensitivity [default with --calibration]."),
    ] = None,
    refit: Annotated[
        int | None, typer.Option(help="Epochs of the joint refit of each block [GPU: 2, CPU: 0].")
    ] = None,
    device: Device = "auto",
    max_shard_size: MaxShardSize = "5GB",
    revision: Revision = None,
    overwrite: Overwrite = False,
    restart: Restart = False,
    allow_pickle: AllowPickle = False,
    offline: Offline = False,
    quiet: Quiet = False,
    format: FormatOption = Format.text,
) -> None:
    """Replace the linear layers of a checkpoint by structured ones."""
    from blr.compressor.cli.signals import stop_on_signals

    given = {
        **{"method": method, "cf": cf, "rank": rank, "blocks": blocks, "pattern": pattern},
        **{"heads": heads, "solver": solver, "rounds": rounds, "include": include or None},
        **{"exclude": exclude or None, "dtype": dtype, "seed": seed},
        **{"samples": samples, "seq_len": seq_len, "allocation": allocation, "refit": refit},
    }
    with stop_on_signals() as running:
        from blr.compressor.checkpoint.resolve import default_output, resolve_model
        from blr.compressor.checkpoint.sizes import parse_size
        from blr.compressor.checkpoint.workspace import check_output
        from blr.compressor.compress import Settings
        from blr.compressor.compress import compress as run
        from blr.compressor.progress import Progress
        from blr.compressor.recipes import load_recipe

        resolved = load_recipe(recipe, {k: v for k, v in given.items() if v is not None})
        shard_bytes = parse_size(max_shard_size)
        running.output = output = output or default_output(model, resolved)
        check_output(output, overwrite)
        found = resolve_model(model, revision=revision, offline=offline)
        settings = Settings(
            source_name=found.name,
            revision=found.revision,
            device=device,
            max_shard_size=shard_bytes,
            overwrite=overwrite,
            restart=restart,
            allow_pickle=allow_pickle,
            calibration=calibration,
            offline=offline,
        )
        summary = run(found.folder, resolved, output, settings, Progress(quiet))
    print_result(asdict(summary), _compress_text, format)


def evaluate(
    checkpoint: Checkpoint,
    text: Annotated[Path | None, typer.Option(help="Text file: perplexity of a decoder on it.")] = None,
    sts: Annotated[
        Path | None,
        typer.Option(help="CSV of sentence pairs and scores: Spearman of an encoder on it."),
    ] = None,
    window: Annotated[int, typer.Option(min=2, help="Tokens a window.")] = 512,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Tokens between windows [default: the window].")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=2, help="Only the first tokens.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Windows or sentences at once.")] = 8,
    dtype: Annotated[str, typer.Option(help="Dtype to compute in.")] = "float32",
    device: Device = "auto",
    trust_remote_code: Trust = False,
    offline: Offline = False,
    quiet: Quiet = False,
    format: FormatOption = Format.text,
) -> None:
    """Perplexity of a decoder (--text) or STS Spearman of an encoder (--sts)."""
    from blr.compressor.checkpoint.resolve import resolve_model

    if (text is None) == (sts is None):
        raise UsageError("eval needs either --text FILE (decoders) or --sts FILE (encoders)")
    folder = resolve_model(checkpoint, offline=offline).folder
    from blr.compressor import evaluate as library
    from blr.compressor.load import load_model, load_tokenizer
    from blr.compressor.progress import Progress

    task = "AutoModelForCausalLM" if text else "AutoModel"
    tokenizer = load_tokenizer(folder, trust=trust_remote_code)
    model = load_model(folder, task, dtype=dtype, device=device, trust=trust_remote_code)
    progress = Progress(quiet)
    if text is not None:
        ids = library.read_tokens(text, tokenizer, max_tokens)
        result = library.perplexity(model, ids, window, stride or window, batch, progress)
    else:
        result = library.sts_spearman(model, tokenizer, sts, batch, progress)
    print_result(asdict(result), lambda r: "\n".join(f"{k}: {_number(v)}" for k, v in r.items()), format)


def inspect(checkpoint: Checkpoint, format: FormatOption = Format.text) -> None:
    """A table of the structured layers of an output: structure, rank, parameters, error."""
    from blr.compressor.inspect import inspect_output, inspect_text

    print_result(inspect_output(Path(checkpoint)), inspect_text, format)


def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy; above 0 samples.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample among the K likeliest.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample within this probability.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Time the stages of the fused runtime, on standard error."),
    ] = False,
    dtype: Annotated[
        str | None, typer.Option(help="To compute in [float32; exports on a GPU: as stored].")
    ] = None,
    device: Device = "auto",
    trust_remote_code: Trust = False,
    offline: Offline = False,
    format: FormatOption = Format.text,
) -> None:
    """Continue a prompt with a decoder, streaming to standard output."""
    from blr.compressor.checkpoint.resolve import resolve_model

    folder = resolve_model(checkpoint, offline=offline).folder
    from blr.compressor import generate as library
    from blr.compressor.load import load_model, load_tokenizer

    if profile:
        library.check_profile(device)
    tokenizer = load_tokenizer(folder, trust=trust_remote_code)
    dtype = dtype or library.default_dtype(folder, device)
    model = load_model(
        folder, "AutoModelForCausalLM", dtype=dtype, device=device, trust=trust_remote_code
    )
    sampling = library.Sampling(max_new_tokens, temperature, top_k, top_p, seed)
    stream = sys.stdout if format is Format.text else None
    result = library.generate(model, tokenizer, prompt, sampling, stream)
    found = library.profile(model, tokenizer, prompt) if profile else None
    if format is Format.json:
        print(json.dumps({**asdict(result), **({"profile": asdict(found)} if found else {})}))
    elif found is not None:
        print(library.profile_text(found), file=sys.stderr)


def verify(output: Checkpoint, format: FormatOption = Format.text) -> None:
    """Check every file of an output against its manifest; exit code 10 on a mismatch."""
    from blr.compressor.checkpoint.manifest import read_manifest, verify_files

    folder = Path(output)
    manifest = read_manifest(folder)
    problems = verify_files(folder, manifest)
    if problems:
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise VerifyError(f"{folder}: {problems[0]}{more}; copy or compress it again")
    result = {"output": str(folder), "files": len(manifest["files"]), "ok": True}
    print_result(result, lambda r: f"{r['output']}: {r['files']} files match the manifest", format)


def print_result(result: dict[str, Any], text: Any, format: Format) -> None:
    print(json.dumps(result) if format is Format.json else text(result))


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _compress_text(summary: dict[str, Any]) -> str:
    before, after = summary["parameters_before"], summary["parameters_after"]
    errors = ", ".join(f"{kind} {error:.4f}" for kind, error in summary["errors"].items())
    return "\n".join(
        (
            f"output: {summary['output']}",
            f"layers: {summary['layers']} replaced by {summary['method']}, cf {summary['cf']:.3f}",
            f"parameters: {before:,} -> {after:,}",
            f"bytes: {summary['bytes_before']:,} -> {summary['bytes_after']:,}",
            f"error by layer type: {errors}",
            f"time: {summary['seconds']:.1f} s",
        )
    )
