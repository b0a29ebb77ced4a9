"""Models from the hub: pinned, never touched offline, and a dead hub is told at once."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import shutil
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs

import pytest
from diffusers_folders import save_diffusion
from limited import Limited, refused
from patience import PATIENCE
from pico import save_pico
from safetensors.torch import load_file, save_file

from blr.compressor.checkpoint.ownership import write_marker

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NO_SOCKETS = """
import socket, sys
from blr.compressor.cli import main
def refuse(*arguments):
    raise AssertionError(f"a socket was opened: {arguments}")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
main()
"""
Environment = dict[str, str]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pico Llama."""
    return save_pico("llama", tmp_path_factory.mktemp("dense") / "llama")


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """Online, with an empty cache."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return {**kept, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}


def blr(environment: Environment, folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The command with sockets forbidden."""
    return subprocess.run(
        [sys.executable, "-c", NO_SOCKETS, *map(str, arguments)],
        **{"cwd": folder, "env": environment, "capture_output": True, "text": True, "timeout": PATIENCE},
    )


def online(
    environment: Environment, folder: Path, *arguments: object
) -> subprocess.CompletedProcess[str]:
    """The command as it is."""
    return subprocess.run(
        [str(Path(sys.executable).with_name("blr")), *map(str, arguments)],
        **{"cwd": folder, "env": environment, "capture_output": True, "text": True, "timeout": PATIENCE},
    )


def put_in_cache(dense: Path, home: Path) -> None:
    """What huggingface_hub leaves behind after a download of who/pico."""
    model = home / "hub" / "models--who--pico"
    snapshot = model / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for file in dense.iterdir():
        blob = model / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        blob.parent.mkdir(exist_ok=True)
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(COMMIT)


def recorded(output: Path) -> dict[str, str]:
    return json.loads((output / "blr_manifest.json").read_text())["source"]


def test_offline_opens_no_socket(dense: Path, environment: Environment, tmp_path: Path) -> None:
    put_in_cache(dense, tmp_path / "hf")
    done = blr(environment, tmp_path, "compress", "who/pico", "-o", "out", "--offline")
    assert done.returncode == 0, done.stderr
    assert recorded(tmp_path / "out") == {"name": "who/pico", "revision": COMMIT}


@pytest.mark.parametrize("flag", [True, False])
def test_offline_without_the_model(flag: bool, environment: Environment, tmp_path: Path) -> None:
    options = ["--offline"] if flag else []
    environment |= {} if flag else {"HF_HUB_OFFLINE": "1"}
    missing = blr(environment, tmp_path, "compress", "who/pico", "-o", "out", *options)
    assert missing.returncode == 8 and missing.stderr.count("\n") == 1
    assert "not in the local cache" in missing.stderr
    assert os.listdir(tmp_path) in ([], ["hf"])


def test_local_folder_needs_no_socket_even_online(
    dense: Path, environment: Environment, tmp_path: Path
) -> None:
    done = blr(environment, tmp_path, "compress", dense, "-o", "out")
    assert done.returncode == 0, done.stderr
    assert recorded(tmp_path / "out") == {"name": "llama", "revision": None}


@pytest.fixture
def dead(environment: Environment) -> Iterator[list[int]]:
    """A hub that takes connections and drops them; holds the port of every attempt."""
    attempts: list[int] = []

    class Dropped(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            attempts.append(self.client_address[1])

    with socketserver.TCPServer(("127.0.0.1", 0), Dropped) as server:
        environment["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield attempts
        server.shutdown()


def test_dead_hub(environment: Environment, dead: list[int], tmp_path: Path) -> None:
    """Told at once: without trying again and again, each time after a longer wait."""
    done = online(environment, tmp_path, "compress", "who/pico", "-o", "out", "--format", "json")
    assert done.returncode == 8 and done.stderr.count("\n") == 1
    assert "check the name, the network" in done.stderr
    assert json.loads(done.stdout)["exit_code"] == 8
    assert os.listdir(tmp_path) in ([], ["hf"])
    assert 1 <= len(dead) <= 3


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("./nowhere", 4, "no such folder"),
        ("a/b/c", 4, "no such folder"),
        ("nonesuch", 4, "short names"),
        ("who/../pico", 4, "no such folder"),
        ("who/pi co", 4, "no such folder"),
        ("\x1b[31m/x", 4, "\\x1b[31m/x"),
    ],
)
def test_neither_folder_nor_hub_id(
    name: str, code: int, message: str, environment: Environment, tmp_path: Path
) -> None:
    done = blr(environment, tmp_path, "compress", name, "-o", "out")
    assert done.returncode == code and message in done.stderr
    assert done.stderr.removesuffix("\n").isprintable()


def test_output_is_checked_before_the_download(environment: Environment, tmp_path: Path) -> None:
    done = blr(environment, tmp_path, "compress", "who/pico", "-o", "nowhere/out")
    assert done.returncode == 5 and "no such folder" in done.stderr


def test_revision_of_a_local_folder(dense: Path, environment: Environment, tmp_path: Path) -> None:
    done = blr(environment, tmp_path, "compress", dense, "-o", "out", "--revision", "main")
    assert done.returncode == 2 and "local folder" in done.stderr


