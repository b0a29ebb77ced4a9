"""A lock tells whose an output is, and nothing in it is believed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from producing import is_whole, produce

from blr.compressor.base.errors import OutputError
from blr.compressor.workspace.lock import ABOUT, Lock

MINE = b"the user's"
OUR_LOCK = json.dumps({"about": ABOUT, "host": "h", "moving": False, "pid": 1}, separators=(",", ":"))


def test_a_damaged_lock_of_ours_is_taken_over(tmp_path: Path) -> None:
    """As after a power failure: its beginning still says whose it is."""
    (tmp_path / "out.blr-lock").write_text(OUR_LOCK[:30])
    produce(tmp_path / "out")
    assert is_whole(tmp_path / "out")


def test_a_lock_removed_by_others_is_not_removed_again(tmp_path: Path) -> None:
    lock = Lock(tmp_path / "lock", tmp_path / "out")
    lock.acquire()
    (tmp_path / "lock").unlink()
    (tmp_path / "lock").write_bytes(MINE)
    lock.release()
    assert (tmp_path / "lock").read_bytes() == MINE


LOCKS = {
    "brackets": "[" * 3000,
    "pid of 400 digits": '"host":"h","pid":' + "9" * 400,
    "pid below zero": '"host":"h","moving":false,"pid":-1',
    "pid as text": '"host":"h","moving":false,"pid":"1"',
    "moving as text": '"host":"h","moving":"yes","pid":2147483646',
    "host as list": '"host":["h"],"moving":false,"pid":1',
}


@pytest.mark.parametrize("locks", [True, False])
@pytest.mark.parametrize("case", LOCKS)
def test_what_a_lock_says_is_not_believed(
    case: str, locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the file system has no locks, and its text alone tells whether its process runs."""
    if not locks:
        monkeypatch.setattr("blr.compressor.workspace.lock._flock", lambda descriptor: None)
        monkeypatch.setattr("socket.gethostname", lambda: "h")
    (tmp_path / "lock").write_text(OUR_LOCK.partition(',"host"')[0] + "," + LOCKS[case] + "}")
    lock = Lock(tmp_path / "lock", tmp_path / "out")
    if case == "host as list" and not locks:
        with pytest.raises(OutputError, match="a blr run on"):
            lock.acquire()
    else:
        lock.acquire()
        assert not lock.moving
        lock.release()
