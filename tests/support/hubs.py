"""A hub of our own, of one repository, and commands that ask it."""

from __future__ import annotations

import hashlib
import http.server
import json
import subprocess
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs

import bare

COMMIT = "0123456789abcdef0123456789abcdef01234567"
Environment = dict[str, str]


def online(
    environment: Environment, folder: Path, *arguments: object
) -> subprocess.CompletedProcess[str]:
    """The command as it is, in a process that finds the hub where `environment` has it."""
    return bare.run(bare.MAIN, *arguments, cwd=folder, env=environment)


def recorded(output: Path) -> dict[str, str]:
    return json.loads((output / "blr_manifest.json").read_text())["source"]


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves one repository, who/pico, as far as `snapshot_download` asks."""

    folder: Path
    commit: str
    broken_after: int | None  # bytes of a file that are sent before the connection breaks
    every: int  # how many requests for parts of files go well between two that break
    sent: ClassVar[list[tuple[str, int]]]  # parts of files: name, bytes
    status: int | None  # what every request is refused with
    error: str = "GatedRepo"  # why
    parts: int | None  # how many requests for parts are answered before all are refused

    def refused(self) -> bool:
        """Whether this request was, as the hub refuses gated models."""
        late = self.parts is not None and len(self.sent) >= self.parts and self.headers["Range"]
        status = self.status if self.parts is None or late else None
        if status is not None:
            self.send_response(status)
            self.send_header("X-Error-Code", self.error)
            self.send_header("Content-Length", "0")
            self.end_headers()
        return status is not None

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def do_POST(self) -> None:
        asked = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())["paths"]
        files = [self.about(name) for name in asked if (self.folder / name).is_file()]
        self.send(json.dumps(files).encode(), "application/json", True)

    def about(self, name: str) -> dict[str, object]:
        data = (self.folder / name).read_bytes()
        lfs = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 1}
        return {"type": "file", "path": name, "oid": name, "size": len(data), "lfs": lfs}

    def part(self, name: str) -> None:
        """What a request for a range gets; now and then the connection breaks in the middle."""
        start, end = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        data = (self.folder / name).read_bytes()[start : end + 1]
        self.sent.append((name, len(data)))
        self.send_response(206)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if len(self.sent) % self.every == 0 else data)

    def answer(self, body: bool) -> None:
        if self.refused():
            return
        paths = (path for path in self.folder.rglob("*") if path.is_file())
        names = sorted(path.relative_to(self.folder).as_posix() for path in paths)
        name = self.path.removeprefix("/who/pico/resolve/").partition("/")[2]
        if self.path.startswith("/api/models/who/pico/"):
            siblings = [{"rfilename": name} for name in names]
            info = {"id": "who/pico", "sha": self.commit, "siblings": siblings}
            if "/tree/" in self.path:
                info = [{"type": "file", "path": name, "oid": name, "size": 1} for name in names]
            self.send(json.dumps(info).encode(), "application/json", body)
        elif self.path.startswith("/who/pico/resolve/") and name in names and self.headers["Range"]:
            self.part(name)
        elif self.path.startswith("/who/pico/resolve/") and name in names:
            self.send((self.folder / name).read_bytes(), "application/octet-stream", body)
        else:
            self.send_error(404)

    def send(self, data: bytes, kind: str, body: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", self.commit)
        self.end_headers()
        if body:
            self.wfile.write(data[: self.broken_after] if kind.endswith("stream") else data)

    def log_message(self, *_: object) -> None:
        pass
