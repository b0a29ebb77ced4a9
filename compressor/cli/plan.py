"""`blr plan`: what compress would do."""

from __future__ import annotations

from typing import Annotated

import typer

from blr.compressor.cli import values
from blr.compressor.cli.options import (
    Base,
    Blocks,
    Bpw,
    Cf,
    Couplings,
    Exclude,
    Format,
    FormatOption,
    Gpu,
    Group,
    Heads,
    Include,
    KvCf,
    KvQuantize,
    KvRank,
    Method,
    Offline,
    Pattern,
    Pivot,
    Quantize,
    Rank,
    RecipeOption,
    StoredDtype,
    TokensPerSecond,
    print_result,
)


def plan(
    model: Annotated[
        str,
        typer.Argument(
            callback=values.name,
            help="A checkpoint folder (config.json is enough), a hub id or a short name.",
        ),
    ],
    recipe: RecipeOption = None,
    method: Method = None,
    cf: Cf = None,
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
    couplings: Couplings = None,
    include: Include = None,
    exclude: Exclude = None,
    dtype: StoredDtype = None,
    gpu: Gpu = None,
    calibrated: Annotated[
        bool, typer.Option("--calibrated", help="Plan for fits weighted by activations.")
    ] = False,
    heal: Annotated[
        bool, typer.Option("--heal", help="Tell what blr heal would take, whatever the model.")
    ] = False,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=4096,
            help="GPUs that compressing, and healing, would have.",
            show_default="1",
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="A row for every layer.")] = False,
    offline: Offline = False,
    format: FormatOption = Format.text,
) -> None:
    """What compress would do to every layer, with sizes and predicted times, from headers alone."""
    from blr.compressor.fitting import forecast as fits
    from blr.compressor.heal import forecast as healing
    from blr.compressor.loading.resolve import resolve_model
    from blr.compressor.planning.outline import open_or_outline
    from blr.compressor.planning.plan import make_plan, unmeasured
    from blr.compressor.planning.roofline import chosen_gpu
    from blr.compressor.planning.speed import paced
    from blr.compressor.planning.table import plan_result, plan_text
    from blr.compressor.recipe.idle import refuse_idle
    from blr.compressor.recipe.shipped import load_recipe

    given = {
        **{"quantize": quantize, "group": group, "base": base, "bpw": bpw, "couplings": couplings},
        **{"method": method, "cf": cf, "rank": rank, "blocks": blocks, "pattern": pattern},
        **{"kv_rank": kv_rank, "kv_cf": kv_cf, "kv_quantize": kv_quantize},
        **{"pivot": pivot, "heads": heads, "include": include or None, "exclude": exclude or None},
        **{"dtype": dtype, "gpu": gpu, "tokens_per_second": tokens_per_second},
    }
    asked = {k: v for k, v in given.items() if v is not None}
    resolved = load_recipe(recipe, asked)
    refuse_idle(resolved, {k: v for k, v in asked.items() if k != "gpu"}, calibrated)
    card, chosen = chosen_gpu(resolved.gpu)
    found = resolve_model(model, offline=offline, weights=False)
    source, outlined = open_or_outline(found.folder)
    resolved, said = paced(source, resolved, calibrated)
    made = make_plan(source, resolved, calibrated=calibrated)
    made.notes += [*unmeasured(resolved, calibrated), *[said] * bool(said)]
    result = plan_result(made, resolved, card, found.name, outlined)
    result["gpu"]["chosen"] = chosen
    result["compress"] = fits.planned(source, made, resolved, card, gpus or 1, calibrated)
    if heal or healing.is_told(source):
        result["heal"] = healing.planned(source, made, card, gpus or 1)
    print_result(result, lambda r: plan_text(r, every), format)
