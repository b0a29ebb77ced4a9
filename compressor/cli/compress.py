"""`blr compress`: a checkpoint with structured layers."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from blr.compressor.base import process_environment as environment
from blr.compressor.base.errors import UsageError
from blr.compressor.cli import values
from blr.compressor.cli.asked import asked_recipe
from blr.compressor.cli.options import (
    AllowPickle,
    Base,
    Blocks,
    Bpw,
    Cf,
    Check,
    Couplings,
    Device,
    Exclude,
    Force,
    Format,
    FormatOption,
    Gpu,
    Gpus,
    Group,
    Heads,
    Include,
    KvCf,
    KvQuantize,
    KvRank,
    MaxShardSize,
    Method,
    Model,
    Offline,
    Overwrite,
    Pattern,
    Pivot,
    Quantize,
    Quiet,
    Rank,
    RecipeOption,
    Restart,
    Revision,
    StoredDtype,
    Threads,
    TokensPerSecond,
    check_text,
    healed_text,
    print_result,
)
from blr.compressor.healing.settings import MINUTES, SELF, checked_minutes


def compress(
    model: Model,
    method: Method = None,
    cf: Cf = None,
    output: Annotated[
        Path | None,
        typer.Option(
            *("--output", "-o"),
            callback=values.place,
            help="Folder to write.",
            show_default="NAME-METHOD-cfCF here",
        ),
    ] = None,
    rank: Rank = None,
    blocks: Blocks = None,
    pattern: Pattern = None,
    pivot: Pivot = None,
    heads: Heads = None,
    kv_rank: KvRank = None,
    kv_cf: KvCf = None,
    kv_quantize: KvQuantize = None,
    quantize: Quantize = None,
    group: Group = None,
    base: Base = None,
    bpw: Bpw = None,
    tokens_per_second: TokensPerSecond = None,
    gpu: Gpu = None,
    couplings: Couplings = None,
    solver: Annotated[
        str | None, typer.Option(help="BLAST: varpro or precgd.", show_default="varpro")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds or steps of the solver.", show_default="the solver's")
    ] = None,
    include: Include = None,
    exclude: Exclude = None,
    dtype: StoredDtype = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of solvers that start at random.", show_default="0")
    ] = None,
    recipe: RecipeOption = None,
    calibration: Annotated[
        str | None,
        typer.Option(
            *("--text", "--calibration"),
            callback=values.place,
            help="Text file, .jsonl, data set, or self (the model's own text): fit to its activations.",
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(help="Calibration windows or sentences at most.", show_default="256"),
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens a calibration window.", show_default="512")
    ] = None,
    mix: Annotated[
        float | None,
        typer.Option(help="Share of the calibration that is the model's own text.", show_default="none"),
    ] = None,
    allocation: Annotated[
        str | None,
        typer.Option(
            help="uniform, or sensitivity, which needs --text.",
            show_default="sensitivity if it can be",
        ),
    ] = None,
    refit: Annotated[
        int | None,
        typer.Option(
            help="Epochs of the joint refit of each block.",
            show_default="2 on a GPU, 4 of packed weights, 0 on a CPU",
        ),
    ] = None,
    finish: Annotated[
        int | None,
        typer.Option(
            help="Epochs of a last pass, which trains all blocks together to predict as dense.",
            show_default="8 on a GPU with the room, else 0",
        ),
    ] = None,
    heal: Annotated[
        float | None,
        typer.Option(
            metavar="[MINUTES]",
            help="Then train it for minutes to answer as the dense model does, as blr heal.",
            show_default=f"not; {MINUTES:g} without a number",
        ),
    ] = None,
    device: Device = "auto",
    gpus: Gpus = None,
    threads: Threads = None,
    max_shard_size: MaxShardSize = "5GB",
    revision: Revision = None,
    overwrite: Overwrite = False,
    restart: Restart = False,
    allow_pickle: AllowPickle = False,
    force: Force = False,
    check: Check = True,
    stream: Annotated[
        bool,
        typer.Option(
            "--stream",
            help="Keep the weights of a hub id there and fetch them as they are read.",
        ),
    ] = False,
    offline: Offline = False,
    quiet: Quiet = False,
    format: FormatOption = Format.text,
) -> None:
    """Replace the linear layers of a checkpoint by structured ones, or store them in fewer bits."""
    options = dict(locals())
    from blr.compressor.cli.crew import end_member, started
    from blr.compressor.cli.signals import stop_on_signals

    with stop_on_signals() as running, started(gpus, running):
        from blr.compressor.base.progress import Progress
        from blr.compressor.commands.compress import Settings
        from blr.compressor.commands.compress import compress as run
        from blr.compressor.loading.resolve import default_output, resolve_model
        from blr.compressor.text.reading import check_text
        from blr.compressor.workspace.ownership import check_output
        from blr.compressor.workspace.shards import parse_size

        resolved = asked_recipe(options, calibration is not None)
        if calibration is not None:
            check_text(calibration, offline)
        shard_bytes = parse_size(max_shard_size)
        running.output = output = output or default_output(model, resolved)
        if first := environment.is_first():
            check_output(output, overwrite, (model,))
        heal_minutes = checked_minutes(heal)
        whole = bool(heal_minutes or mix or calibration == SELF or allow_pickle)
        if stream and whole:
            raise UsageError(
                "--stream with --heal, --mix, --calibration self or --allow-pickle: these take the "
                "whole model; leave it out, and set HF_HOME to a disk with room"
            )
        found = resolve_model(
            model, revision=revision, offline=offline, stream=stream or (False if whole else None)
        )
        settings = Settings(
            source_name=found.name,
            revision=found.revision,
            device=device,
            threads=threads,
            max_shard_size=shard_bytes,
            overwrite=overwrite,
            restart=restart,
            allow_pickle=allow_pickle,
            force=force,
            check=check,
            calibration=calibration,
            offline=offline,
            heal=heal_minutes,
        )
        summary = run(found.folder, resolved, output, settings, Progress(quiet, silent=not first))
        if summary is None:  # in all processes but the first
            end_member()
    if summary is not None:
        print_result(asdict(summary), _compress_text, format)


def _change(factor: float) -> str:
    return f"{factor:.3f} times smaller" if factor >= 1 else f"{1 / factor:.3f} times larger"


def _spent(spent: dict[str, float]) -> str:
    """What took a second or more, in the order in which it began."""
    told = ", ".join(f"{what} {seconds:.0f}" for what, seconds in spent.items() if seconds >= 1)
    return f" ({told})" if told else ""


def _compress_text(summary: dict[str, Any]) -> str:
    before, after = summary["parameters_before"], summary["parameters_after"]
    kept = f", {summary['kept']} kept dense" if summary["kept"] else ""
    found = summary["output_errors"] or summary["errors"]
    what = "outputs, on the calibration text," if summary["output_errors"] else "weights"
    errors = ", ".join(f"{kind} {error:.4f}" for kind, error in found.items())
    return "\n".join(
        (
            f"output: {summary['output']}",
            f"layers: {summary['became']}{kept}, cf {summary['cf']:.3f}, "
            f"{summary['bits']:.3f} bits a weight, {summary['share']:.1%} of the model's parameters",
            f"parameters: {before:,} -> {after:,}",
            f"bytes: {summary['bytes_before']:,} -> {summary['bytes_after']:,}, "
            f"the whole model {_change(summary['factor'])}",
            f"relative error of {what} by layer type: {errors}",
            *healed_text(summary["healed"] or {}),
            check_text(summary["check"]),
            f"time: {summary['seconds']:.1f} s{_spent(summary['spent'])}",
            *([f"note: {summary['advice']}"] if summary["advice"] else []),
        )
    )
