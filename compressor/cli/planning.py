"""Commands that say what will be done: plan, and recipes, of which shipped ones are listed."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from pydantic import Field

from blr.compressor.cli.making import compress
from blr.compressor.cli.options import (
    Format,
    FormatOption,
    command_options,
    named,
    print_result,
    taking,
)

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
        str, named("A checkpoint folder (config.json is enough), a hub id or a short name.")
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
    gpus: Annotated[int, Field(ge=1, le=4096)] | None = None,
    every: bool = False,
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
    place = {name: options[name] for name in ("revision", "offline")}
    found = resolve_model(model, weights=False, **place)
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


recipes_app = typer.Typer(help="List, show and check recipes.", pretty_exceptions_enable=False)


@recipes_app.command("list")
def list_recipes(format: FormatOption = Format.text) -> None:
    """List the shipped recipes."""
    from blr.compressor.base.tables import aligned
    from blr.compressor.recipe.chosen import describe_recipe, shipped_recipes

    found = {name: describe_recipe(path) for name, path in shipped_recipes().items()}
    print(json.dumps(found) if format is Format.json else aligned(list(found.items())))


@recipes_app.command("show")
def show_recipe(
    name: Annotated[str, typer.Argument(help="A shipped recipe's name or a YAML file.")],
    format: FormatOption = Format.text,
) -> None:
    """Show a recipe; with --format json as resolved, with all that it extends."""
    from blr.compressor.checkpoint.regular import read_text
    from blr.compressor.recipe.chosen import find_recipe, load_recipe
    from blr.compressor.recipe.yaml_file import MAX_BYTES

    resolved = load_recipe(name)
    text = read_text(find_recipe(name), MAX_BYTES).rstrip()
    print(json.dumps(resolved.model_dump()) if format is Format.json else text)


@recipes_app.command("validate")
def validate_recipe(
    file: Annotated[str, typer.Argument(help="A YAML file or a shipped recipe's name.")],
    format: FormatOption = Format.text,
) -> None:
    """Check a recipe and all that it extends; exit code 3 if it is wrong."""
    from blr.compressor.recipe.chosen import load_recipe

    resolved = load_recipe(file)
    result: dict[str, object] = {"recipe": file, "valid": True, "method": resolved.method}
    text = "{recipe}: valid, method {method}, " + f"{len(resolved.rules)} rules"
    print_result(result, lambda r: text.format(**r), format)
