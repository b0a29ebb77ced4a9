"""The commands that decide and write nothing: `blr plan` and `blr recipes`."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from blr.compressor.cli.commands import Format, FormatOption, Offline

recipes_app = typer.Typer(
    help="List, show and check recipes.", no_args_is_help=True, pretty_exceptions_enable=False
)
Globs = Annotated[list[str] | None, typer.Option(help="As in compress; repeatable.")]


def plan(
    model: Annotated[
        str,
        typer.Argument(help="A checkpoint folder (config.json is enough), a hub id or a short name."),
    ],
    recipe: Annotated[
        str | None, typer.Option("--recipe", "-r", help="Shipped name or YAML file; options win.")
    ] = None,
    method: Annotated[
        str | None, typer.Option("--method", "-m", help="svd [default], monarch, blast, ks or auto.")
    ] = None,
    cf: Annotated[float | None, typer.Option(help="Compression factor [2], over 1.")] = None,
    rank: Annotated[int | None, typer.Option(help="Fixed rank in place of --cf.")] = None,
    blocks: Annotated[int | None, typer.Option(help="Blocks b of Monarch [4] and BLAST [16].")] = None,
    pattern: Annotated[str | None, typer.Option(help="Kronecker-sparse chain.")] = None,
    heads: Annotated[
        str | None, typer.Option(help="Attention by svd: whole, grouped:G, per-head or auto.")
    ] = None,
    include: Globs = None,
    exclude: Globs = None,
    dtype: Annotated[str | None, typer.Option(help="Stored dtype of the factors.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Name in configs/gpus.yaml [h200].")] = None,
    calibrated: Annotated[
        bool, typer.Option("--calibrated", help="Plan for fits weighted by activations.")
    ] = False,
    every: Annotated[bool, typer.Option("--all", help="A row for every layer.")] = False,
    offline: Offline = False,
    format: FormatOption = Format.text,
) -> None:
    """What compress would do to every layer, with sizes and predicted times, from headers alone."""
    from blr.compressor.checkpoint.resolve import resolve_model
    from blr.compressor.outline import open_or_outline
    from blr.compressor.plan import make_plan
    from blr.compressor.plan_table import plan_result, plan_text
    from blr.compressor.recipes import load_recipe
    from blr.compressor.roofline import find_gpu

    given = {
        **{"method": method, "cf": cf, "rank": rank, "blocks": blocks, "pattern": pattern},
        **{"heads": heads, "include": include or None, "exclude": exclude or None},
        **{"dtype": dtype, "gpu": gpu},
    }
    resolved = load_recipe(recipe, {k: v for k, v in given.items() if v is not None})
    card = find_gpu(resolved.gpu)
    found = resolve_model(model, offline=offline, weights=False)
    source, outlined = open_or_outline(found.folder)
    made = make_plan(source, resolved, calibrated=calibrated)
    result = plan_result(made, resolved, card, found.name, outlined)
    print(json.dumps(result) if format is Format.json else plan_text(result, every))


@recipes_app.command("list")
def list_recipes(format: FormatOption = Format.text) -> None:
    """Every shipped recipe with its first line of comment."""
    from blr.compressor.recipes import describe_recipe, shipped_recipes

    found = {name: describe_recipe(path) for name, path in shipped_recipes().items()}
    width = max(len(name) for name in found)
    rows = "\n".join(f"{name.ljust(width)}  {text}" for name, text in found.items())
    print(json.dumps(found) if format is Format.json else rows)


@recipes_app.command("show")
def show_recipe(
    name: Annotated[str, typer.Argument(help="A shipped recipe's name or a YAML file.")],
    format: FormatOption = Format.text,
) -> None:
    """A recipe as written; with --format json as resolved, everything it extends merged in."""
    from blr.compressor.recipes import find_recipe, load_recipe

    resolved = load_recipe(name)
    text = find_recipe(name).read_text("utf-8-sig").rstrip()
    print(json.dumps(resolved.model_dump()) if format is Format.json else text)


@recipes_app.command("validate")
def validate_recipe(
    file: Annotated[str, typer.Argument(help="A YAML file or a shipped recipe's name.")],
    format: FormatOption = Format.text,
) -> None:
    """Check a recipe and all it extends; exit code 3 names line and key of what is wrong."""
    from blr.compressor.recipes import load_recipe

    resolved = load_recipe(file)
    result: dict[str, Any] = {"recipe": file, "valid": True, "method": resolved.method}
    text = f"{file}: valid, method {resolved.method}, {len(resolved.rules)} rules"
    print(json.dumps(result) if format is Format.json else text)
