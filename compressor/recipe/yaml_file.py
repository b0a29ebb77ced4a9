"""Reads a recipe file as hostile input: plain YAML data, with the line of every key, in bounded work.
Tags, anchors, aliases and directives are refused. Scalars follow the core schema of YAML 1.2
(https://yaml.org/spec/1.2.2/#103-core-schema): `no` and `012:30` are text, no boolean and number."""

import difflib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML, events

from blr.compressor.base.errors import InputError, RecipeError
from blr.compressor.base.quoting import is_text, quote
from blr.compressor.checkpoint.regular import read_text
from blr.compressor.recipe.fields import AGAIN, said_of
from blr.compressor.workspace.strict_json import KeyPath, in_data

MAX_BYTES = 64 * 1024
MAX_DEPTH = 16
MAX_DIGITS = 40  # of an integer: Python refuses thousands, and nothing here needs more than ten
Model = TypeVar("Model", bound=BaseModel)

_INT = re.compile(r"[-+]?[0-9]+")
_FORMS: tuple[tuple[re.Pattern[str], Callable[[str], object]], ...] = (
    (re.compile(r"|~|null|Null|NULL"), lambda text: None),
    (re.compile(r"true|True|TRUE|false|False|FALSE"), lambda text: text.lower() == "true"),
    (_INT, int),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
    (re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"), lambda text: float(text.replace(".", ""))),
)


@dataclass(frozen=True)
class RecipeFile:
    """A parsed recipe: its plain `data`, and the line of every key path in it, counted from 1."""

    path: Path
    data: dict[str, object]
    lines: dict[KeyPath, int] = field(repr=False)

    def line(self, where: KeyPath) -> int:
        """The line of `where`; if it is not in the file, that of what would hold it."""
        while where and where not in self.lines:
            where = where[:-1]
        return self.lines.get(where, 1)


def validate(path: Path, model: type[Model]) -> Model:
    """The recipe at `path` as a `model`. Raises RecipeError: one line with file, line and key."""
    recipe = read_recipe(path)
    return checked(recipe, model, recipe.data)


def checked(recipe: RecipeFile, model: type[Model], data: dict[str, object]) -> Model:
    """`data`, which came from `recipe`, as a `model`. Raises RecipeError as `validate`."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise RecipeError(explain(recipe, error, model)) from None


def read_recipe(path: Path) -> RecipeFile:
    """Read a file of at most 64 KiB of plain YAML with a mapping at the top. Raises RecipeError."""
    try:
        text = read_text(path, MAX_BYTES)
    except InputError as error:
        raise RecipeError(str(error)) from None
    return _Reader(path, text).read()


def parse_mapping(path: Path, text: str) -> dict[str, object]:
    """A YAML mapping as plain data; errors name `path`. Raises RecipeError as `read_recipe` does."""
    return _Reader(path, text).read().data


def explain(recipe: RecipeFile, error: ValidationError, model: type[BaseModel]) -> str:
    """The first of pydantic's errors as ``FILE:LINE: key 'x': found …, expected …; remedy``."""
    first = _first(error)
    where = in_data(recipe.data, first["loc"])
    line = f"{quote(recipe.path, 160)[1:-1]}:{recipe.line(where)}: "
    if where:
        line += f"key {quote('.'.join(map(str, where)))}: "
    if first["type"] == "extra_forbidden":
        known = sorted(_known_keys(model, where[:-1]))
        close = difflib.get_close_matches(str(where[-1]), known, 1)
        remedy = f"did you mean {close[0]!r}?" if close else "remove it"
        return line + f"found an unknown key, expected one of {', '.join(known)}; {remedy}"
    if first["type"] == "missing":
        return line + f"found no {quote(first['loc'][-1])}, expected it; add it"
    return line + said_of(first, "found").removesuffix(AGAIN) + AGAIN


def _first(error: ValidationError) -> ErrorDetails:
    """The first error; an unknown key in place of a missing one beside it: it is likely misspelt."""
    first, *others = error.errors()
    if first["type"] != "missing":
        return first
    unknown = (other for other in others if other["type"] == "extra_forbidden")
    return next((other for other in unknown if other["loc"][:-1] == first["loc"][:-1]), first)


def _known_keys(model: type[BaseModel], where: KeyPath) -> set[str]:
    """The keys that `model` has at `where`; those of all alternatives if a field is a union."""
    models = {model}
    for part in where:
        if isinstance(part, str):
            fields = [m.model_fields[part].annotation for m in models if part in m.model_fields]
            models = {found for annotation in fields for found in _models_in(annotation)}
    return {info.alias or name for m in models for name, info in m.model_fields.items()}


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


class _Reader:
    """Builds plain data from the parser's events, and refuses what a recipe may not have."""

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.text, self.line = path, text, 1
        self.lines: dict[KeyPath, int] = {}
        self.events = YAML(typ="safe", pure=True).parse(text)

    def read(self) -> RecipeFile:
        if len(self.text) > MAX_BYTES:
            self._refuse(f"{len(self.text)} characters of YAML", f"at most {MAX_BYTES}", "shorten it")
        try:
            data = self._document()
        except RecipeError:
            raise
        except Exception as error:  # the parser raises its own and, on odd input, any other
            if mark := getattr(error, "problem_mark", None):
                self.line = mark.line + 1
            elif position := getattr(error, "position", None):
                self.line = self.text.count("\n", 0, position) + 1
            reason = getattr(error, "problem", None) or str(error) or type(error).__name__
            found = f"invalid YAML ({quote(reason, 120)[1:-1]})"
            self._refuse(found, "keys with values, as 'method: svd'", "write the line as KEY: VALUE")
        return RecipeFile(self.path, data, self.lines)

    def _next(self) -> events.Event:
        """The next event; anything but plain values is refused."""
        event = next(self.events)
        self.line = event.start_mark.line + 1
        if isinstance(event, events.AliasEvent) or getattr(event, "anchor", None):
            self._refuse("an anchor or alias (& or *)", "every value written out", "repeat the value")
        if getattr(event, "tag", None):
            self._refuse(f"the tag {quote(event.tag, 60)}", "plain values", "remove the tag")
        return event

    def _document(self) -> dict[str, object]:
        self._refuse_directive()
        self._next()  # start of the stream
        if isinstance(self._next(), events.StreamEndEvent):
            self._refuse("an empty file", "keys with values, as 'method: svd'", "write one a line")
        data = self._value(self._next(), ())
        if type(data) is not dict:
            self.line = 1
            found = "a list at the top" if type(data) is list else f"only {quote(data, 40)}"
            self._refuse(found, "keys with values, as 'method: svd'", "write one a line")
        self._next()  # end of the document
        if not isinstance(self._next(), events.StreamEndEvent):
            self._refuse("a second document", "one document", "remove all from '---' on")
        return data

    def _refuse_directive(self) -> None:
        """Refuse a directive, a % at the start of a line before any content: events do not show it."""
        for number, line in enumerate(self.text.split("\n"), 1):
            if line.startswith("%"):
                self.line = number
                self._refuse("a directive (%)", "plain YAML 1.2", "remove it")
            if line.strip() and not line.lstrip().startswith("#"):
                return

    def _value(self, event: events.Event, where: KeyPath) -> object:
        self.lines[where] = self.line
        if len(where) > MAX_DEPTH:
            self._refuse("deeply nested values", f"at most {MAX_DEPTH} levels", "flatten them")
        if isinstance(event, events.MappingStartEvent):
            return self._mapping(where)
        if isinstance(event, events.SequenceStartEvent):
            items: list[object] = []
            while not isinstance(item := self._next(), events.SequenceEndEvent):
                items.append(self._value(item, (*where, len(items))))
            return items
        assert isinstance(event, events.ScalarEvent)  # aliases are refused as they come
        return self._scalar(event)

    def _mapping(self, where: KeyPath) -> dict[str, object]:
        data: dict[str, object] = {}
        while not isinstance(event := self._next(), events.MappingEndEvent):
            line, key = self.line, self._key(event)
            if key in data:
                first = self.lines[*where, key]
                found = f"the key {quote(key)} a second time"
                self._refuse(found, f"it once, as in line {first}", "remove one of them")
            data[key] = self._value(self._next(), (*where, key))
            self.lines[*where, key] = line
        return data

    def _key(self, event: events.Event) -> str:
        key = self._scalar(event) if isinstance(event, events.ScalarEvent) else None
        if type(key) is not str:
            found = quote(event.value, 40) if isinstance(event, events.ScalarEvent) else "a collection"
            self._refuse(f"{found} as a key", "text as a key", "put the key in quotes")
        return key

    def _scalar(self, event: events.ScalarEvent) -> object:
        text = event.value
        if not is_text(text):
            self._refuse(f"half a character, {quote(text, 40)}", "whole ones", "write it as it is")
        if event.style is not None:
            return text
        if _INT.fullmatch(text) and len(text) > MAX_DIGITS:
            self._refuse(f"a number of {len(text)} digits", f"at most {MAX_DIGITS}", "shorten it")
        return next((make(text) for form, make in _FORMS if form.fullmatch(text)), text)

    def _refuse(self, found: str, expected: str, remedy: str) -> NoReturn:
        where = f"{quote(self.path, 160)[1:-1]}:{self.line}"
        raise RecipeError(f"{where}: found {found}; expected {expected}; {remedy}")
