"""What people give in place of a checkpoint's folder, and what each of them should do instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from blr.compressor.base.quoting import quote
from blr.compressor.checkpoint.regular import check_is_folder, refuse

Advice = str | Callable[[Path, Path], str]


def in_place_of(folder: Path) -> tuple[str, str] | None:
    """What `folder` holds that is no checkpoint of transformers, and what to do; None if nothing known.

    The first of `KINDS` that matches anything decides. Only names are read.
    """
    for pattern, found, advice in KINDS:
        match = min(folder.glob(pattern), default=None)
        if match is not None:
            return found, advice if isinstance(advice, str) else advice(folder, match)
    return None


def check_is_output(folder: Path, expected: str) -> None:
    """Raises `InputError` unless `folder` is one, and no half of an output, which is `expected`."""
    check_is_folder(folder, expected)
    if (folder / JOURNAL).is_dir():
        refuse(folder, UNFINISHED, expected, FINISH)


def _snapshot(folder: Path, match: Path) -> str:
    owner_and_name = folder.name.removeprefix("models--").replace("--", "/")
    return f"give {quote(owner_and_name)[1:-1]}, or the folder {quote(match.parent, 160)[1:-1]}"


def _inside(folder: Path, match: Path) -> str:
    return f"give {quote(match.parent, 160)[1:-1]}"


JOURNAL = "journal"  # in the partial folder of any run
UNFINISHED = "what an interrupted run of blr has done"
FINISH = "finish it by the command that began it"
TENSORS = "take the model's safetensors"
# pattern of names in the folder -> what it is, what to do
KINDS: tuple[tuple[str, str, Advice], ...] = (
    (JOURNAL, UNFINISHED, FINISH),
    ("adapter_config.json", "an adapter of peft", "merge it into its base model and give that"),
    ("*-of-*.safetensors", "shards without their index", "download the .safetensors.index.json, too"),
    ("*.gguf", "weights in GGUF", f"{TENSORS}, or let transformers read it (gguf_file=) and save it"),
    ("consolidated*", "weights in the author's own layout", "take those in that of transformers"),
    ("*.onnx", "a model in ONNX", TENSORS),
    ("*.h5", "weights of TensorFlow", TENSORS),
    ("*.msgpack", "weights of Flax", TENSORS),
    ("snapshots/*/config.json", "a model in the cache of the hub", _snapshot),
    ("*/config.json", "folders of checkpoints", _inside),
)
