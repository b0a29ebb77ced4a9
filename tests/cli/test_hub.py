"""Models from the hub: pinned, never touched offline, and a dead hub is told at once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socketserver
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import bare
import pytest
from diffusers_folders import save_diffusion
from hubs import COMMIT, Environment, online, recorded
from pico import save_pico

from blr.compressor.loading.resolve import PATTERNS, is_whole
from blr.compressor.workspace.ownership import write_marker

NO_SOCKETS = """
import socket, sys
from blr.compressor.cli import main
def refuse(*arguments):
    raise AssertionError(f"a socket was opened: {arguments}")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
main()
"""
# Waits nowhere before it asks again
IMPATIENT = f"import time; time.sleep = lambda seconds: None; {bare.MAIN}"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pico Llama."""
    return save_pico("llama", tmp_path_factory.mktemp("dense") / "llama")


def blr(environment: Environment, folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The command with sockets forbidden."""
    return bare.run(NO_SOCKETS, *arguments, cwd=folder, env=environment)


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
    assert f"who/pico: not in the local cache, {tmp_path / 'hf' / 'hub'}; run once" in missing.stderr
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
    (tmp_path / "file").write_text("")
    done = blr(environment, tmp_path, "compress", "who/pico", "-o", "file/out")
    assert done.returncode == 5 and "file" in done.stderr and "hub" not in done.stderr


def test_revision_of_a_local_folder(dense: Path, environment: Environment, tmp_path: Path) -> None:
    done = blr(environment, tmp_path, "compress", dense, "-o", "out", "--revision", "main")
    assert done.returncode == 2 and "local folder" in done.stderr


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
    asked = ("compress", "who/pico", "-o", "out")
    done = bare.run(IMPATIENT, *asked, cwd=tmp_path, env=environment)
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


# How a hub cannot be asked: no route to it, a proxy that is gone, an answer that is none
DOWN = {
    "refused": {"HF_ENDPOINT": "http://127.0.0.1:9"},
    "proxy": {"HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"},
    "name": {"HF_ENDPOINT": "http://hub.invalid"},
}
COMMANDS = {
    "plan": ("plan", "who/pico", "--method", "svd"),
    "compress": ("compress", "who/pico", "--method", "svd", "-o", "out"),
    "stream": ("compress", "who/pico", "--method", "svd", "--stream", "-o", "out"),
    "export": ("export", "who/pico", "--as", "dense", "-o", "out"),
}


@pytest.mark.parametrize(
    ("down", "command"),
    [*((down, "compress") for down in DOWN), *(("refused", c) for c in COMMANDS if c != "compress")],
)
def test_a_cached_model_without_the_network(
    down: str, command: str, dense: Path, environment: Environment, tmp_path: Path
) -> None:
    """As transformers: what is in the cache whole is taken, and it is said."""
    put_in_cache(dense, tmp_path / "hf")
    done = online({**environment, **DOWN[down]}, tmp_path, *COMMANDS[command])
    assert done.returncode == 0, done.stderr
    assert f"goes on with commit {COMMIT} in the cache" in done.stderr
    if command != "plan":
        assert recorded(tmp_path / "out") == {"name": "who/pico", "revision": COMMIT}


@pytest.mark.parametrize("left", [{"config.json"}, {"model.safetensors"}, {"tokenizer.json"}])
def test_a_cache_that_has_not_all_is_not_taken(
    left: set[str], dense: Path, environment: Environment, tmp_path: Path
) -> None:
    """The network is told of, not a file that a stopped download left out."""
    put_in_cache(dense, tmp_path / "hf")
    for path in (tmp_path / "hf/hub/models--who--pico/snapshots" / COMMIT).iterdir():
        if path.name not in left:
            path.unlink()
    done = online({**environment, **DOWN["refused"]}, tmp_path, *COMMANDS["compress"])
    assert done.returncode == 8 and "check the name, the network" in done.stderr
    assert not list(tmp_path.glob("out*"))


def test_shards_that_the_index_names_are_all_needed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    table = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    (tmp_path / "model-1.safetensors").touch()
    assert not is_whole(tmp_path, PATTERNS) and is_whole(tmp_path, ["config.json"])
    (tmp_path / "model-2.safetensors").touch()
    assert is_whole(tmp_path, PATTERNS)


def test_a_model_that_the_hub_closed_is_taken_from_the_cache(
    dense: Path, hub: Callable[..., None], environment: Environment, tmp_path: Path
) -> None:
    put_in_cache(dense, tmp_path / "hf")
    hub(commit=COMMIT, status=403)
    done = online(environment, tmp_path, *COMMANDS["compress"])
    assert done.returncode == 0, done.stderr
    assert f"goes on with commit {COMMIT} in the cache" in done.stderr


def test_a_revision_that_the_hub_has_not_is_an_error(
    dense: Path, hub: Callable[..., None], environment: Environment, tmp_path: Path
) -> None:
    put_in_cache(dense, tmp_path / "hf")
    hub(commit=COMMIT, status=404, error="RevisionNotFound")
    done = online(environment, tmp_path, *COMMANDS["compress"], "--revision", "main")
    assert done.returncode == 8 and "404 Not Found" in done.stderr
