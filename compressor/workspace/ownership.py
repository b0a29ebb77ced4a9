"""The one rule by which anything beside the source is removed or replaced: a folder is ours if a marker
inside says so (`run.json`, or the manifest of a whole output) and it holds nothing but plain files that
the marker lists. All else is the user's and stays."""

import os
import re
import stat
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import NoReturn

from blr.compressor.base.disk import SCRATCH, fsync_folder, write_stream
from blr.compressor.base.errors import InputError, OutputError
from blr.compressor.base.exhaustion import storage_errors
from blr.compressor.base.quoting import is_text, quote
from blr.compressor.checkpoint.regular import parse_json
from blr.compressor.checkpoint.source import JOURNAL
from blr.compressor.workspace.journal import canonical_json
from blr.compressor.workspace.manifest import ANOTHER, MANIFEST, is_inside, read_manifest, verify_listed

RUN_FILE = "run.json"
ABOUT = "unfinished output of blr: the same command resumes it, --restart discards it"
MARK = canonical_json({"about": ABOUT})[:-1]  # how every run.json begins
MAX_BYTES = 64 * 2**20
PICKLED = "pickled"
_SCRATCH = re.compile(rf"(.+)\.[0-9a-f]{{12}}{re.escape(SCRATCH)}")
# Layers by their keys, converted weights, and what the safetensors library was writing of either
_OWN_FOLDERS = re.compile(
    rf"{JOURNAL}/(?:[0-9a-f]{{64}}\.safetensors|\.tmp\w{{6}})"
    rf"|{PICKLED}/(?:(?:teacher|module-\d)/)?(?:model-\d{{5,}}\.safetensors|model\.safetensors\.index\.json|\.tmp\w{{6}})"
)
Entries = dict[str, os.stat_result]  # by path relative to the folder
KINDS = ("partial", "replaced", "lock")
MOUNTS = Path("/proc/self/mountinfo")


def entries(folder: Path) -> Entries:
    """Everything below `folder`, what a folder holds before the folder itself; links as links."""
    found: Entries = {}
    pending = [folder]
    while pending:
        with os.scandir(pending.pop()) as listing:
            for entry in listing:
                path = Path(entry.path)
                status = entry.stat(follow_symlinks=False)
                found[path.relative_to(folder).as_posix()] = status
                if stat.S_ISDIR(status.st_mode):
                    pending.append(path)
    return dict(sorted(found.items(), reverse=True))


def in_the_way(path: Path, why: str) -> NoReturn:
    """Raise OutputError for something at `path` that is not ours."""
    remedy = "blr leaves it as it is: move it away, or choose another --output"
    raise OutputError(f"{quote(path, 240)[1:-1]}: in the way, {why}; {remedy}")


def check_listed(folder: Path, listed: Iterable[str]) -> Entries:
    """The entries of `folder`. Raises OutputError for any but plain files that `listed` names."""
    names = set(listed)
    converted = {f"{PICKLED}/{name}" for name in ("teacher", *(f"module-{n}" for n in range(10)))}
    parents = {str(p) for name in names for p in PurePosixPath(name).parents}
    parents |= {JOURNAL, PICKLED, *converted}
    found = entries(folder)
    for name, status in reversed(found.items()):
        named = stat.S_ISREG(status.st_mode) and is_named(name, names)
        if not (name in parents if stat.S_ISDIR(status.st_mode) else named):
            in_the_way(folder / name, "not written by blr")
    return found


def is_scratch(name: str) -> bool:
    """Whether a name is one that only what is being written has."""
    return _SCRATCH.fullmatch(name) is not None or PurePosixPath(name).name.startswith(".tmp")


def is_named(name: str, names: set[str]) -> bool:
    """Whether a path is one of `names`, what is written to become one, or what any run may keep."""
    if name in names or _OWN_FOLDERS.fullmatch(name):
        return True
    scratch = _SCRATCH.fullmatch(name)
    if scratch is None:
        return False
    path = PurePosixPath(scratch[1])  # of which a long name is cut
    known = {str(PurePosixPath(n).with_name(PurePosixPath(n).name[:100])) for n in names}
    return str(path) in known or _OWN_FOLDERS.fullmatch(str(path)) is not None


def check_folder(folder: Path) -> None:
    """Raise OutputError if there is something at `folder` that is no folder, or a link to one."""
    if not stat.S_ISDIR(os.lstat(folder).st_mode):
        in_the_way(folder, "not a folder")


