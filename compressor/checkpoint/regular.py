"""The one way to open what somebody else wrote: regular files only, of bounded size."""

import codecs
import hashlib
import io
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from blr.compressor.base.errors import InputError
from blr.compressor.base.exhaustion import shortage
from blr.compressor.base.quoting import quote

DAMAGED = "download the file again or save it anew with safetensors"
REPAIRED = "download the file again or repair it"  # of JSON, which people write
MAX_DEPTH = 32  # of JSON
START, PIECE = 1 << 15, 1 << 22  # bytes
POINTER = b"version https://git-lfs"  # begins what git leaves in place of a large file


def refuse(path: Path, found: str, expected: str, remedy: str = DAMAGED) -> NoReturn:
    """Raises `InputError`: `path`, what was found there, what was expected, what to do."""
    raise InputError(f"{quote(path, 160)[1:-1]}: found {found}; expected {expected}; {remedy}")


def check_is_folder(path: Path, expected: str) -> None:
    """Raises `InputError` unless there is a folder at `path`, which is `expected` to be something."""
    if os.path.isfile(path):
        refuse(path, "a file", expected, "give the folder it lies in")
    if not os.path.isdir(path):
        refuse(path, absence(path, "folder"), expected, "check the path")


def absence(path: Path, kind: str) -> str:
    """Why nothing is found at `path`: there is no such `kind`, or it may not be seen."""
    return f"no permission to reach a {kind}" if is_barred(path) else f"no such {kind}"


def is_barred(path: Path) -> bool:
    """Whether a folder around `path` may not be looked into."""
    try:
        os.stat(path)
    except PermissionError:
        return True
    except (OSError, ValueError):
        pass
    return False


def open_regular(path: Path) -> io.FileIO:
    """Open a regular file unbuffered, never waiting on a FIFO or a device. Raises InputError."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            refuse(path, "a folder, FIFO or device", "a regular file", "name one, or put it there")
        # O_NONBLOCK: the path may have become a FIFO since it was looked at
        file = io.FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and (lacking := shortage(error, path)):
            raise lacking from error
        reason = getattr(error, "strerror", None) or str(error)
        refuse(path, f"no readable file ({reason})", "a regular file", "check name and permissions")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        refuse(path, "a FIFO or device", "a regular file", "name one, or put it there")
    return file


def refuse_pointer(path: Path, start: bytes | bytearray) -> None:
    """Raises `InputError` where a file that begins with `start` is a pointer of Git LFS."""
    if start.startswith(POINTER):
        refuse(path, "a pointer of Git LFS", "the file itself", "fetch it by `git lfs pull`")


def read_exactly(file: io.FileIO, path: Path, start: int, count: int) -> bytearray:
    """`count` bytes at offset `start`. Raises InputError where the file ends early or cannot be read."""
    buffer = bytearray(count)
    view, done = memoryview(buffer), 0
    try:
        file.seek(start)
        while done < count:
            got = file.readinto(view[done:])
            if not got:
                refuse(path, f"the end of the file at byte {start + done}", f"{count} bytes more")
            done += got
    except OSError as error:
        refuse(path, f"a read error ({error.strerror})", "a readable file", "check the disk")
    return buffer


def check_size(path: Path, file: io.FileIO, limit: int) -> int:
    """The size of an open file in bytes. Raises InputError where it is over `limit`."""
    size = os.fstat(file.fileno()).st_size
    if size > limit:
        refuse(path, f"{size} bytes", f"at most {limit}", "take a smaller file")
    return size


def read_whole(path: Path, limit: int) -> bytearray:
    """The bytes of a regular file of at most `limit` bytes. Raises InputError."""
    with open_regular(path) as file:
        data = read_exactly(file, path, 0, check_size(path, file, limit))
    refuse_pointer(path, data)
    return data


def read_start(path: Path, strict: bool = False) -> str:
    """The first `START` bytes of a text file; what is no UTF-8 is replaced, or refused if `strict`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = bytes(read_exactly(file, path, 0, min(size, START)))
    if not strict:
        return data.decode("utf-8", "replace")
    try:  # the last character may be cut
        return codecs.getincrementaldecoder("utf-8-sig")().decode(data, final=size <= START)
    except UnicodeDecodeError as error:
        _refuse_encoding(path, error)


