"""What people give in place of a checkpoint's folder is called by its name, and what to do is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from blr.compressor.base.errors import InputError
from blr.compressor.checkpoint.source import open_source

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            ["adapter_config.json", "adapter_model.safetensors"],
            "an adapter of peft; .*merge it",
        ),
        (
            ["config.json", "model-00001-of-00002.safetensors"],
            "shards without their index; ",
        ),
        (["config.json", "model-Q4_K_M.gguf"], "weights in GGUF; .*gguf_file="),
        (["params.json", "consolidated.00.pth"], "the author's own layout; "),
        (["config.json", "model.onnx"], "a model in ONNX; .*safetensors$"),
        (["snapshots/0123/config.json"], "the cache of the hub; .*give who/a-b, or the folder .*/0123$"),
        (["pico/config.json"], "folders of checkpoints; .*/pico$"),
        (
            ["journal/a", "unhealed/config.json"],
            "an interrupted run of .*; finish it by the command",
        ),
        (["notes.txt"], "found no config.json; .*check the path$"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_what_is_there_instead_is_named(files: list[str], expected: str, tmp_path: Path) -> None:
    folder = tmp_path / "models--who--a-b"
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(CONFIG))
    with pytest.raises(InputError, match=expected):
        open_source(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_a_pointer_of_git_lfs_is_no_damaged_file(name: str, tmp_path: Path) -> None:
    """The commonest of all: cloned without git-lfs."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / name).write_bytes(LFS)
    with pytest.raises(InputError, match=f"{name}: found a pointer of Git LFS; .*`git lfs pull`"):
        open_source(tmp_path)
