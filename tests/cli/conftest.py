"""Checkpoints for `blr`, and a hub."""

from __future__ import annotations

import http.server
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hubs import Environment, Hub
from limited import Limited
from pico import save_pico
from spoiling import words_tokenizer


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pico Llama with a tokenizer of words."""
    folder = save_pico("llama-tied", tmp_path_factory.mktemp("dense") / "llama")
    words_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def small(limited: Limited, dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, compressed."""
    folder = tmp_path_factory.mktemp("small")
    done = limited.run("compress", dense, "-o", "out", "-q", cwd=folder)
    assert done.code == 0, done.err
    return folder / "out"


@pytest.fixture
def model(dense: Path, tmp_path: Path) -> Path:
    """A copy of the dense model to spoil."""
    return Path(shutil.copytree(dense, tmp_path / "model"))


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """Online, with an empty cache."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return {**kept, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}


@pytest.fixture
def hub(dense: Path, environment: Environment) -> Iterator[Callable[..., None]]:
    """Starts the hub; call it with attributes of `Hub` to change what it serves."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    environment["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def serve(**attributes: object) -> None:
        defaults = {"folder": dense, "broken_after": None, "every": 1000, "sent": []}
        defaults |= {"status": None, "parts": None, "error": "GatedRepo"}
        for name, value in {**defaults, **attributes}.items():
            setattr(Hub, name, value)

    yield serve
    server.shutdown()
    server.server_close()
