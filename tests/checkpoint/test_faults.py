"""Every call to the operating system may fail with any number: the run ends with a remedy or goes on
without, never loses what was done, and the same command finishes it."""

from __future__ import annotations

import builtins
import errno
import fcntl
import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from producing import is_whole, produce, snapshot

from blr.compressor.base import disk, exhaustion
from blr.compressor.base.disk import check_space, write_stream
from blr.compressor.base.errors import BlrError, CapabilityError, OutputError, StorageError
from blr.compressor.base.exhaustion import storage_errors, unforeseen
from blr.compressor.checkpoint.regular import open_regular
from blr.compressor.workspace import lock
from blr.compressor.workspace.lock import ABOUT
from blr.compressor.workspace.workspace import Workspace

NUMBERS = (
    *("EMFILE", "ENFILE", "EINTR", "EAGAIN", "EBUSY", "EINVAL", "EXDEV", "ENOMEM", "ETIMEDOUT"),
    *("ENOLCK", "EOPNOTSUPP", "ENOSYS", "EIO", "ESTALE", "ENOSPC", "EDQUOT", "EROFS", "EACCES"),
)
POINTS = {
    **{name: (os, name) for name in ("open", "fsync", "rename", "unlink", "rmdir", "mkdir", "scandir")},
    **{"pwrite": (os, "pwrite"), "pread": (os, "pread"), "flock": (fcntl, "flock")},
    **{"statfs": (shutil, "disk_usage"), "write": (disk, "open")},
}
# What a file system may lack, and a run does without
WITHOUT = {
    *(("flock", name) for name in ("ENOLCK", "EOPNOTSUPP", "ENOSYS", "EINVAL")),
    *(("fsync", name) for name in ("EINVAL", "EOPNOTSUPP", "ENOSYS")),
    *(("statfs", name) for name in NUMBERS),
}
CODES = {
    **dict.fromkeys(("EMFILE", "ENFILE", "ENOMEM"), 9),
    **dict.fromkeys(("EINTR", "EAGAIN", "ETIMEDOUT", "ENOLCK", "EIO", "ESTALE", "ENOSPC", "EDQUOT"), 6),
    **dict.fromkeys(("EINVAL", "EOPNOTSUPP", "ENOSYS"), 6),
    **dict.fromkeys(("EBUSY", "EXDEV", "EROFS", "EACCES"), 5),
}


class Broken:
    """A file that takes no bytes."""

    def __init__(self, file: Any, number: int) -> None:
        self.file, self.number = file, number

    def __enter__(self) -> Broken:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, data: bytes) -> int:
        raise OSError(self.number, os.strerror(self.number))


def inject(monkeypatch: pytest.MonkeyPatch, point: str, number: int, turn: int) -> list[int]:
    """Let the call of this turn fail (all calls: -1); returns a list as long as calls were made."""
    where, name = POINTS[point]
    call, calls = getattr(where, name, builtins.open), []

    def failing(*arguments: Any, **options: Any) -> Any:
        if point == "write" and arguments[1:] != ("xb",):
            return call(*arguments, **options)
        calls.append(number)
        if turn not in (-1, len(calls) - 1):
            return call(*arguments, **options)
        if point == "write":
            return Broken(call(*arguments, **options), number)
        path = arguments[0] if arguments and isinstance(arguments[0], str | Path) else None
        raise OSError(number, os.strerror(number), *(() if path is None else (str(path),)))

    monkeypatch.setattr(where, name, failing, raising=False)
    return calls


def count(monkeypatch: pytest.MonkeyPatch, point: str, folder: Path) -> int:
    folder.mkdir()
    produce(folder / "out")
    with monkeypatch.context() as patched:
        calls = inject(patched, point, 0, 10**9)
        produce(folder / "out", overwrite=True)
    return len(calls)


