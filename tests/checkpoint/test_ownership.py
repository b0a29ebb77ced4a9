"""Nothing of the user's is written, moved or removed: only OUT and what beside it is marked as ours."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from producing import FILES, is_whole, produce, snapshot, stop_before_commit, stop_before_rename

from blr.compressor.base.errors import BlrError, OutputError
from blr.compressor.workspace import ownership
from blr.compressor.workspace.journal import canonical_json
from blr.compressor.workspace.lock import ABOUT
from blr.compressor.workspace.manifest import MANIFEST
from blr.compressor.workspace.ownership import ABOUT as ABOUT_RUN
from blr.compressor.workspace.ownership import KINDS, check_apart, check_output, is_mount

MINE = b"the user's"
OUR_LOCK = json.dumps({"about": ABOUT, "host": "h", "moving": False, "pid": 1}, separators=(",", ":"))


def user_file(path: Path) -> None:
    path.write_bytes(MINE)


def user_folder(path: Path) -> None:
    (path / "sub").mkdir(parents=True)
    (path / "config.json").write_bytes(MINE)
    (path / "sub" / "notes.txt").write_bytes(MINE)


def link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


@cache
def made() -> Path:
    """A folder with a finished output and what a killed run left, to copy from."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    produce(folder / "out")
    stop_before_commit(folder / "killed")
    return folder


def whole(path: Path) -> None:
    """A finished output of ours."""
    shutil.copytree(made() / "out", path)


def partial(path: Path) -> None:
    """What a killed run left, without its lock."""
    shutil.copytree(made() / "killed.blr-partial", path)


Make = Callable[[Path], None]


def damaged(make: Make, name: str, data: bytes | None = MINE) -> Make:
    """`make` with one more (or changed) file; with an empty folder where there is no `data`."""

    def made(path: Path) -> None:
        make(path)
        if data is None:
            (path / name).mkdir()
        else:
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_bytes(data)

    return made


def linked(make: Callable[[Path], None], name: str) -> Callable[[Path], None]:
    """`make` with a link to the user's file in the place of one of its own."""

    def made(path: Path) -> None:
        make(path)
        (path / name).unlink()
        (path / name).symlink_to("../user/notes.txt")

    return made


def marked(marker: dict[str, Any], levels: int = 0) -> Make:
    """What a killed run left, with another marker, its run nested in so many more lists."""
    for _ in range(levels):
        marker = {**marker, "run": {"a": [marker["run"]]}}
    return damaged(partial, "run.json", canonical_json(marker))


FOREIGN: dict[str, Callable[[Path], None]] = {
    "file": user_file,
    "empty file": lambda path: path.touch(),
    "fifo": os.mkfifo,
    "folder": user_folder,
    "empty folder": os.mkdir,
    "link to folder": link_to("user"),
    "link to file": link_to("user/notes.txt"),
    "link to nothing": link_to("user/nothing"),
    "link to output": link_to("finished"),
    "link to partial": link_to("unfinished"),
    "manifest of nothing": damaged(user_folder, MANIFEST, b'{"format": 1, "files": {}}'),
    "foreign run.json": damaged(user_folder, "run.json", b'{"run": {}}'),
    "copied mark": damaged(user_folder, "run.json", b'{"about":"unfinished output of blr"}'),
    "whole and more": damaged(whole, "notes.txt"),
    "whole and folder": damaged(whole, "runs", None),
    "whole, edited": damaged(whole, "config.json"),
    "whole, same size": damaged(whole, "config.json", b"[]"),
    "whole, linked": linked(whole, "model.safetensors"),
    "partial and more": damaged(partial, "notes.txt"),
    "partial and folder": damaged(partial, "journal/mine", None),
    "partial, file in journal": damaged(partial, "journal/notes.safetensors"),
    "partial, file beside": damaged(partial, "additional/notes.txt"),
    "partial, mark linked": linked(partial, "run.json"),
    "partial, run as list": marked({"about": ABOUT_RUN, "files": [], "run": [1]}),
    "partial, run as text": marked({"about": ABOUT_RUN, "files": [], "run": "x"}),
    "partial, nested": marked({"about": ABOUT_RUN, "files": [], "run": {}}, 40),
    "partial, mark damaged": damaged(partial, "run.json", b'{"about":'),
    "manifest linked": linked(whole, MANIFEST),
}
OURS = {"whole": whole, "partial": partial, "absent": lambda path: None}
OUTPUTS = ("out", "./out", "user/../out", "", ".", "..", "src/out", "src", "user", "out.blr-partial")
PLACES = ("out", "out.blr-partial", "out.blr-replaced", "out.blr-lock")


def lay_out(root: Path, layout: dict[str, str]) -> None:
    (root / "user").mkdir()
    (root / "user" / "notes.txt").write_bytes(MINE)
    (root / "src").mkdir()
    (root / "src" / "model.safetensors").write_bytes(MINE)
    whole(root / "finished")
    partial(root / "unfinished")
    for place, kind in layout.items():
        if kind == "lock":
            (root / place).write_text(OUR_LOCK)
        else:
            {**OURS, **FOREIGN}[kind](root / place)


