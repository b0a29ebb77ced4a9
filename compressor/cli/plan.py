"""`blr plan`: what compress would do."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from blr.compressor.cli import values
from blr.compressor.cli.compress import compress
from blr.compressor.cli.from_fields import (
    Format,
    FormatOption,
    Offline,
    Revision,
    command_options,
    print_result,
    taking,
)
from blr.compressor.recipe.option import Limits

NO_USE = (  # options of how compress runs, which change no plan
    *("output", "overwrite", "restart", "max_shard_size", "allow_pickle", "check", "stream"),
    *("device", "threads", "quiet"),
)


@taking(
    command_options(compress, hidden=NO_USE),
    first="method cf quantize base rank calibrated gpu gpus heal every recipe format",
)
def plan(
    model: Annotated[
        str,
        typer.Argument(
            callback=values.name,
            help="A checkpoint folder (config.json is enough), a hub id or a short name.",
        ),
    ],
    calibrated: bool = False,
    heal: Annotated[
        float | None,
        typer.Option(
            metavar="[MINUTES]",
            help="Predict what blr heal would take, for encoders as well.",
            show_default="of decoders",
        ),
    ] = None,
    gpus: Annotated[int, Limits(1, 4096)] | None = None,
    every: bool = False,
    revision: Revision = None,
    offline: Offline = False,
    format: FormatOption = Format.text,
    **options: Any,
) -> None:
    """Show what compress would do, with sizes, times and memory, from headers alone.

    It takes every option of blr compress; those of how that runs change nothing here.

    Options:
        calibrated: Plan as with --text.
        gpus: Predict times on this many GPUs. [1]
        every (--all): Show a row for every layer.
    """
    from blr.compressor.base.progress import Progress
    from blr.compressor.loading.resolve import resolve_model
    from blr.compressor.planning import forecast, forecast_healing
    from blr.compressor.planning.outline import open_or_outline
    from blr.compressor.planning.plan import make_plan, unmeasured
    from blr.compressor.planning.roofline import chosen_gpu
    from blr.compressor.planning.sizing import draft_form, sized
    from blr.compressor.planning.table import plan_result, plan_text
    from blr.compressor.recipe.chosen import asked_recipe
    from blr.compressor.recipe.schema import Recipe
    from blr.compressor.recipe.settings import MINUTES, HealOptions, checked_minutes
    from blr.compressor.text.reading import OWN

    asked = {name: options[name] for name in options if name in Recipe.model_fields}
    text, effort = options["calibration"], options["effort"]
    calibrated = calibrated or text is not None or effort is not None
    resolved = asked_recipe(options["recipe"], asked, calibrated, effort, text == OWN, apart=("gpu",))
    checked_minutes(heal)
    card, chosen = chosen_gpu(resolved.gpu)
    found = resolve_model(model, revision=revision, offline=offline, weights=False)
    source, outlined = open_or_outline(found.folder)
    Progress().notes(source.notes())
    choose = draft_form if options["for_draft"] else sized
    resolved, said = choose(source, resolved, calibrated)
    made = make_plan(source, resolved, calibrated=calibrated)
    made.notes += [*unmeasured(resolved, calibrated), *[said] * bool(said)]
    result = plan_result(made, resolved, card, found.name, outlined)
    result["gpu"]["chosen"] = chosen
    result["compress"] = forecast.planned(source, made, resolved, card, gpus or 1, calibrated)
    if heal is not None or forecast_healing.is_told(source):
        usual = HealOptions("", minutes=MINUTES)
        result["heal"] = forecast_healing.planned(source, made, usual, card, gpus or 1)
    print_result(result, lambda r: plan_text(r, every), format)
