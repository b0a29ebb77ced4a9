"""What others may have put in the place of a small JSON file of ours, by what is wrong with it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

Spoil = Callable[[Path], Any]


def text(content: str) -> Spoil:
    return lambda path: path.write_text(content)


def changed(**values: Any) -> Spoil:
    """The JSON object that is there with other values; ... takes a key away."""

    def spoil(path: Path) -> None:
        table = {**json.loads(path.read_text()), **values}
        path.write_text(json.dumps({k: v for k, v in table.items() if v is not ...}))

    return spoil


def instead(make: Callable[[Path], Any]) -> Spoil:
    """Something that is no file of ours."""

    def spoil(path: Path) -> None:
        path.unlink(missing_ok=True)
        make(path)

    return spoil


def linked(path: Path) -> None:
    """The file itself, somewhere else, and a link to it."""
    elsewhere = path.parent.parent / f"elsewhere-{path.name}"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


NO_OBJECTS: dict[str, Spoil] = {
    "empty": text(""),
    "no-json": text("{"),
    "list": text("[]"),
    "text": text('"x"'),
    "brackets": text('{"a":' + "[" * 100_000),
    "nested": text('{"a":' + "[" * 60 + "]" * 60 + "}"),
    "nan": text('{"a":NaN}'),
    "duplicate": text('{"a":1,"a":2}'),
    "no-utf8": lambda path: path.write_bytes(b'{"a":"\xff"}'),
    "huge": lambda path: os.truncate(path, 20 * 2**20),
    "fifo": instead(os.mkfifo),
    "folder": instead(os.mkdir),
    "device": instead(lambda path: path.symlink_to("/dev/zero")),
    "link-loop": instead(lambda path: path.symlink_to(path.name)),
    "linked": linked,
}
