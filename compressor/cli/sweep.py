"""`blr sweep`: many compressions of one model, and which of them are worth their bits."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from blr.compressor.base.errors import CapabilityError, kind_of_error
from blr.compressor.base.progress import Progress
from blr.compressor.checkpoint.regular import read_start
from blr.compressor.cli.options import (
    Format,
    FormatOption,
    Model,
    Quiet,
    options_for,
    taking,
)
from blr.compressor.cli.signals import Running, stop_on_signals
from blr.compressor.planning.roofline import chosen_gpu
from blr.compressor.recipe.schema import Recipe
from blr.compressor.recipe.settings import EvalSettings, RunSettings, checked_minutes

METHODS = "svd,blast"
COMMON = (  # what all points have in common
    *("samples", "seq_len", "mix", "refit", "finish", "rounds"),
    *("blocks", "group", "grid", "include", "exclude", "gpu"),
)

JUDGING = ("window", "max_tokens")
FIRST = """output text methods cf base rank plain quantize
heal calibration window max_tokens jobs keep device quiet"""


@taking(
    options_for(Recipe, *COMMON),
    options_for(EvalSettings, *JUDGING, "device"),
    options_for(RunSettings, "restart", "offline"),
    first=FIRST,
)
def sweep(
    model: Model,
    output: Path,
    text: list[Path],
    methods: str | None = None,
    cf: str = "",
    quantize: str = "none",
    base: str = "",
    rank: str = "",
    plain: str = "int4,int3,int2",
    heal: str = "0",
    calibration: str | None = None,
    seed: str = "0",
    jobs: Annotated[int, Field(ge=1, le=64)] = 1,
    keep: bool = False,
    quiet: Quiet = False,
    format: FormatOption = Format.text,
    **options: Any,
) -> None:
    """Compress one model in many ways, and compare their sizes and losses on texts.

    Options:
        output (--output, -o): Folder to write; a sweep that stopped there goes on.
        text (--text, --eval): Measure losses on this text file or .jsonl; repeatable.
        methods: Structures to try, as svd,blast,monarch. [svd,blast]
        cf: Compression factors to try for structures alone, as 1.5,2. [none]
        quantize: Storage of factors to try, as none,int8.
        base: Bits of dense weights to correct, as int2,int3. [none]
        rank: Ranks of these corrections to try, as 8,16. [none]
        plain: Compare with dense weights in these bits, as int4,fp8; or none.
        heal: Minutes of healing to try, as 0,8.
        calibration: Fit every point to this text, as --text of blr compress.
        seed: Seeds to try; the spread over several, as 0,1, is shown.
        jobs: Work on this many points at once on each GPU, or on the CPU.
        keep: Keep every checkpoint beside its figures.
    """
    from blr.compressor.commands.sweep import page, run
    from blr.compressor.loading.resolve import resolve_model
    from blr.compressor.text.reading import check_text

    common = {name: options[name] for name in COMMON if options[name] not in (None, [])}
    gpu = common.pop("gpu", None)
    lines = () if plain == run.NONE else run.listed("--plain", plain, str)
    sizes = (
        *(run.listed("--cf", cf, float), run.listed("--quantize", quantize, str, least=1)),
        *(run.listed("--base", base, str), run.listed("--rank", rank, int)),
    )
    seeds = run.listed("--seed", seed, int)
    if len(seeds) == 1:
        common["seed"], seeds = seeds[0], ()
    usual = METHODS if sizes[0] or sizes[2] else ""
    named = run.listed("--methods", usual if methods is None else methods, str, least=bool(usual))
    heals = run.listed("--heal", heal, float, least=1)
    for minutes in filter(None, heals):
        checked_minutes(minutes)
    grid = run.Grid(named, *sizes, lines, heals, seeds)
    card, _ = chosen_gpu(gpu)
    points = run.points_of(grid, common, calibration is not None)
    judging = [(f"--{name.replace('_', '-')}", options[name]) for name in JUDGING]
    tokens = tuple(word for name, value in judging if value is not None for word in (name, str(value)))
    offline = options["offline"]
    with stop_on_signals(Running(kept="finished points are")) as running:
        if calibration is not None:
            check_text(calibration, offline)
        for path in text:
            read_start(path)  # before torch is imported
        running.place = output
        found = resolve_model(model, offline=offline)
        settings = run.SweepSettings(
            model=model,
            texts=tuple(text),
            common=common,
            calibration=calibration,
            evaluate=tokens,
            device=options["device"],
            jobs=jobs,
            keep=keep,
            restart=options["restart"],
            gpu=card.name,
            offline=offline,
        )
        result = run.sweep(found.folder, points, output, settings, Progress(quiet))
    none_made = bool(result.failed) and not result.points
    if format is not Format.json:
        print(page.table(result))
    elif not none_made:  # else the error is the one object
        print(json.dumps(asdict(result)))
    if none_made:
        codes = {point.code for point in result.failed}
        kind = kind_of_error(codes.pop()) if len(codes) == 1 else CapabilityError
        none = f"none of {len(result.failed)} points could be made"
        raise kind(f"{none}; mend what {output}/logs say, then run the same command again")
