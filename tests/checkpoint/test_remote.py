"""Parts of files on the hub, from one that sends too little, too much or something else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from blr.compressor.base.errors import HubError, InputError
from blr.compressor.checkpoint import remote
from blr.compressor.checkpoint.remote import RemoteShard

DATA = bytes(range(200))


def shard_of(*answers: bytes | Exception | None, monkeypatch: pytest.MonkeyPatch) -> RemoteShard:
    """A file of a hub that answers one request after the other so; None: as it should."""
    waiting = iter(answers)

    def ranged(url: str, start: int, end: int) -> Iterator[bytes]:
        answer = next(waiting)
        if isinstance(answer, Exception):
            raise answer
        answer = DATA[start:end] if answer is None else answer
        yield answer[: len(answer) // 2]
        yield answer[len(answer) // 2 :]

    monkeypatch.setattr(remote, "_ranged", ranged)
    monkeypatch.setattr(remote, "AHEAD", 8)
    monkeypatch.setattr(remote.time, "sleep", lambda seconds: None)
    return RemoteShard("https://hub", "a.safetensors", len(DATA))


def test_what_ends_early_goes_on_where_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = shard_of(DATA[10:20], DATA[20:24], None, monkeypatch=monkeypatch)
    assert shard.fetch(10, 30) == DATA[10:30] and shard.fetched == 20


def test_more_than_was_asked_for_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = shard_of(*[DATA] * remote.TRIES, monkeypatch=monkeypatch)
    with pytest.raises(HubError, match="more than the 20 bytes that were asked for"):
        shard.fetch(10, 30)


def test_small_tensors_side_by_side_are_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = shard_of(None, None, monkeypatch=monkeypatch)
    for start, end in ((16, 19), (19, 24), (20, 22), (24, 24)):
        assert b"".join(shard.read(start, end, 100, Path("a"))) == DATA[start:end]
    assert shard.fetched == 8
    assert shard.digest(19, 24) is not None and shard.digest(0, 8) is None


def test_other_bytes_than_at_first_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = shard_of(None, bytes(20), monkeypatch=monkeypatch)
    assert b"".join(shard.read(0, 20, 50, Path("a"))) == DATA[:20]
    with pytest.raises(InputError, match="other bytes than at first"):
        list(shard.read(0, 20, 50, Path("a")))


class Refusal(Exception):
    """What the hub's client raises."""

    def __init__(self, status: int, **headers: str) -> None:
        super().__init__(f"{status} Client Error")
        self.response = SimpleNamespace(status_code=status, headers=headers)


def test_too_many_requests_are_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = Refusal(429, **{"Retry-After": "7"}), Refusal(429)
    shard, waited = shard_of(*busy, None, monkeypatch=monkeypatch), []
    monkeypatch.setattr(remote.time, "sleep", waited.append)
    assert shard.fetch(10, 30) == DATA[10:30]
    assert waited == [7, remote.PAUSE]


@pytest.mark.parametrize("status", remote.DENIED)
def test_what_is_denied_is_not_asked_for_again(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = shard_of(Refusal(status), None, monkeypatch=monkeypatch)
    with pytest.raises(HubError, match=f"{status} .*a token that may read it"):
        shard.fetch(10, 30)
