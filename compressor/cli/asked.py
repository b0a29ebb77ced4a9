"""Commands whose options are those of settings, or of another command, beside their own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from copy import copy
from typing import Annotated, get_args

Command = Callable[..., None]


def taking(*groups: Iterable[inspect.Parameter]) -> Callable[[Command], Command]:
    """Decorates a command that takes the options of `groups`, too: they come as keyword arguments. Its
    own parameters stand first, and are taken in place of others of their names."""

    def decorated(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        own = {n: p for n, p in signature.parameters.items() if p.kind is not p.VAR_KEYWORD}
        rest = {p.name: p for group in groups for p in group if p.name not in own}
        command.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=sorted([*own.values(), *rest.values()], key=lambda p: p.kind)
        )
        return command

    return decorated


def command_options(command: Command, hidden: Collection[str]) -> list[inspect.Parameter]:
    """The parameters of another command, so that a line typed for one is taken by both; those `hidden`
    are not in the help."""
    found = inspect.signature(command, eval_str=True).parameters.values()
    return [_hidden(option) if option.name in hidden else option for option in found]


def _hidden(option: inspect.Parameter) -> inspect.Parameter:
    kind, info = get_args(option.annotation)
    info = copy(info)
    info.hidden = True
    return option.replace(annotation=Annotated[kind, info])
