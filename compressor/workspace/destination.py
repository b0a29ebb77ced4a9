"""Where an output may go: seen to before anything slow is done, and again under the lock."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from blr.compressor.base.errors import OutputError
from blr.compressor.base.quoting import is_text, quote
from blr.compressor.checkpoint.remedies import storage_errors
from blr.compressor.workspace.manifest import MANIFEST, read_manifest
from blr.compressor.workspace.ownership import check_listed

KINDS = ("partial", "replaced", "lock")
MOUNTS = Path("/proc/self/mountinfo")


def sibling(output: Path, kind: str) -> Path:
    """The path beside `output` that holds its partial folder, lock or replaced output."""
    return output.with_name(f"{output.name}.blr-{kind}")


def output_of(path: Path) -> Path:
    """The output that `path` is a `sibling` of, or is."""
    return path.with_name(re.sub(r"\.blr-(partial|lock|replaced)$", "", path.name))


def check_output(output: Path, overwrite: bool = False, reads: Iterable[str] = ()) -> None:
    """Raise OutputError unless `output` can be written.

    Args:
        reads: names of what the run reads; of folders among them it must be apart, which is told first.
    """
    output = absolute(output)
    if not output.name:
        raise OutputError(f"{output}: not a folder that can be made; choose another --output")
    for folder in map(Path, map(os.path.expanduser, reads)):
        if os.path.isdir(folder):
            check_apart(output, folder)
    check_outside(output)
    parent = output.parent
    with storage_errors(parent):
        if not is_text(str(output)):
            raise OutputError(
                f"{quote(output, 160)[1:-1]}: a name that is no text in this locale; "
                "choose another --output"
            )
        _check_name(output)
        if not parent.is_dir():
            raise OutputError(f"{parent}: no such folder to write {output.name} into; create it first")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise OutputError(f"{parent}: not writable; choose an output folder you can write to")
        if os.path.lexists(output):
            _check_occupied(output, overwrite)


def check_apart(output: Path, source: Path) -> None:
    """Raise OutputError if writing `output` would change the folder `source`, or replace it."""
    output = absolute(output)
    place, read = Path(os.path.realpath(output)), Path(os.path.realpath(source))
    if place.is_relative_to(read):
        what = "the model itself" if place == read else f"inside {source}"
        raise OutputError(f"{output}: {what}, which is read; choose another --output, outside of it")
    for path in chain((place,), (sibling(place, kind) for kind in KINDS)):  # the root has no siblings
        if read.is_relative_to(path):
            raise OutputError(
                f"{source}: the checkpoint that is read lies in {path}, which this run replaces; "
                "choose another --output"
            )


def check_outside(output: Path) -> None:
    """Raise OutputError if `output` would lie in an output of ours, which would not verify any more."""
    for around in Path(os.path.realpath(output)).parents:
        if os.path.isfile(around / MANIFEST):
            raise OutputError(
                f"{output}: inside {around}, an output of blr, which would no longer be as its manifest "
                "says; choose another --output"
            )


def absolute(output: Path) -> Path:
    """`output` without `.` and `..`. Raises OutputError in a folder that was removed."""
    try:
        return Path(os.path.abspath(output))
    except FileNotFoundError:
        raise OutputError(
            "the current folder: it was removed; expected one that is there; change to another"
        ) from None


def _check_name(output: Path) -> None:
    if output.name.endswith(tuple(f".blr-{kind}" for kind in KINDS)):
        raise OutputError(
            f"{output}: a name kept for what lies beside an output; choose another --output"
        )
    if _here().is_relative_to(os.path.realpath(output)):
        raise OutputError(
            f"{output}: the current folder, or one around it; expected the name of a folder to make: "
            "choose another --output"
        )


def _here() -> Path:
    try:
        return Path(os.path.realpath(os.getcwd()))
    except FileNotFoundError:  # it was removed
        return Path("/")


def _check_occupied(output: Path, overwrite: bool) -> None:
    if output.is_symlink():
        raise OutputError(
            f"{output}: a link, whose place a finished folder would take; give the path of a folder, "
            f"as {os.path.realpath(output)}"
        )
    if not output.is_dir():
        raise OutputError(f"{output}: exists and is not a folder; choose another --output")
    if is_mount(output):
        raise OutputError(
            f"{output}: a mount point, which no finished folder can be renamed to; "
            f"give a folder inside it: --output {output / 'model'}"
        )
    if not any(output.iterdir()):
        return
    if not overwrite:
        raise OutputError(
            f"{output}: the output folder exists and is not empty; "
            "remove it, choose another --output, or pass --overwrite if blr wrote it"
        )
    try:
        listed = {*read_manifest(output)["files"], MANIFEST}
    except OutputError as error:
        raise OutputError(f"{error}; choose another --output") from None
    check_listed(output, listed)


def is_mount(folder: Path) -> bool:
    """Whether a file system is mounted at `folder`, also one that was mounted before elsewhere."""
    if os.path.ismount(folder):
        return True
    try:
        lines = MOUNTS.read_bytes().splitlines()
    except OSError:
        return False
    place = os.fsencode(os.path.realpath(folder))
    return any(_unescaped(line.split()[4]) == place for line in lines)


def _unescaped(field: bytes) -> bytes:
    """A path of the mount table, whose blanks are written in octal."""
    for code in (b"040", b"011", b"012", b"134"):
        field = field.replace(b"\\" + code, bytes([int(code, 8)]))
    return field
