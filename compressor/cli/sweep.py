"""`blr sweep`: many compressions of one model, and which of them are worth their bits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from blr.compressor.base.errors import CapabilityError, kind_of_error
from blr.compressor.cli import values
from blr.compressor.cli.asked import taking
from blr.compressor.cli.from_fields import recipe_options
from blr.compressor.cli.options import (
    Device,
    EvalWindow,
    Format,
    FormatOption,
    Model,
    Offline,
    Quiet,
    Restart,
    print_result,
)
from blr.compressor.healing.settings import checked_minutes

METHODS = "svd,blast"
COMMON = (  # what all points have in common
    *("samples", "seq_len", "mix", "refit", "finish", "rounds"),
    *("blocks", "group", "include", "exclude", "gpu"),
)


@taking(recipe_options(COMMON))
def sweep(
    model: Model,
    output: Annotated[
        Path,
        typer.Option(
            *("--output", "-o"),
            callback=values.place,
            help="Folder of the sweep; one that stopped goes on.",
        ),
    ],
    text: Annotated[
        list[Path],
        typer.Option(
            *("--text", "--eval"),
            callback=values.place,
            help="Text file or .jsonl that losses are measured on; repeatable.",
        ),
    ],
    methods: Annotated[
        str | None,
        typer.Option(help="Structures, as svd,svd-pivot,blast,monarch.", show_default=METHODS),
    ] = None,
    cf: Annotated[
        str, typer.Option(help="Compression factors of structures alone, as 1.5,2.", show_default="none")
    ] = "",
    quantize: Annotated[
        str, typer.Option(help="What their factors are stored in, as none,int8.")
    ] = "none",
    base: Annotated[
        str, typer.Option(help="Bases that structures correct, as int2,int3.", show_default="none")
    ] = "",
    rank: Annotated[
        str, typer.Option(help="Ranks of these corrections, as 8,16.", show_default="none")
    ] = "",
    plain: Annotated[
        str,
        typer.Option(help="Dense weights in few bits or fp8, the line to beat; or none."),
    ] = "int4,int3,int2",
    heal: Annotated[str, typer.Option(help="Minutes of healing of every point, as 0,8.")] = "0",
    calibration: Annotated[
        str | None,
        typer.Option(callback=values.place, help="Calibration of every point, as of blr compress."),
    ] = None,
    seed: Annotated[
        str, typer.Option(help="Seeds of every point; of several, as 0,1, the spread is shown.")
    ] = "0",
    window: EvalWindow = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=2, callback=values.count, help="Only the first tokens of each text."),
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, max=64, help="Points at once on each GPU, or on the CPU.")
    ] = 1,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep every checkpoint, not its figures.")
    ] = False,
    device: Device = "auto",
    restart: Restart = False,
    offline: Offline = False,
    quiet: Quiet = False,
    format: FormatOption = Format.text,
    **common: Any,
) -> None:
    """Compress one model in many ways, and show bits a weight against what is lost in texts."""
    from blr.compressor.base.progress import Progress
    from blr.compressor.cli.signals import stop_on_signals
    from blr.compressor.commands.sweep.grid import NONE, Grid, listed, points_of
    from blr.compressor.commands.sweep.page import table
    from blr.compressor.commands.sweep.run import Settings
    from blr.compressor.commands.sweep.run import sweep as run
    from blr.compressor.loading.resolve import resolve_model
    from blr.compressor.planning.roofline import chosen_gpu
    from blr.compressor.text.reading import check_text

    gpu = common.pop("gpu")
    common = {name: value for name, value in common.items() if value not in (None, [])}
    lines = () if plain == NONE else listed("--plain", plain)
    sizes = (
        *(listed("--cf", cf, float), listed("--quantize", quantize, least=1)),
        *(listed("--base", base), listed("--rank", rank, int)),
    )
    seeds = listed("--seed", seed, int)
    if len(seeds) == 1:
        common["seed"], seeds = seeds[0], ()
    usual = METHODS if sizes[0] or sizes[2] else ""
    named = listed("--methods", usual if methods is None else methods, least=bool(usual))
    heals = listed("--heal", heal, float, least=1)
    for minutes in filter(None, heals):
        checked_minutes(minutes)
    grid = Grid(named, *sizes, lines, heals, seeds)
    card, _ = chosen_gpu(gpu)
    recipes = points_of(grid, common, calibration is not None)
    judging = (("--window", window), ("--max-tokens", max_tokens))
    tokens = tuple(word for name, value in judging if value is not None for word in (name, str(value)))
    with stop_on_signals() as running:
        if calibration is not None:
            check_text(calibration, offline)
        running.kept, running.place = "finished points are", output
        found = resolve_model(model, offline=offline)
        settings = Settings(
            model=model,
            texts=tuple(text),
            common=common,
            calibration=calibration,
            evaluate=tokens,
            device=device,
            jobs=jobs,
            keep=keep,
            restart=restart,
            gpu=card.name,
            offline=offline,
        )
        result = run(found.folder, recipes, output, settings, Progress(quiet))
    none_made = bool(result["failed"]) and not result["points"]
    if format is not Format.json or not none_made:  # else the error is the one object
        print_result(result, table, format)
    if none_made:
        codes = {point["code"] for point in result["failed"]}
        kind = kind_of_error(codes.pop()) if len(codes) == 1 else CapabilityError
        none = f"none of {len(result['failed'])} points could be made"
        raise kind(f"{none}; mend what {output}/logs say, then run the same command again")
