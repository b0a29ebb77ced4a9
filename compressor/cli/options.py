"""Options of commands: made of docstrings and of the fields of settings (`recipe/option`), shared by
several commands, and what their values may be.

Wrong values are refused before anything is read. Beside the ranges that options state, callbacks refuse
what such ranges let pass (NaN) and what no library below holds (integers of hundreds of digits).
"""

import inspect
import json
import os
import re
from collections.abc import Callable, Collection, Iterable
from copy import copy
from dataclasses import fields, is_dataclass
from enum import StrEnum
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from typer.core import TyperCommand
from typer.models import ArgumentInfo

from blr.compressor.base.device import check_device
from blr.compressor.base.errors import UsageError
from blr.compressor.base.quoting import is_numeral, printable_all
from blr.compressor.recipe.option import Option, described, options_of
from blr.compressor.recipe.settings import MINUTES
from blr.compressor.workspace.shards import parse_size

MOST = 2**31 - 1
COLDEST = 1e-4  # a temperature below it takes logits out of the range of float32
SEEDS = range(-(2**63), 2**64)  # what torch takes


def check_name(param: typer.CallbackParam, value: str | None) -> str | None:
    """Of a model or folder; an empty one, of a variable that is not set, would be the current folder."""
    if value is None:
        return None
    if not value:
        raise UsageError(
            f"{param.opts[0]} is empty: expected a name or a path; check the variable it came from"
        )
    return os.path.expanduser(value)


def expanded(value: object) -> object:
    """A path, or several, with ``~`` expanded, which shells leave as it is in ``--output=~/x``."""
    if isinstance(value, list | tuple):
        return [expanded(one) for one in value]
    return type(value)(os.path.expanduser(value)) if isinstance(value, str | Path) else value


def _checked(is_right: Callable[..., bool], expected: str) -> Callable[..., object]:
    """A callback that refuses values other than `expected`; None passes."""

    def check(param: typer.CallbackParam, value: object) -> object:
        if value is not None and not is_right(value):
            shown = f"{value:g}" if isinstance(value, float) else str(value)[:40]
            raise UsageError(f"{param.opts[0]} is {shown}: expected {expected}")
        return value

    return check


check_count = _checked(lambda n: abs(n) <= MOST, f"at most {MOST}")
check_number = _checked(isfinite, "a finite number")
check_probability = _checked(lambda p: 0 < p <= 1, "a probability above 0, up to 1")
check_temperature = _checked(  # 0 for greedy decoding, or what logits can be divided by
    lambda t: t == 0 or (isfinite(t) and t >= COLDEST), f"0, or a finite number of at least {COLDEST:g}"
)
check_seed = _checked(lambda n: n in SEEDS, "an integer of 64 bits")
check_factor = _checked(lambda cf: isfinite(cf) and cf > 1, "a compression factor over 1")
check_gpu_name = _checked(  # under which a table is kept
    lambda name: re.fullmatch(r"[A-Za-z0-9][\w-]{0,63}", name, re.ASCII) is not None,
    "a name of letters, digits, _ and -",
)


def listed(value: str) -> tuple[str, ...]:
    """Names with commas between."""
    return tuple(part.strip() for part in value.split(",") if part.strip())


VALUES = {"--heal": f"{MINUTES:g}"}  # by option, its value where none follows


class OptionalValues(TyperCommand):
    """A command that takes the options of `VALUES` without a number, too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, completed(args))


def completed(args: list[str]) -> list[str]:
    """`args` with a value for every option of `VALUES` that no number follows."""
    found = []
    for n, arg in enumerate(args):
        follows = args[n + 1] if n + 1 < len(args) else ""
        bare = arg in VALUES and not is_numeral(follows)
        found.append(f"{arg}={VALUES[arg]}" if bare else arg)
    return found


Command = Callable[..., None]
Check = Callable[..., object]
CHECKS: dict[object, Check] = {
    **{int: check_count, float: check_number},
    **{Path: expanded, list[Path]: expanded},
}
NAMED_CHECKS: dict[tuple[str, object], Check] = {  # by name and type, of what is more than its type
    **{("seed", int): check_seed, ("device", str): check_device, ("teacher", str): check_name},
    **{("max_shard_size", int): parse_size, ("train", list[str]): listed},
    **{("data", list[str]): expanded, ("calibration", str): expanded},
    **{("temperature", float): check_temperature, ("top_p", float): check_probability},
    **{("cf", float): check_factor, ("gpu_name", str): check_gpu_name},
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


def options_for(owner: object, *names: str) -> list[inspect.Parameter]:
    """Options of the fields of a dataclass, or of these `names`, with its defaults; what is typed is
    checked at once. Those of a recipe, which checks itself, are None if not typed."""
    check, defaults = is_dataclass(owner), dict[str, object]()
    if is_dataclass(owner):
        defaults = {field.name: TYPED.get(field.name, field.default) for field in fields(owner)}
    return [
        _parameter(name, option, defaults.get(name), check)
        for name, option in options_of(owner).items()
        if not names or name in names
    ]


def command_options(command: Command, hidden: Collection[str]) -> list[inspect.Parameter]:
    """The parameters of another command for this one too, some `hidden` from its help."""
    found = inspect.signature(command, eval_str=True).parameters.values()
    return [_with(option, hidden=True) if option.name in hidden else option for option in found]


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
    info: object = typer.Option(
        ...,
        *names,
        help=option.help,
        show_default=option.default or True,
        min=option.least if check else None,
        max=option.most if check else None,
        callback=(NAMED_CHECKS.get((name, option.kind)) or CHECKS.get(option.kind)) if check else None,
    )
    taken: object = Annotated[kind if default is not None else kind | None, info]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=taken)


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


def named(said: str) -> object:
    """An argument of typer that names a model or folder."""
    return typer.Argument(callback=check_name, help=said)


Model = Annotated[str, named("A checkpoint folder, a hub id (owner/name) or a short name (llama-7b).")]
Checkpoint = Annotated[str, named("A checkpoint folder or a hub id.")]
Output = Annotated[str, named("A folder that blr wrote.")]
OutputFolder = Annotated[
    Path, typer.Option("--output", "-o", callback=expanded, help="Write this folder.")
]
FormatOption = Annotated[Format, typer.Option("--format", help="Print text, or one JSON object.")]
PROCESSES = "Start this many processes, one on each GPU (or on the CPU with --device cpu)."
Gpus = Annotated[int | None, typer.Option(min=1, max=64, help=PROCESSES, show_default="1")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]


def print_result(result: dict[str, object], text: Callable[..., str], format: Format) -> None:
    """One JSON object, or `text` of the result with names that a terminal might obey escaped."""
    print(json.dumps(result) if format is Format.json else text(printable_all(result)))
