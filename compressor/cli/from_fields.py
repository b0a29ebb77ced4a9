"""Options of commands, made of docstrings and of the fields of settings (`recipe/option`), and those
that several commands share."""

import inspect
import json
from collections.abc import Callable, Collection, Iterable
from copy import copy
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from typer.models import ArgumentInfo

from blr.compressor.base.device import check_device
from blr.compressor.base.quoting import printable_all
from blr.compressor.cli import values
from blr.compressor.recipe.option import Option, described, options_of
from blr.compressor.recipe.schema import Recipe
from blr.compressor.recipe.settings import EvalSettings, RunSettings
from blr.compressor.workspace.shards import parse_size

Command = Callable[..., None]
CHECKS = {int: values.count, float: values.number, Path: values.place, list[Path]: values.place}
NAMED_CHECKS: dict[tuple[str, object], object] = {  # by name and type, of what is more than its type
    **{("seed", int): values.seed, ("device", str): check_device, ("teacher", str): values.name},
    **{("max_shard_size", int): parse_size, ("train", list[str]): values.listed},
    **{("data", list[str]): values.place, ("calibration", str): values.place},
    **{("temperature", float): values.temperature, ("top_p", float): values.probability},
    **{("cf", float): values.factor, ("gpu_name", str): values.gpu_name},
}
ADVANCED = "Advanced"  # title of the panel of options that a first user does not need
TYPED = {"max_shard_size": "5GB"}  # defaults as one would type them


def taking(*groups: Iterable[inspect.Parameter], first: str = "") -> Callable[[Command], Command]:
    """Decorator: give a command the options of `groups` and those in its docstring's ``Options:``. Help
    shows those named in `first` in that order and others as advanced; without `first` all alike."""
    order = first.split()

    def decorated(command: Command) -> Command:
        signature, told = inspect.signature(command, eval_str=True), options_of(command)
        own = {
            name: _parameter(name, told[name], p.default, check=True) if name in told else p
            for name, p in signature.parameters.items()
            if p.kind is not p.VAR_KEYWORD
        }
        rest = {p.name: p for group in groups for p in group if p.name not in own}
        every = [p.replace(kind=p.KEYWORD_ONLY) for p in (own | rest).values()]
        if order:
            every = [_with(p, rich_help_panel=None if p.name in order else ADVANCED) for p in every]
            every.sort(key=lambda p: order.index(p.name) if p.name in order else len(order))
        command.__signature__ = signature.replace(parameters=every)  # type: ignore[attr-defined]
        command.__doc__ = described(command)
        return command

    return decorated


def recipe_options(names: Collection[str] = ()) -> list[inspect.Parameter]:
    """Options of the recipe's fields, or of these `names`; None if not typed."""
    return [
        _parameter(name, option, None)
        for name, option in options_of(Recipe).items()
        if name in (names or Recipe.model_fields)
    ]


def setting_options(owner: Any) -> list[inspect.Parameter]:
    """Options of the fields of a dataclass, with its defaults; what is typed is checked at once."""
    defaults = {field.name: TYPED.get(field.name, field.default) for field in fields(owner)}
    return [_parameter(n, option, defaults[n], check=True) for n, option in options_of(owner).items()]


def command_options(command: Command, hidden: Collection[str]) -> list[inspect.Parameter]:
    """The parameters of another command for this one too, some `hidden` from its help."""
    found = inspect.signature(command, eval_str=True).parameters.values()
    return [_with(option, hidden=True) if option.name in hidden else option for option in found]


def typed(owner: type, name: str, *names: str) -> object:
    """An option of typer like that of a field, for parameters that are checked as such fields are."""
    return _info(name, options_of(owner)[name], names, check=True)


def _parameter(name: str, option: Option, default: object, check: bool = False) -> inspect.Parameter:
    kind, names = option.kind, option.names
    if kind is bool and default is not False:
        names = (f"{names[0]}/--no-{names[0].removeprefix('--')}",)
    repeats = default == () and kind in (list[str], list[Path])
    if isinstance(default, tuple) and not repeats:  # a list by commas, which its own reader checks
        kind, default = str, ",".join(map(str, default)) or None
        check = (name, option.kind) in NAMED_CHECKS
    default = None if repeats else default
    if isinstance(default, str):
        kind = str
    info: object = _info(name, option, names, check)
    taken: object = Annotated[kind if default is not None else kind | None, info]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=taken)


def _info(name: str, option: Option, names: Collection[str], check: bool) -> object:
    checks = (NAMED_CHECKS.get((name, option.kind)) or CHECKS.get(option.kind)) if check else None
    more: dict[str, Any] = {"min": option.limits.least, "max": option.limits.most, "callback": checks}
    shown = option.default or True
    return typer.Option(..., *names, help=option.help, show_default=shown, **more)


def _with(option: inspect.Parameter, **changes: object) -> inspect.Parameter:
    """An option with other attributes of typer's; arguments stay."""
    kind, info = get_args(option.annotation)
    if isinstance(info, ArgumentInfo):
        return option
    info = copy(info)
    vars(info).update(changes)
    return option.replace(annotation=Annotated[kind, info])


class Format(StrEnum):
    """How results are printed."""

    text = "text"
    json = "json"


Model = Annotated[
    str,
    typer.Argument(
        callback=values.name,
        help="A checkpoint folder, a hub id (owner/name) or a short name (llama-7b).",
    ),
]
Checkpoint = Annotated[
    str, typer.Argument(callback=values.name, help="A checkpoint folder or a hub id.")
]
Output = Annotated[str, typer.Argument(callback=values.name, help="A folder that blr wrote.")]
OutputFolder = Annotated[
    Path, typer.Option("--output", "-o", callback=values.place, help="Write this folder.")
]
FormatOption = Annotated[Format, typer.Option("--format", help="Print text, or one JSON object.")]
Device = Annotated[str, typed(EvalSettings, "device")]
Threads = Annotated[int | None, typed(EvalSettings, "threads")]
Gpus = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=64,
        help="Start this many processes, one on each GPU (or on the CPU with --device cpu).",
        show_default="1",
    ),
]
EvalWindow = Annotated[int | None, typed(EvalSettings, "window")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
Verify = Annotated[bool, typed(EvalSettings, "verify", "--verify/--no-verify")]
Offline = Annotated[bool, typed(RunSettings, "offline", "--offline")]
Trust = Annotated[bool, typed(EvalSettings, "trust_remote_code", "--trust-remote-code")]
Revision = Annotated[str | None, typed(RunSettings, "revision")]
Restart = Annotated[bool, typed(RunSettings, "restart", "--restart")]
Blocks = Annotated[int | None, typed(Recipe, "blocks")]


def print_result(result: dict[str, object], text: Any, format: Format) -> None:
    """One JSON object, or `text` of the result with names that a terminal might obey escaped."""
    print(json.dumps(result) if format is Format.json else text(printable_all(result)))