def is_ours(place: str, kind: str, options: dict[str, bool]) -> bool:
    """Whether a run may replace or remove what it finds there."""
    if place == "out":
        return kind == "empty folder" or (kind == "whole" and options["overwrite"])
    if place == "out.blr-partial":
        return kind == "partial"
    return place == "out.blr-lock" and kind == "lock"


def below(path: str, place: str) -> bool:
    return path == place or path.startswith(f"{place}/")


def often(usual: Any, rare: Any) -> st.SearchStrategy[Any]:
    """Mostly what lets a run come to its end: one obstacle hides all that it would do after it."""
    return st.integers(0, 7).flatmap(lambda n: rare if n == 7 else usual)


BENIGN = {
    "out": st.sampled_from(["absent", "empty folder", "whole"]),
    "out.blr-partial": st.sampled_from(["absent", "partial"]),
    "out.blr-replaced": st.just("absent"),
    "out.blr-lock": st.sampled_from(["absent", "lock"]),
}
OBSTACLES = st.lists(
    st.tuples(st.sampled_from(PLACES), st.sampled_from(["whole", "partial", *FOREIGN])), max_size=2
)
LAYOUTS = st.tuples(st.fixed_dictionaries(BENIGN), OBSTACLES).map(lambda pair: pair[0] | dict(pair[1]))


