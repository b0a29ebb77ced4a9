"""JSON that blr wrote and reads again, in folders where others can write: nothing in it is believed."""

import os
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from blr.compressor.base.errors import BlrError, InputError, OutputError
from blr.compressor.base.quoting import quote
from blr.compressor.checkpoint.regular import read_json, refuse

MAX_BYTES = 16 * 2**20
OURS = "what blr writes there"


class Kept(BaseModel):
    """What a file of ours holds: nothing but the fields of a subclass, of their very types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Told(BaseModel):
    """What we use of a file that may say more."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, allow_inf_nan=False)


Model = TypeVar("Model", bound=BaseModel)
KeyPath = tuple[str | int, ...]


def read_kept(
    path: Path, model: type[Model], remedy: str, kind: type[BlrError] = OutputError
) -> Model | None:
    """The content of `path` as a `model`; None where nothing is. Raises an error of `kind` with `remedy`
    for a link, no plain file, or contents that blr does not write."""
    if not os.path.lexists(path):
        return None
    try:
        if os.path.islink(path):
            refuse(path, "a link", "a file that blr wrote", remedy)
        return fitted(read_json(path, MAX_BYTES), model, path, remedy)
    except InputError as error:
        said, _, _ = str(error).rpartition("; ")
        raise kind(f"{said}; {remedy}") from None


def fitted(
    data: dict[str, object], model: type[Model], path: Path, remedy: str, expected: str = OURS
) -> Model:
    """Parsed JSON as a `model`. Raises InputError, which names `path` and what is `expected`."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        refuse(path, _found(error, data), expected, remedy)


def _found(error: ValidationError, data: object) -> str:
    """The first thing that does not fit, and where in `data` it is."""
    first = error.errors(include_url=False)[0]
    said = {"missing": "no key", "extra_forbidden": "the unknown key"}.get(first["type"])
    parts = first["loc"] if said else in_data(data, first["loc"])
    where = quote(".".join(map(str, parts)), 60)
    if said:
        return f"{said} {where}"
    return f"{quote(first['input'], 40)} for {where}"


def in_data(data: object, loc: tuple[str | int, ...]) -> KeyPath:
    """The parts of a pydantic location that are keys of the file, without the tags of unions."""
    where: KeyPath = ()
    for part in loc:
        if isinstance(data, list):
            data = dict(enumerate(data))
        if isinstance(data, dict) and part in data:
            data, where = data[part], (*where, part)
    return where
