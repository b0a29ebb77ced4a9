"""Weights that stay on the hub: a tensor's bytes are fetched when it is read, and none is kept. A
*stand-in* of each shard on the disk holds its header and nothing behind it. Whatever else opens it finds
a file that ends early, and refuses it."""

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blr.compressor.base.errors import HubError
from blr.compressor.base.quoting import first_line
from blr.compressor.checkpoint.regular import refuse

AHEAD = 8 * 2**20  # bytes: small tensors that lie together are one request
TRIES = 5  # in a row that bring nothing
PATIENCE = 30.0  # seconds between two of them, at most; of a server that sends nothing
REMEDY = "run the same command again, finished layers are kept"
DENIED = 401, 403, 404  # statuses that do not change by asking again
BUSY, PAUSE = 429, 60.0  # too many requests; seconds until more are answered, where it does not say


@dataclass
class RemoteShard:
    """One file of a commit on the hub. `size` in bytes; `sha256` where the hub knows it."""

    url: str
    name: str
    size: int
    sha256: str | None = None
    fetched: int = 0
    _ahead: tuple[int, bytearray] = (0, bytearray())
    _digests: dict[tuple[int, int], str] = field(default_factory=dict, repr=False)

    def read(self, start: int, end: int, chunk: int, path: Path) -> Iterator[bytearray]:
        """Yield the bytes from `start` to `end` in pieces. Raises HubError if the hub refuses or fails
        repeatedly, InputError if it sends other bytes than before."""
        digest = hashlib.sha256()
        for at in range(start, end, chunk):
            piece = self._piece(at, min(at + chunk, end))
            digest.update(piece)
            yield piece
        found = digest.hexdigest()
        if self._digests.setdefault((start, end), found) != found:
            refuse(path, "other bytes than at first", "those of one commit", "run it again")

    def digest(self, start: int, end: int) -> str | None:
        """SHA-256 of what `read` gave from `start` to `end`, None if it was not asked for that."""
        return self._digests.get((start, end))

    def _piece(self, start: int, end: int) -> bytearray:
        if end - start >= AHEAD:
            return self.fetch(start, end)
        first, held = self._ahead
        if not first <= start <= end <= first + len(held):
            first, held = start, self.fetch(start, min(start + AHEAD, self.size))
            self._ahead = first, held
        return held[start - first : end - first]

    def fetch(self, start: int, end: int) -> bytearray:
        """Those bytes, past connections that break. Raises HubError."""
        found, done, failures = bytearray(end - start), 0, 0
        while done < len(found):
            reason, wait = "the connection ended early", 0.0
            try:
                for piece in _ranged(self.url, start + done, end):
                    if done + len(piece) > len(found):
                        raise ValueError(f"more than the {len(found)} bytes that were asked for")
                    found[done : done + len(piece)] = piece
                    done, failures = done + len(piece), 0
            except Exception as error:  # the hub client raises its own, httpx's and the system's errors
                reason = first_line(error, 200)
                wait = self._wait(error, reason)
            if done < len(found):
                failures += 1
                if failures == TRIES:
                    raise HubError(f"{self.name}: {reason}; check the network, then {REMEDY}")
                time.sleep(max(wait, min(2.0**failures / 4, PATIENCE)))
        self.fetched += len(found)
        return found

    def _wait(self, error: Exception, reason: str) -> float:
        """Seconds that the hub asks to wait. Raises HubError where asking again is useless."""
        response = getattr(error, "response", None)
        status = getattr(response, "status_code", None)
        if status in DENIED:
            remedy = f"see that `hf auth login` gave a token that may read it, then {REMEDY}"
            raise HubError(f"{self.name}: {reason}; {remedy}") from error
        if response is None or status != BUSY:
            return 0.0
        told = response.headers.get("Retry-After", "")
        return float(told) if told.isdecimal() else PAUSE


STANDING_IN: dict[Path, RemoteShard] = {}  # by the stand-in of each


def remote_shard(path: Path) -> RemoteShard | None:
    """What the file `path` stands in for, None if it is no stand-in of this process."""
    return STANDING_IN.get(path) if STANDING_IN else None


def _ranged(url: str, start: int, end: int) -> Iterator[bytes]:
    """The bytes that the hub sends of a file. Raises the client's errors, or ValueError."""
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    headers: dict[str, object] = {**build_hf_headers(), "Accept-Encoding": "identity"}
    headers["Range"] = f"bytes={start}-{end - 1}"
    options: dict[str, Any] = {"headers": headers, "follow_redirects": True, "timeout": PATIENCE}
    with get_session().stream("GET", url, **options) as response:
        hf_raise_for_status(response)
        if response.status_code != 206:
            raise ValueError(f"status {response.status_code} to a request for a part, expected 206")
        yield from response.iter_raw()
