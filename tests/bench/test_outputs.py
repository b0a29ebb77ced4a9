"""Results of benchmarks and tuned tables: never over a file of the user's, never lost after the work."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from producing import snapshot

from blr.bench.results import NAME, BenchReport, Timed, check_output, save
from blr.bench.tuned_files import HEADER, check_table, table_text, write_table
from blr.compressor.base.errors import BlrError, OutputError, RecipeError, StorageError
from blr.compressor.cli.options import Format
from blr.compressor.cli.timing import finish

MINE = "the user's"
TABLE = table_text("mine", "a test", [{"structure": "lowrank", "dtype": "float16", "variant": "gemm"}])


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_a_folder_with_results_is_refused_before_the_work(kind: str, tmp_path: Path) -> None:
    path = tmp_path / NAME
    {"file": path.touch, "folder": path.mkdir, "link": lambda: path.symlink_to("nowhere")}[kind]()
    before = snapshot(tmp_path)
    with pytest.raises(OutputError, match=f"already holds {NAME}"):
        check_output(tmp_path)
    assert snapshot(tmp_path) == before


def test_a_folder_with_other_files_is_used_and_they_stay(tmp_path: Path) -> None:
    for name in (".blr-probe", "notes.txt"):
        (tmp_path / name).write_text(MINE)
    before = snapshot(tmp_path)
    check_output(tmp_path)
    save(BenchReport("bench layers", {}), tmp_path)
    after = snapshot(tmp_path)
    assert after.keys() - before.keys() == {NAME}
    assert {name: after[name] for name in before} == before


@pytest.mark.parametrize("output", ["", "."])
def test_the_current_folder_is_refused(output: str) -> None:
    with pytest.raises(OutputError, match="the current folder"):
        check_output(Path(output))


def test_files_that_appear_meanwhile_stay(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(MINE)
    with pytest.raises(OutputError):
        save(BenchReport("bench layers", {}), tmp_path)
    assert (tmp_path / NAME).read_text() == MINE


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("format", Format)
def test_results_that_cannot_be_written_are_printed(
    number: int,
    format: Format,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(*paths: Any) -> None:
        raise OSError(number, os.strerror(number), str(paths[-1]))

    monkeypatch.setattr(os, "link", fails)
    monkeypatch.setattr(Timed, "summary", lambda rows: {"wins": 3})
    monkeypatch.setattr(Timed, "head", lambda machine: "the table")
    report = BenchReport("bench layers", {"n": 7})
    with pytest.raises((OutputError, StorageError)):
        finish(report, 0, tmp_path, format)
    printed = capsys.readouterr().out
    assert '"wins": 3' in printed and ("the table" in printed) == (format is Format.text)
    assert not list(tmp_path.glob("*.tmp"))


TABLES: dict[str, Any] = {
    "no table": lambda path: path.write_text(MINE),
    "empty": lambda path: path.touch(),
    "table of the user": lambda path: path.write_text(TABLE.removeprefix(HEADER)),
    "table with remarks": lambda path: path.write_text(TABLE + "# mine\n"),
    "link to a table": lambda path: path.symlink_to("tuned.yaml"),
    "link to nothing": lambda path: path.symlink_to("nowhere"),
    "folder": lambda path: path.mkdir(),
    "fifo": os.mkfifo,
    "broken": lambda path: path.write_text(HEADER + "rules: 3\n"),
}


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_goes_over_no_file_but_one_of_its_own(kind: str, tmp_path: Path) -> None:
    (tmp_path / "tuned.yaml").write_text(TABLE)
    path = tmp_path / "out.yaml"
    TABLES[kind](path)
    before = snapshot(tmp_path)
    with pytest.raises(RecipeError if kind == "broken" else OutputError):
        check_table(path)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("name", ["tuned.yaml", "new.yaml", "deep/er/new.yaml"])
def test_a_table_of_its_own_is_written_again(name: str, tmp_path: Path) -> None:
    (tmp_path / "tuned.yaml").write_text(TABLE)
    check_table(tmp_path / name)
    write_table(tmp_path / name, TABLE)
    assert (tmp_path / name).read_text() == TABLE


@pytest.mark.parametrize("path", ["", ".", "file/table.yaml", "/proc/tuned/table.yaml"])
def test_tables_that_cannot_be_written(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BlrError, match="give another"):
        check_table(Path(path))