def check_whole(folder: Path) -> Entries:
    """The entries of an output that is as its manifest says. Raises OutputError naming others."""
    check_folder(folder)
    manifest = read_manifest(folder)
    found = check_listed(folder, {*manifest["files"], MANIFEST})
    if problems := verify_listed(folder, manifest):
        in_the_way(folder, f"changed since blr wrote it ({problems[0]})")
    return found


def unchanged(before: Entries, folder: Path) -> bool:
    """Whether `folder` holds what it held when `before` was taken, by size, time and file number."""

    def stamps(found: Entries) -> dict[str, tuple[int, ...]]:
        return {n: (s.st_mode, s.st_ino, s.st_size, s.st_mtime_ns) for n, s in found.items()}

    return stamps(before) == stamps(entries(folder))


def remove(folder: Path, listed: Iterable[str]) -> None:
    """Delete a folder of blr, markers last, so that a kill leaves it recognizable. Raises OutputError,
    before that, for anything not `listed`."""
    check_folder(folder)
    delete(folder, check_listed(folder, listed))
    os.rmdir(folder)
    fsync_folder(folder.parent)


def delete(folder: Path, found: Entries) -> None:
    """Delete what was found in `folder` and nothing that came since, markers last."""
    markers = (MANIFEST, RUN_FILE)
    for name in (*(n for n in found if n not in markers), *(n for n in markers if n in found)):
        if stat.S_ISDIR(found[name].st_mode):
            os.rmdir(folder / name)
        else:
            os.unlink(folder / name)


def write_marker(partial: Path, run: object, files: Iterable[str]) -> None:
    """Mark `partial`, made if need be, as ours: what its run is, and all that it may come to hold."""
    marker = {"about": ABOUT, "files": sorted(files), "run": run}
    made = not os.path.lexists(partial)
    if made:
        os.mkdir(partial)
    try:
        write_stream(partial / RUN_FILE, [canonical_json(marker)])
    except BaseException:
        if made:  # without its mark it would be nobody's
            os.rmdir(partial)
        raise
    fsync_folder(partial)


def read_marker(partial: Path) -> tuple[list[str], dict[str, object] | None] | None:
    """Files and run that `write_marker` wrote, None if there are none. Raises OutputError for others."""
    path = partial / RUN_FILE
    if not os.path.lexists(path):
        return None
    data = _small(path)
    if not data.startswith(MARK):
        in_the_way(path, "without the mark of blr, or damaged")
    try:
        marker = parse_json(data, path)
    except InputError:
        in_the_way(path, "damaged")
    files, run = marker.get("files"), marker.get("run")
    known = marker.keys() == {"about", "files", "run"}
    if not (known and isinstance(files, list) and isinstance(run, dict | None)):
        in_the_way(path, "damaged")
    if not all(type(name) is str and is_inside(name) for name in files):
        in_the_way(path, "damaged")
    return files, run


def is_unborn(partial: Path) -> bool:
    """Whether `partial` holds only a marker that was being written when its run was killed."""
    found = entries(partial)
    for name in found:
        scratch = _SCRATCH.fullmatch(name)
        if scratch is None or scratch[1] != RUN_FILE:
            return False
        data = _small(partial / name)
        if not (data.startswith(MARK) or MARK.startswith(data)):
            return False
    return bool(found)