def attempt(act: Callable[[], object]) -> BlrError | None:
    try:
        act()
    except BlrError as error:
        return error
    return None


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("point", POINTS)
def test_a_call_that_fails(
    point: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, at each of its turns in a run that overwrites; the others succeed."""
    turns = count(monkeypatch, point, tmp_path / "whole")
    for turn in sorted({0, 1, turns // 2, turns - 2, turns - 1} & set(range(turns))):
        folder = tmp_path / str(turn)
        folder.mkdir()
        produce(folder / "out")
        (folder / "mine").write_text("the user's")
        before = snapshot(folder)["mine"]
        with monkeypatch.context() as patched:
            inject(patched, point, getattr(errno, name), turn)
            error = attempt(lambda f=folder: produce(f / "out", overwrite=True))
        if error is not None:
            assert error.exit_code in (CODES[name], 5), (turn, error)
            assert "; " in str(error) and "\n" not in str(error)
        assert error is None or (point, name) not in WITHOUT, (turn, error)
        again = attempt(lambda f=folder: produce(f / "out", overwrite=True))
        assert again is None, (turn, error, again)
        assert is_whole(folder / "out") and sorted(os.listdir(folder)) == ["mine", "out"], turn
        assert snapshot(folder)["mine"] == before


@pytest.mark.parametrize(("point", "name"), sorted(WITHOUT))
def test_what_a_file_system_lacks_altogether(
    point: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        inject(patched, point, getattr(errno, name), -1)
        produce(tmp_path / "out")
        produce(tmp_path / "out", overwrite=True)
    assert is_whole(tmp_path / "out") and os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize(
    ("left", "message"),
    [
        ({"pid": os.getppid()}, "another blr run"),
        ({"pid": 2**22 + 1}, None),
        ({"pid": os.getpid()}, None),  # the number comes again, as in a container that was restarted
        ({"pid": "x"}, None),
        ({"pid": 1, "host": "elsewhere"}, "a blr run on elsewhere .* remove this file"),
    ],
)
def test_without_locks_the_lock_file_tells_whether_its_run_lives(
    left: dict[str, Any], message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = {"about": ABOUT, "host": socket.gethostname(), "moving": False, **left}
    (tmp_path / "out.blr-lock").write_text(json.dumps(text, separators=(",", ":")))
    inject(monkeypatch, "flock", errno.ENOLCK, -1)
    if message is None:
        produce(tmp_path / "out")
        assert is_whole(tmp_path / "out")
        return
    with pytest.raises(OutputError, match=message):
        produce(tmp_path / "out")
    assert os.listdir(tmp_path) == ["out.blr-lock"]


def test_without_locks_a_second_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inject(monkeypatch, "flock", errno.EOPNOTSUPP, -1)
    with Workspace(tmp_path / "out"):
        with pytest.raises(OutputError, match="another blr run"), Workspace(tmp_path / "out"):
            pass
        assert os.listdir(tmp_path) == ["out.blr-lock"]
    assert not os.listdir(tmp_path) and not lock.HELD_LOCKS


@pytest.mark.parametrize("code", sorted(errno.errorcode))
def test_no_number_is_without_a_remedy(code: int, tmp_path: Path) -> None:
    """What writing raises is an error of ours whatever the number; of other files it passes."""
    with pytest.raises(BlrError, match=r"; .+") as found, storage_errors(tmp_path):
        raise OSError(code, os.strerror(code), str(tmp_path / "out"))
    assert found.value.exit_code in (5, 6, 9)
    with pytest.raises(OSError, match=r"\[Errno"), storage_errors(tmp_path / "out"):
        raise OSError(code, os.strerror(code), "/elsewhere/file")
    told = unforeseen(OSError(code, os.strerror(code), "/elsewhere/file"))
    assert told.exit_code in (4, 6, 9) and "/elsewhere/file: " in str(told)


def test_what_safetensors_reports_is_read_from_its_text(tmp_path: Path) -> None:
    class SafetensorError(Exception):
        pass

    for number, kind in (
        (24, CapabilityError),
        (28, StorageError),
        (30, OutputError),
        (5, StorageError),
    ):
        with pytest.raises(kind), storage_errors(tmp_path):
            raise SafetensorError(f"Error while serializing: I/O error: x (os error {number})")
    with pytest.raises(SafetensorError), storage_errors(tmp_path):
        raise SafetensorError("Error while deserializing header: invalid")


def test_an_exception_that_is_not_the_systems_is_a_bug() -> None:
    assert unforeseen(OSError("no tokenizer there, says a library")) is None


@pytest.mark.parametrize("name", ["EMFILE", "ENFILE", "ENOMEM"])
def test_reading_without_means_is_not_the_inputs_fault(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    inject(monkeypatch, "open", getattr(errno, name), -1)
    with pytest.raises(CapabilityError, match=r"config\.json: "):
        open_regular(tmp_path / "config.json")


@pytest.mark.parametrize("links", [True, False])
def test_a_new_file_replaces_none(links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not links:
        monkeypatch.setattr(os, "link", lambda *paths: (_ for _ in ()).throw(OSError(errno.EPERM, "no")))
    write_stream(tmp_path / "a", [b"first"], new=True)
    with pytest.raises(FileExistsError):
        write_stream(tmp_path / "a", [b"second"], new=True)
    assert (tmp_path / "a").read_bytes() == b"first" and os.listdir(tmp_path) == ["a"]


def test_space_is_checked_where_it_is_told(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="bytes free"):
        check_space(tmp_path, 2**70)


def test_every_remedy_ends_a_line() -> None:
    assert all(remedy or kind is StorageError for kind, remedy in exhaustion._WRITING.values())
