"""`blr recipes`: the shipped recipes, and whether one of your own is right."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from blr.compressor.cli.from_fields import Format, FormatOption, print_result

recipes_app = typer.Typer(
    help="List, show and check recipes.",
    pretty_exceptions_enable=False,
)


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