@settings(derandomize=True, max_examples=250, deadline=None, database=None)
@given(
    LAYOUTS,
    st.fixed_dictionaries({"overwrite": st.booleans(), "restart": st.booleans()}),
    often(st.just("out"), st.sampled_from(OUTPUTS)),
    often(st.just("src"), st.sampled_from(["out", "out.blr-partial", "finished", "."])),
    st.sampled_from([{"recipe": {"cf": 2}}, {"recipe": {"cf": 3}}]),
)
@example(
    dict(zip(PLACES, ("absent", "whole", "absent", "absent"), strict=True)),
    {"overwrite": False, "restart": True},
    *("out", "finished", {"recipe": {"cf": 3}}),
)
def test_no_path_but_the_output_and_its_marked_siblings_is_touched(
    layout: dict[str, str], options: dict[str, bool], output: str, source: str, run: Any
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root, here = Path(folder), Path.cwd()
        lay_out(root, layout)
        before = snapshot(root)
        os.chdir(root)
        try:
            with suppress(BlrError):
                produce(Path(output), Path(source), run=run, **options)
        finally:
            os.chdir(here)
        after = snapshot(root)
    target = os.path.normpath(output)
    ours = {place for place, kind in layout.items() if is_ours(place, kind, options)}
    absent = {place for place, kind in layout.items() if kind == "absent"}
    if target != "out":
        ours, absent = set(), {target, *(f"{target}.blr-{kind}" for kind in KINDS)}
    for path in (before.keys() | after.keys()) - {os.path.dirname(target)}:  # which gets an entry
        known = path in before
        may_change = any(below(path, place) for place in (ours if known else ours | absent))
        # a whole output beside may become OUT if it is the very result of this run
        finished = layout["out.blr-partial"] == "whole" and below(path, "out.blr-partial")
        renamed = finished and (not known or f"out{path[15:]}" in after)
        assert may_change or renamed or after.get(path) == before.get(path), path


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("place", PLACES)
def test_what_is_not_ours_is_refused_by_name(place: str, kind: str, tmp_path: Path) -> None:
    lay_out(tmp_path, {place: kind})
    if place == "out.blr-replaced":
        whole(tmp_path / "out")
    if (place, kind) == ("out", "empty folder"):
        return  # taken: the one thing a user makes to say where the output goes
    before = snapshot(tmp_path)
    for restart in (False, True):
        with pytest.raises(OutputError) as refused:
            produce(tmp_path / "out", overwrite=True, restart=restart)
        assert str(tmp_path / place) in str(refused.value) and "\n" not in str(refused.value)
        assert snapshot(tmp_path) == before


@pytest.mark.parametrize("leave", [stop_before_commit, stop_before_rename, None])
@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_ours_is_taken_up(leave: Any, restart: bool, overwrite: bool, tmp_path: Path) -> None:
    output = tmp_path / "out"
    if overwrite:
        whole(output)
    if leave is not None:
        leave(output, overwrite=overwrite)
    if overwrite and leave is stop_before_rename:
        assert (tmp_path / "out.blr-replaced").exists() and not output.exists()
    produce(output, overwrite=overwrite, restart=restart)
    assert is_whole(output) and os.listdir(tmp_path) == ["out"]


def test_a_whole_output_named_like_a_partial_folder_is_kept(tmp_path: Path) -> None:
    """Left by a kill at the last rename, or made so by the user: that only this very run finishes."""
    whole(tmp_path / "out.blr-partial")
    before = snapshot(tmp_path)
    for options in ({"restart": True}, {"run": {"recipe": {"cf": 3}}}):
        with pytest.raises(OutputError, match=r"out\.blr-partial"):
            produce(tmp_path / "out", **options)
        assert snapshot(tmp_path) == before
    produce(tmp_path / "out")
    assert is_whole(tmp_path / "out")


@pytest.mark.parametrize("extra", ["notes.txt", "journal/notes.txt", "model.safetensors.bak"])
def test_files_put_into_the_partial_folder_meanwhile_stay(extra: str, tmp_path: Path) -> None:
    stop_before_commit(tmp_path / "out")
    (tmp_path / "out.blr-partial" / extra).write_bytes(MINE)
    for restart in (False, True):
        with pytest.raises(OutputError, match="in the way"):
            produce(tmp_path / "out", restart=restart)
    assert (tmp_path / "out.blr-partial" / extra).read_bytes() == MINE
    (tmp_path / "out.blr-partial" / extra).unlink()
    produce(tmp_path / "out")
    assert is_whole(tmp_path / "out")


@pytest.mark.parametrize("name", ["notes.txt", "config.json"])
def test_an_output_changed_while_the_run_worked_is_kept(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import producing

    whole(tmp_path / "out")

    def late(*arguments: Any, **facts: Any) -> bytes:
        (tmp_path / "out" / name).write_bytes(MINE)
        return build(*arguments, **facts)

    build = producing.build_manifest
    monkeypatch.setattr(producing, "build_manifest", late)
    with pytest.raises(OutputError, match="out: in the way, changed"):
        produce(tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / name).read_bytes() == MINE
    (tmp_path / "out").rename(tmp_path / "aside")
    produce(tmp_path / "out")
    assert is_whole(tmp_path / "out")


@pytest.mark.parametrize("output", ["", ".", "..", "../here", "/", "x.blr-partial", "x.blr-lock"])
def test_outputs_that_are_no_new_folder(
    output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole(tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    before = snapshot(tmp_path)
    for overwrite in (False, True):
        with pytest.raises(OutputError, match="choose another --output"):
            check_output(Path(output), overwrite)
    assert snapshot(tmp_path) == before


def test_a_removed_current_folder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(OutputError, match="was removed"):
        check_output(Path("out"))
    check_output(tmp_path / "out")


@pytest.mark.parametrize(
    ("output", "source"),
    [
        *(("m", "m"), ("m/out", "m"), ("m/deep/out", "m"), ("link/out", "m"), ("m", "m/inner")),
        *(("out", "out.blr-partial"), ("out", "out.blr-replaced/x"), ("m", "link/inner"), ("m", "link")),
    ],
)
def test_source_and_output_are_apart(output: str, source: str, tmp_path: Path) -> None:
    (tmp_path / "m" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to("m")
    with pytest.raises(OutputError, match=r"read.* choose another --output"):
        check_apart(tmp_path / output, tmp_path / source)
    check_apart(tmp_path / "m2", tmp_path / source)


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_output_that_is_read_is_told_so_and_not_to_be_removed(
    overwrite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First of all, by any name of the folder; a hub id is no folder."""
    for name in ("m", "teacher"):
        whole(tmp_path / name)
    monkeypatch.setenv("HOME", str(tmp_path))
    for output, said in (("m", "the model itself"), ("teacher", "itself"), ("m/out", "inside")):
        with pytest.raises(OutputError, match=said) as refused:
            check_output(tmp_path / output, overwrite, ("owner/name", "~/m", str(tmp_path / "teacher")))
        assert "remove" not in str(refused.value)
    check_output(tmp_path / "m2", overwrite, ("owner/name", "~/m"))


def test_mount_points_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of the file system around them, which the device number does not tell."""
    folder = tmp_path / "a volume"
    folder.mkdir()
    assert is_mount(Path("/proc")) and not is_mount(folder)
    escaped = str(folder).replace(" ", "\\040")
    (tmp_path / "mountinfo").write_text(f"36 35 8:1 /data {escaped} rw,noatime - ext4 /dev/sda1 rw\n")
    monkeypatch.setattr(ownership, "MOUNTS", tmp_path / "mountinfo")
    assert is_mount(folder)
    with pytest.raises(OutputError, match=r"a mount point.* --output .*/a volume/model"):
        check_output(folder)
    monkeypatch.setattr(ownership, "MOUNTS", tmp_path / "nowhere")
    assert not is_mount(folder)


def test_a_rename_that_fails_puts_the_replaced_output_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole(tmp_path / "out")
    before = {name: (tmp_path / "out" / name).stat().st_ino for name in FILES}
    rename = os.rename

    def busy(source: Any, target: Any) -> None:
        if Path(source).suffix == ".blr-partial":
            raise OSError(16, "Device or resource busy", str(source))
        rename(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", busy)
        with pytest.raises(OutputError, match="mount point"):
            produce(tmp_path / "out", overwrite=True)
    assert {name: (tmp_path / "out" / name).stat().st_ino for name in FILES} == before
    produce(tmp_path / "out", overwrite=True)
    assert is_whole(tmp_path / "out") and os.listdir(tmp_path) == ["out"]
