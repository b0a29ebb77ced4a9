"""A full disk, a folder that cannot be written, a run beside another one, and file modes."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from killer import Killer
from limited import Limited
from pico import save_pico
from producing import files, snapshot

from blr.compressor.workspace.workspace import Workspace

OPTIONS = ("--quiet", "--max-shard-size", "60KB")
LAYERS = 14


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pico Llama."""
    return save_pico("llama", tmp_path_factory.mktemp("dense") / "llama")


@pytest.fixture(scope="module")
def made(killer: Killer, dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run with room enough writes."""
    folder = tmp_path_factory.mktemp("made")
    assert killer.run("compress", dense, "-o", "out", *OPTIONS, cwd=folder).code == 0
    return folder / "out"


@pytest.fixture(scope="module")
def expected(made: Path) -> dict[str, str]:
    """Its files."""
    return files(made)


# What fails: the journal, written by safetensors; a shard, written by us.
@pytest.mark.parametrize(("limit", "fits"), [(3_000, 1), (20_000, LAYERS)])
def test_file_limit(
    limit: int, fits: int, killer: Killer, dense: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    command = ("compress", dense, "-o", "out", *OPTIONS)
    full = killer.run(*command, cwd=tmp_path, file_limit=limit)
    assert full.code == 6 and full.fits in (fits, min(fits + 1, LAYERS))  # two are fitted at once
    assert re.fullmatch(r"blr: error: \S+: file too large; .* about \d{6,7} bytes .*\n", full.stderr)
    assert ("it resumes" in full.stderr) == (fits > 1), "the first layer was not stored"
    assert not (tmp_path / "out").exists() and not list(tmp_path.rglob("*.tmp"))
    done = killer.run(*command, cwd=tmp_path)
    assert done.code == 0 and full.fits + done.fits <= LAYERS + 1
    assert files(tmp_path / "out") == expected
    assert os.listdir(tmp_path) == ["out"]


def test_an_export_that_starts_over_is_not_said_to_resume(
    killer: Killer, dense: Path, tmp_path: Path
) -> None:
    full = killer.run("export", dense, "-o", "out", "-q", cwd=tmp_path, file_limit=60_000)
    assert full.code == 6 and full.stderr.endswith("run the same command again\n"), full.stderr
    assert os.listdir(tmp_path) == []


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 3 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting needs the rights of root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_disk(killer: Killer, dense: Path, expected: dict[str, str], disk: Path) -> None:
    command = ("compress", dense, "-o", "out", *OPTIONS)
    early = killer.run(*command, cwd=disk)
    assert early.code == 6 and early.fits == 0 and os.listdir(disk) == []
    assert re.search(r"\d+ bytes free, the run needs about \d{7} bytes: ", early.stderr)
    (disk / "filler").write_bytes(bytes(3 * 2**20 - 60 * 2**10))
    for room in (60, 80, 100):
        os.truncate(disk / "filler", 3 * 2**20 - room * 2**10)
        late = killer.run(*command, cwd=disk, blind=True)
        assert late.code == 6, late.stderr
        assert re.search(r"no space left on device; the run needs about \d{7} bytes there", late.stderr)
        assert sorted(os.listdir(disk)) == ["filler", "out.blr-partial"]
    (disk / "filler").unlink()
    done = killer.run(*command, cwd=disk, blind=True)
    assert done.code == 0, done.stderr
    assert done.fits < LAYERS and files(disk / "out") == expected


def test_resumed_run_needs_less_room(killer: Killer, dense: Path, disk: Path) -> None:
    """What the journal holds already is not asked for again."""
    (disk / "filler").write_bytes(bytes(2**20))
    command = ("compress", dense, "-o", "out", *OPTIONS)
    needed = []
    for fate in ({}, {"die_at": 40, "blind": True}, {}):
        run = killer.run(*command, cwd=disk, **fate)
        needed += re.findall(r"needs about (\d+) bytes", run.stderr)
    kept = sum(path.stat().st_size for path in (disk / "out.blr-partial").rglob("*") if path.is_file())
    assert kept > 10_000 and int(needed[1]) == int(needed[0]) - kept


def test_read_only_folder(killer: Killer, dense: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs the rights of root")
    installed = Path(sys.prefix).resolve()
    if not all(part.stat().st_mode & stat.S_IXOTH for part in (installed, *installed.parents)):
        pytest.skip("another user cannot read the installed packages")
    for folder in (dense, *dense.parents[:4], tmp_path, *tmp_path.parents[:3]):
        if stat.S_IMODE(folder.stat().st_mode) == 0o700:  # pytest keeps its folders to itself
            folder.chmod(0o755)
    for file in dense.iterdir():
        file.chmod(0o644)
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    for output in ("closed/out", "../" * 20 + "usr/out"):
        refused = killer.run("compress", dense, "-o", output, *OPTIONS, cwd=tmp_path, nobody=True)
        assert refused.code == 5 and refused.fits == 0
        assert refused.stderr.count("\n") == 1 and "not writable" in refused.stderr
    closed.chmod(0o777)
    left = closed / "out.blr-partial"
    left.mkdir(mode=0o700)  # by another user
    refused = killer.run("compress", dense, "-o", "closed/out", *OPTIONS, cwd=tmp_path, nobody=True)
    assert refused.code == 5 and "permission denied" in refused.stderr


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("file/out", "a file, no folder to write out into"),
        ("file/more/out", "a file, no folder to write out into"),
        ("file", "exists and is not a folder"),
        ("link", "a link, whose place a finished folder would take"),
        ("root", "which this run replaces"),
        ("full", "not empty"),
        ("/", "not a folder that can be made"),
        ("x" * 250, "file name too long"),
        ("x" * 244, "file name too long"),  # of what lies beside it
    ],
)
def test_impossible_output(
    output: str, message: str, killer: Killer, dense: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    (tmp_path / "root").symlink_to("/")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    for options in ([], ["--overwrite"]):
        refused = killer.run("compress", dense, "-o", output, *options, *OPTIONS, cwd=tmp_path)
        assert refused.code == 5 and refused.stderr.count("\n") == 1
        assert message in refused.stderr or (options and "not written by blr" in refused.stderr)
        assert sorted(tmp_path.rglob("*")) == before


def test_folders_around_an_output_are_made(killer: Killer, dense: Path, tmp_path: Path) -> None:
    assert killer.run("compress", dense, "-o", "new/models/out", *OPTIONS, cwd=tmp_path).code == 0
    assert files(tmp_path / "new/models/out")


def test_empty_folder_is_taken(killer: Killer, dense: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert killer.run("compress", dense, "-o", "out/", *OPTIONS, cwd=tmp_path).code == 0
    assert files(tmp_path / "out")


def test_output_filled_by_others_meanwhile(killer: Killer, dense: Path, tmp_path: Path) -> None:
    """Between the check and the last rename a file appears where the output is to go."""
    command = ("compress", dense, "-o", "out", *OPTIONS)
    whole = killer.run(*command, cwd=tmp_path)
    shutil.rmtree(tmp_path / "out")
    assert killer.run(*command, cwd=tmp_path, die_at=len(whole.events) - 5).code == -9
    with Workspace(tmp_path / "out") as workspace:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "file").write_text("mine")
        with pytest.raises(OSError, match="not empty"):
            workspace.commit()
    assert (tmp_path / "out" / "file").read_text() == "mine"
    assert (tmp_path / "out.blr-partial" / "blr_manifest.json").exists()


def test_overwrite_only_over_our_own(
    killer: Killer, dense: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    command = ("compress", dense, "-o", "out", *OPTIONS, "--overwrite")
    assert killer.run(*command, "--cf", "1.5", cwd=tmp_path).code == 0
    replaced = killer.run(*command, cwd=tmp_path)
    assert replaced.code == 0 and replaced.fits == LAYERS
    assert files(tmp_path / "out") == expected and os.listdir(tmp_path) == ["out"]
    (tmp_path / "out" / "blr_manifest.json").write_text('{"format": 1, "files": {"../x": {}}}')
    refused = killer.run(*command, cwd=tmp_path)
    assert refused.code == 5 and "not written by blr" in refused.stderr
    assert os.listdir(tmp_path) == ["out"]


def test_second_run_is_refused_at_once(killer: Killer, dense: Path, tmp_path: Path) -> None:
    with Workspace(tmp_path / "out"):
        second = killer.run("compress", dense, "-o", "out", *OPTIONS, cwd=tmp_path)
        assert second.code == 5 and second.fits == 0
        assert "another blr run is writing it" in second.stderr
        assert (tmp_path / "out.blr-lock").exists()
        other = killer.run("compress", dense, "-o", "other", *OPTIONS, cwd=tmp_path)
        assert other.code == 0
    assert os.listdir(tmp_path) == ["other"]


# The command runs in a child, too, from the same moment on; the exit code is 50 for 0 and 5
TWICE = """
import os
from blr.compressor.cli import main
child, code = os.fork(), 0
try:
    main()
except SystemExit as end:
    code = end.code
if child == 0:
    os._exit(code)
other = os.waitstatus_to_exitcode(os.wait()[1])
raise SystemExit(10 * max(code, other) + min(code, other))
"""


def test_two_runs_at_once(limited: Limited, dense: Path, tmp_path: Path) -> None:
    ended = limited.run("compress", dense, "-o", "out", *OPTIONS, cwd=tmp_path, patch=TWICE)
    assert ended.code == 50, ended.err
    assert files(tmp_path / "out") and os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize(
    ("umask", "file_mode", "folder_mode"), [(0o22, 0o644, 0o755), (0o77, 0o600, 0o700)]
)
def test_umask(
    umask: int, file_mode: int, folder_mode: int, killer: Killer, dense: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(dense, tmp_path / "dense")
    (source / "1_Pooling").mkdir(0o777)
    (source / "1_Pooling" / "config.json").write_text("{}")
    (source / "1_Pooling" / "config.json").chmod(0o777)
    done = killer.run("compress", source, "-o", "out", *OPTIONS, cwd=tmp_path, umask=umask)
    assert done.code == 0, done.stderr
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").rglob("*")}
    assert {mode for path, mode in modes.items() if path.is_file()} == {file_mode}
    assert modes[tmp_path / "out" / "1_Pooling"] == folder_mode
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == folder_mode


def test_a_mount_point_is_refused_before_the_work(killer: Killer, dense: Path, disk: Path) -> None:
    """As a container's volume is: no finished folder can be renamed to it."""
    for command in ("compress", "export"):
        refused = killer.run(command, dense, "-o", disk, "-q", cwd=disk.parent)
        assert refused.code == 5 and refused.fits == 0
        assert f"{disk}: a mount point" in refused.stderr and f"--output {disk}/model" in refused.stderr
        assert os.listdir(disk) == [] and os.listdir(disk.parent) == [disk.name]


@pytest.mark.parametrize("command", ["compress", "export"])
@pytest.mark.parametrize(
    ("place", "source", "output"),
    [
        *((".", "m", ""), (".", "m", "."), ("m", ".", "out"), (".", "m", "m/out"), (".", "m", "m")),
        *((".", "out.blr-partial", "out"), (".", "out/m", "out"), ("made", "../m", "../made")),
        (".", "m", "x.blr-partial"),
    ],
)
def test_nothing_changes_where_the_output_cannot_go(
    command: str,
    place: str,
    source: str,
    output: str,
    killer: Killer,
    dense: Path,
    made: Path,
    tmp_path: Path,
) -> None:
    """The current folder, the checkpoint that is read, or what that lies in."""
    for copy in ("m", "out.blr-partial", "out/m"):
        shutil.copytree(dense, tmp_path / copy)
    shutil.copytree(made, tmp_path / "made")
    before = snapshot(tmp_path)
    for options in ([], ["--overwrite"], ["--overwrite", "--restart"]):
        refused = killer.run(command, source, "-o", output, "-q", *options, cwd=tmp_path / place)
        assert refused.code == 5 and refused.fits == 0
        assert refused.stderr.count("\n") == 1 and "choose another --output" in refused.stderr
        assert snapshot(tmp_path) == before


def test_an_edited_output_is_not_overwritten(killer: Killer, dense: Path, tmp_path: Path) -> None:
    command = ("compress", dense, "-o", "out", *OPTIONS, "--overwrite")
    assert killer.run(*command, cwd=tmp_path).code == 0
    for name in ("notes.txt", "README.md"):
        with open(tmp_path / "out" / name, "a") as file:
            file.write("mine")
        before = snapshot(tmp_path)
        refused = killer.run(*command, cwd=tmp_path)
        assert (
            refused.code == 5
            and refused.fits == 0
            and f"out/{name}"
            in refused.stderr.replace("out: in the way, changed since blr wrote it (", "out/")
        )
        assert snapshot(tmp_path) == before
        (tmp_path / "out" / "notes.txt").unlink(missing_ok=True)
