"""`blr heal`: a compressed checkpoint trained to answer as the dense one does."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from blr.compressor.base import process_environment as environment
from blr.compressor.cli import values
from blr.compressor.cli.options import (
    AllowPickle,
    Check,
    Device,
    Format,
    FormatOption,
    Gpus,
    MaxShardSize,
    Offline,
    OutputFolder,
    Overwrite,
    Quiet,
    Restart,
    Revision,
    Threads,
    check_text,
    healed_text,
    print_result,
)
from blr.compressor.healing.settings import KINDS, VARY, HealOptions, check_options


def heal(
    checkpoint: Annotated[
        str,
        typer.Argument(callback=values.name, help="A folder written by blr compress, or a hub id."),
    ],
    teacher: Annotated[
        str | None,
        typer.Option(
            callback=values.optional_name,
            help="The dense model it came from: folder, hub id or short name.",
            show_default="the one that its manifest names",
        ),
    ] = None,
    *,
    output: OutputFolder,
    data: Annotated[
        list[str] | None,
        typer.Option(
            *("--text", "--data"),
            callback=values.place,
            help="Text, .jsonl or data set, repeatable; self: the teacher's own text.",
            show_default="self",
        ),
    ] = None,
    mix: Annotated[
        float | None,
        typer.Option(help="Share of the teacher's own text beside yours.", show_default="0.67"),
    ] = None,
    own_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            callback=values.count,
            help="Tokens of own text to write.",
            show_default="by the budget, at most 16777216 on a GPU, 65536 on a CPU",
        ),
    ] = None,
    vary: Annotated[
        float | None,
        typer.Option(
            help="Share of tokens replaced where a text is read for the fourth time and on, lest it be "
            "learnt by heart.",
            show_default=f"{VARY:g}; 0 for --loss lm and encoders",
        ),
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="Minutes of training.", show_default="3")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the text instead.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps instead.")] = None,
    lr: Annotated[
        float, typer.Option(help="Rate a step, relative to the root mean square of each tensor.")
    ] = 0.003,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            callback=values.count,
            help="Tokens a step, of all processes.",
            show_default="64 windows on a GPU, 8 on a CPU",
        ),
    ] = None,
    window: Annotated[int, typer.Option(min=8, callback=values.count, help="Tokens a window.")] = 512,
    loss: Annotated[
        str, typer.Option(help="kl: distance from the teacher's answers; lm: loss on the text.")
    ] = "kl",
    top_k: Annotated[
        int | None,
        typer.Option(
            min=1,
            callback=values.count,
            help="Compare only the teacher's K likeliest tokens.",
            show_default="all",
        ),
    ] = None,
    hidden: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            callback=values.number,
            help="Weight of the distance between the blocks' outputs.",
            show_default="4; 1 for encoders, 0 with --loss lm",
        ),
    ] = None,
    train: Annotated[str, typer.Option(help=f"Some of {', '.join(KINDS)}.")] = ",".join(KINDS[:3]),
    lora: Annotated[
        int | None,
        typer.Option(
            min=1,
            callback=values.count,
            help="Train additions of this rank to every layer, merged in the end, not factors.",
            show_default="factors",
        ),
    ] = None,
    warmup: Annotated[
        float,
        typer.Option(
            min=0.0, max=0.9, callback=values.number, help="Share of the run in which the rate rises."
        ),
    ] = 0.05,
    clip: Annotated[float, typer.Option(help="Largest norm of the gradient.")] = 1.0,
    patience: Annotated[
        int | None,
        typer.Option(
            min=1, callback=values.count, help="Stop after so many tenths of the run without a new best."
        ),
    ] = None,
    checkpointing: Annotated[
        bool | None,
        typer.Option(
            "--checkpointing/--no-checkpointing",
            help="Less memory: keep only the inputs of the blocks.",
            show_default="where it would not fit a GPU",
        ),
    ] = None,
    compile: Annotated[bool, typer.Option("--compile", help="torch.compile blocks and loss.")] = False,
    fsdp: Annotated[
        bool | None,
        typer.Option(
            "--fsdp/--no-fsdp",
            help="Share both models out over the processes (FSDP2), so that none holds all.",
            show_default="where they would not fit a GPU",
        ),
    ] = None,
    track: Annotated[
        str | None,
        typer.Option(
            help="Also log to tensorboard, wandb or another of accelerate's.", show_default="none"
        ),
    ] = None,
    save_minutes: Annotated[
        float, typer.Option(min=0.0, callback=values.number, help="Minutes between saved states.")
    ] = 5.0,
    seed: Annotated[
        int, typer.Option(callback=values.seed, help="Seed of own text and of the order of windows.")
    ] = 0,
    device: Device = "auto",
    gpus: Gpus = None,
    threads: Threads = None,
    max_shard_size: MaxShardSize = "5GB",
    revision: Revision = None,
    overwrite: Overwrite = False,
    restart: Restart = False,
    allow_pickle: AllowPickle = False,
    check: Check = True,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Go on with a teacher that does not fit, and write a result that loses over one nat.",
        ),
    ] = False,
    offline: Offline = False,
    quiet: Quiet = False,
    format: FormatOption = Format.text,
) -> None:
    """Train a compressed checkpoint for minutes to answer as the dense one does."""
    from blr.compressor.cli.crew import end_member, started
    from blr.compressor.cli.signals import stop_on_signals

    with stop_on_signals() as running, started(gpus, running):
        from blr.compressor.base.progress import Progress
        from blr.compressor.base.threads import use_threads
        from blr.compressor.healing.teacher import named_teacher
        from blr.compressor.healing.tracking import check_installed
        from blr.compressor.loading.resolve import resolve_model
        from blr.compressor.text.reading import check_text
        from blr.compressor.workspace.ownership import check_output
        from blr.compressor.workspace.shards import parse_size

        use_threads(threads, environment.local_count())
        options = HealOptions(
            source_name=checkpoint,
            revision=revision,
            data=tuple(data or ()),
            mix=mix,
            own_tokens=own_tokens,
            vary=vary,
            loss=loss,
            top_k=top_k,
            hidden=hidden,
            train=tuple(part.strip() for part in train.split(",") if part.strip()),
            lora=lora,
            minutes=minutes,
            epochs=epochs,
            steps=steps,
            rate=lr,
            warmup=warmup,
            clip=clip,
            batch=batch,
            window=window,
            patience=patience,
            checkpointing=checkpointing,
            compile=compile,
            fsdp=fsdp,
            track=track,
            seed=seed,
            device=device,
            save_minutes=save_minutes,
            max_shard_size=parse_size(max_shard_size),
            overwrite=overwrite,
            restart=restart,
            allow_pickle=allow_pickle,
            force=force,
            check=check,
            offline=offline,
        )
        options = check_options(options)
        check_installed(track or "")
        for text in options.files:
            check_text(text, offline)
        running.output, running.kept = output, "what was saved so far is"
        if first := environment.is_first():
            check_output(output, overwrite, filter(None, (checkpoint, teacher)))
        progress = Progress(quiet, silent=not first)
        found = resolve_model(checkpoint, revision=revision, offline=offline)
        if teacher is None:
            dense = named_teacher(found.folder, offline)
            progress.notes([f"teacher: {dense.folder}, as the manifest says"])
        else:
            dense = resolve_model(teacher, offline=offline)
        progress.loading()
        from blr.compressor.commands.heal import heal as run

        named = options.named(found.name, found.revision, dense.name)
        summary = run(found.folder, dense.folder, output, named, progress)
        if summary is None:  # in all processes but the first
            end_member()
    if summary is not None:
        print_result(asdict(summary), _heal_text, format)


def _heal_text(summary: dict[str, Any]) -> str:
    check = [check_text(summary["check"])] if summary["steps"] else []
    lines = [f"output: {summary['output']}", *healed_text(summary), *check]
    return "\n".join([*lines, f"time: {summary['seconds']:.1f} s"])