def read_end(path: Path, count: int) -> str:
    """The last `count` bytes of a text file, what is no UTF-8 replaced. Raises InputError."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = read_exactly(file, path, max(size - count, 0), min(size, count))
    return data.decode("utf-8", "replace")


def read_text(path: Path, limit: int) -> str:
    """`read_whole` as text, its line ends as "\\n". Raises InputError, also for what is no UTF-8."""
    data = read_whole(path, limit)
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        _refuse_encoding(path, error)


def _refuse_encoding(path: Path, error: UnicodeDecodeError) -> NoReturn:
    found = f"bytes that are no UTF-8 (at byte {error.start})"
    refuse(path, found, "a text file in UTF-8", "save it as UTF-8")


def read_lines(path: Path, limit: int, longest: int) -> Iterator[str]:
    """The lines of a text file, read as they are asked for, each of at most `longest` characters. Only
    "\\n", "\\r\\n" and "\\r" end lines: JSON may have other line ends within strings. Raises InputError
    for a file over `limit` bytes, other bytes than UTF-8, or a line that is too long."""
    with open_regular(path) as raw:
        check_size(path, raw, limit)
        try:
            with io.TextIOWrapper(io.BufferedReader(raw), encoding="utf-8-sig") as file:
                while line := file.readline(longest + 1):
                    if len(line) > longest:
                        remedy = "break it up"
                        refuse(path, f"a line of over {longest} characters", "shorter lines", remedy)
                    yield line
        except UnicodeDecodeError:
            refuse(path, "bytes that are no UTF-8", "a text file in UTF-8", "save it as UTF-8")
        except OSError as error:
            refuse(path, f"a read error ({error.strerror})", "a readable file", "check the disk")


def inside(folder: Path, name: str) -> Path:
    """`folder`/`name`, whose links must stay in the folder or its hub cache's blobs. Raises InputError
    for any other link, and where there is nothing."""
    path, root = folder / name, Path(os.path.realpath(folder))
    try:
        real = Path(os.path.realpath(path, strict=True))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        refuse(path, f"no file ({reason})", "a file of the checkpoint", DAMAGED)
    cached = (p for p in root.parents if p.name == "snapshots" and p.parent.name.startswith("models--"))
    blobs = next((parent.parent / "blobs" for parent in cached), None)  # of a folder in a hub cache
    if not real.is_relative_to(root) and real.parent != blobs:
        expected = "a file inside it (or in the blobs of its hub cache)"
        remedy = "put the file itself in place of the link"
        refuse(path, f"a link that leaves the folder, to {quote(real)}", expected, remedy)
    return path


def read_json(path: Path, limit: int, *, constants: bool = False) -> dict[str, Any]:
    """The JSON object in the file `path`. Raises InputError as `read_whole` and `parse_json`."""
    return parse_json(read_whole(path, limit), path, constants=constants)


def digest_of(path: Path, limit: int) -> str:
    """SHA-256 of a file. Raises InputError as `read_whole`."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        size = check_size(path, file, limit)
        for start in range(0, size, PIECE):
            digest.update(read_exactly(file, path, start, min(PIECE, size - start)))
    return digest.hexdigest()


def parse_json(data: bytes | bytearray, path: Path, *, constants: bool = False) -> dict[str, object]:
    """The JSON object in `data`; `constants` lets NaN and Infinity pass, as in some model configs.
    Raises InputError, naming `path`, for anything else, a key twice or deep nesting."""
    remedy = DAMAGED if path.suffix == ".safetensors" else REPAIRED
    if data.startswith(codecs.BOM_UTF8):
        refuse(path, "a byte-order mark", "JSON in plain UTF-8", "save it without that mark")
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique_pairs,
            parse_constant=float if constants else _no_constant,
        )
        deep = depth(value) > MAX_DEPTH
    except RecursionError:
        deep = True
    except ValueError as error:  # JSON, UTF-8, duplicate keys, integers of thousands of digits
        found = f"invalid JSON ({quote(error, 160)[1:-1]})"
        refuse(path, found, "one JSON object with unique keys", remedy)
    if deep:
        refuse(path, f"over {MAX_DEPTH} nested levels", "a few levels at most", remedy)
    if type(value) is not dict:
        refuse(path, f"JSON of type {type(value).__name__}", "an object", remedy)
    return value


def depth(value: Any) -> int:
    """Nesting depth of parsed JSON, without recursion."""
    level, found = [value] if type(value) in (dict, list) else [], 0
    while level:
        found += 1
        children = (item.values() if type(item) is dict else item for item in level)
        level = [item for group in children for item in group if type(item) in (dict, list)]
    return found


def _unique_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields: dict[str, object] = {}
    for key, value in pairs:
        if key in fields:
            raise ValueError(f"duplicate key {quote(key)}")
        fields[key] = value
    return fields


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")