def _small(path: Path) -> bytes:
    """The bytes of a plain file; b"" for another kind of file, or one too large to be of blr."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        plain = stat.S_ISREG(status.st_mode) and not os.path.islink(path)
        return file.read() if plain and status.st_size <= MAX_BYTES else b""


def sibling(output: Path, kind: str) -> Path:
    """The path beside `output` that holds its partial folder, lock or replaced output."""
    return output.with_name(f"{output.name}.blr-{kind}")


def output_of(path: Path) -> Path:
    """The output that `path` is a `sibling` of, or is."""
    return path.with_name(re.sub(r"\.blr-(partial|lock|replaced)$", "", path.name))


def _refuse(path: Path, found: str, remedy: str = "choose another --output") -> NoReturn:
    raise OutputError(f"{path}: {found}; {remedy}")


def check_output(output: Path, overwrite: bool = False, reads: Iterable[str] = ()) -> None:
    """Raise OutputError unless `output` can be written, apart from the folders in `reads`."""
    if str(output).startswith("~") and not os.path.lexists(output.parts[0]):
        _refuse(output, "no such user", f"write ./{output} for a folder of that name")
    output = absolute(output)
    if not output.name:
        _refuse(output, "not a folder that can be made")
    for folder in map(Path, map(os.path.expanduser, reads)):
        if os.path.isdir(folder):
            check_apart(output, folder)
    check_outside(output)
    parent = output.parent
    with storage_errors(parent):
        if not is_text(str(output)):
            _refuse(Path(quote(output, 160)[1:-1]), "a name that is no text in this locale")
        if output.name.endswith(tuple(f".blr-{kind}" for kind in KINDS)):
            _refuse(output, "a name kept for what lies beside an output")
        with suppress(FileNotFoundError):  # of a current folder that was removed
            if Path(os.path.realpath(os.getcwd())).is_relative_to(os.path.realpath(output)):
                found = "the current folder, or one around it; expected the name of a folder to make"
                raise OutputError(f"{output}: {found}: choose another --output")
        place = next(folder for folder in (parent, *parent.absolute().parents) if folder.exists())
        if not place.is_dir():
            _refuse(place, f"a file, no folder to write {output.name} into")
        if not os.access(place, os.W_OK | os.X_OK):
            _refuse(place, "not writable", "choose an output folder you can write to")
        for kind in KINDS:
            with suppress(FileNotFoundError):
                os.lstat(sibling(output, kind))
        if os.path.lexists(output):
            _check_occupied(output, overwrite)


def check_apart(output: Path, source: Path) -> None:
    """Raise OutputError if writing `output` would change the folder `source`, or replace it."""
    output = absolute(output)
    place, read = Path(os.path.realpath(output)), Path(os.path.realpath(source))
    if place.is_relative_to(read):
        what = "the model itself" if place == read else f"inside {source}"
        _refuse(output, f"{what}, which is read", "choose another --output, outside of it")
    for path in chain((place,), (sibling(place, kind) for kind in KINDS)):  # the root has no siblings
        if read.is_relative_to(path):
            _refuse(source, f"the checkpoint that is read lies in {path}, which this run replaces")


def check_kept(folder: Path, reads: Iterable[Path]) -> None:
    """Raise OutputError if `folder` is a file, or lies in an output of blr or in a folder of `reads`:
    what is kept there would change these."""
    place, remedy = Path(os.path.realpath(folder)), "choose another --keep-dense"
    apart = {Path(os.path.realpath(read)) for read in reads}
    if os.path.lexists(place) and not place.is_dir():
        _refuse(folder, "a file, no folder to keep states in", remedy)
    for around in (place, *place.parents):
        if os.path.isfile(around / MANIFEST) or around in apart:
            _refuse(folder, f"in {around}, which must stay as it is", remedy)


def check_outside(output: Path) -> None:
    """Raise OutputError if `output` would lie in another output, which would then not verify."""
    for around in Path(os.path.realpath(output)).parents:
        if os.path.isfile(around / MANIFEST):
            broken = "which would no longer be as its manifest says"
            _refuse(output, f"inside {around}, an output of blr, {broken}")


def absolute(output: Path) -> Path:
    """`output` without `.` and `..`. Raises OutputError in a folder that was removed."""
    try:
        return Path(os.path.abspath(output))
    except FileNotFoundError:
        said = "it was removed; expected one that is there; change to another"
        raise OutputError(f"the current folder: {said}") from None


def _check_occupied(output: Path, overwrite: bool) -> None:
    if output.is_symlink():
        remedy = f"give the path of a folder, as {os.path.realpath(output)}"
        _refuse(output, "a link, whose place a finished folder would take", remedy)
    if not output.is_dir():
        _refuse(output, "exists and is not a folder")
    if is_mount(output):
        remedy = f"give a folder inside it: --output {output / 'model'}"
        _refuse(output, "a mount point, which no finished folder can be renamed to", remedy)
    if not any(output.iterdir()):
        return
    if not overwrite:
        remedy = "choose another --output, or pass --overwrite if blr wrote it"
        _refuse(output, "the output folder exists and is not empty", remedy)
    try:
        listed = {*read_manifest(output)["files"], MANIFEST}
    except OutputError as error:
        found = str(error).removesuffix(f"; {ANOTHER}")
        raise OutputError(f"{found}, and is left alone; move it, or choose another --output") from None
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
    for code in (b"134", b"040", b"011", b"012"):  # blanks are written in octal there
        place = place.replace(bytes([int(code, 8)]), b"\\" + code)
    return any(line.split()[4] == place for line in lines)