# --- A hub of our own -----------------------------------------------------------------------


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves one repository, who/pico, as far as `snapshot_download` asks."""

    folder: Path
    commit: str
    broken_after: int | None  # bytes of a file that are sent before the connection breaks
    every: int  # how many requests for parts of files go well between two that break
    sent: ClassVar[list[tuple[str, int]]]  # parts of files: name, bytes

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


@pytest.fixture
def hub(dense: Path, environment: Environment) -> Iterator[Callable[..., None]]:
    """Starts the hub; call it with attributes of `Hub` to change what it serves."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    environment["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def serve(**attributes: object) -> None:
        defaults = {"folder": dense, "broken_after": None, "every": 1000, "sent": []}
        for name, value in {**defaults, **attributes}.items():
            setattr(Hub, name, value)

    yield serve
    server.shutdown()
    server.server_close()


def test_revision_is_pinned(hub: Callable[..., None], environment: Environment, tmp_path: Path) -> None:
    """A run that was stopped while the branch moved on does not mix two revisions."""
    hub(commit=COMMIT)
    done = online(environment, tmp_path, "compress", "who/pico", "-o", "out")
    assert done.returncode == 0, done.stderr
    assert recorded(tmp_path / "out") == {"name": "who/pico", "revision": COMMIT}
    left = tmp_path / "out2.blr-partial"
    (left / "journal").mkdir(parents=True)
    (left / "journal" / f"{0:064x}.safetensors").write_text("")
    manifest = json.loads((tmp_path / "out" / "blr_manifest.json").read_text())
    write_marker(left, manifest["run"], [])
    hub(commit=COMMIT[::-1])
    moved = online(environment, tmp_path, "compress", "who/pico", "-o", "out2")
    assert moved.returncode == 5
    assert f'revision was "{COMMIT}", now "{COMMIT[::-1]}"' in moved.stderr


def test_hub_that_dies_while_it_sends(
    hub: Callable[..., None], environment: Environment, tmp_path: Path
) -> None:
    hub(commit=COMMIT, broken_after=1000)
    done = online(environment, tmp_path, "compress", "who/pico", "-o", "out")
    assert done.returncode == 8, done.stderr
    assert done.stderr.splitlines()[-1].startswith("blr: error: who/pico: ")
    assert not list(tmp_path.glob("out*"))


def test_of_a_pipeline_the_transformer_alone_is_downloaded(
    hub: Callable[..., None], environment: Environment, tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    save_diffusion(pipe / "transformer")
    (pipe / "model_index.json").write_text('{"_class_name": "DiTPipeline"}')
    (pipe / "vae").mkdir()
    (pipe / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(b"large")
    hub(folder=pipe, commit=COMMIT)
    options = ["--method", "svd", "--no-check", "-o", "out"]
    done = online(environment, tmp_path, "compress", "who/pico", *options)
    assert done.returncode == 0, done.stderr
    assert recorded(tmp_path / "out") == {"name": "who/pico", "revision": COMMIT}
    snapshot = tmp_path / "hf/hub/models--who--pico/snapshots" / COMMIT
    assert sorted(path.name for path in snapshot.iterdir()) == ["model_index.json", "transformer"]
    again = blr(environment, tmp_path, "plan", "who/pico", "--offline")
    assert again.returncode == 0, again.stderr
    streamed = online(environment, tmp_path, "compress", "who/pico", "--stream", "-o", "no")
    assert streamed.returncode == 2 and "who/pico is a pipeline" in streamed.stderr


# --- Weights that stay there ----------------------------------------------------------------


@pytest.fixture(scope="module")
def sharded(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in several files."""
    folder = Path(shutil.copytree(dense, tmp_path_factory.mktemp("sharded") / "pico"))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    half, index = len(tensors) // 2, {}
    for number, names in enumerate((list(tensors)[:half], list(tensors)[half:]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file)
        index |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def weights_in(home: Path) -> list[Path]:
    return [path for path in home.rglob("*.safetensors") if path.stat().st_size > 20_000]


def test_streamed_it_keeps_no_weights(
    hub: Callable[..., None],
    environment: Environment,
    sharded: Path,
    limited: Limited,
    tmp_path: Path,
) -> None:
    """The bytes are those of a download, past connections that break, each weight fetched thrice."""
    hub(folder=sharded, commit=COMMIT, every=7)
    done = online(environment, tmp_path, "compress", "who/pico", "-o", "out", "--stream")
    assert done.returncode == 0, done.stderr
    assert "weights stay there" in done.stderr
    assert recorded(tmp_path / "out") == {"name": "who/pico", "revision": COMMIT}
    assert not weights_in(tmp_path / "hf")
    size = sum(path.stat().st_size for path in sharded.glob("*.safetensors"))
    assert sum(count for _, count in Hub.sent) < 4 * size
    assert limited.run("compress", sharded, "-o", "local", "-q", cwd=tmp_path).code == 0
    found, expected = (load_file(tmp_path / n / "model.safetensors") for n in ("out", "local"))
    assert found.keys() == expected.keys()
    assert all(tensor.equal(expected[name]) for name, tensor in found.items())


def test_streamed_bytes_are_those_that_the_hub_lists(
    hub: Callable[..., None], environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = Hub.about

    def other(self: Hub, name: str) -> dict[str, object]:
        found = about(self, name)
        return {**found, "lfs": {**found["lfs"], "oid": "0" * 64}}

    monkeypatch.setattr(Hub, "about", other)
    hub(commit=COMMIT)
    done = online(environment, tmp_path, "compress", "who/pico", "-o", "out", "--stream")
    assert done.returncode == 4 and "by the hub" in done.stderr
    assert not (tmp_path / "out").exists()


def test_what_takes_the_whole_model_is_not_streamed(
    dense: Path, limited: Limited, tmp_path: Path
) -> None:
    for given, said in ((("who/pico", "--heal"), "whole model"), ((dense,), "is a local folder")):
        refused(limited.run("compress", *given, "--stream", cwd=tmp_path), 2, said)
