"""The journal: finished layers, each in a file named by the digest of all that determined it. A run that
was killed finds its layers here; bytes equal those of an uninterrupted one, which reads them, too."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from blr.compressor import __version__
from blr.compressor.base.disk import CHUNK, Bytes, fsync_folder, scratch_for, settle
from blr.compressor.base.errors import InputError, OutputError
from blr.compressor.checkpoint.header import TORCH_NAMES, TensorEntry, read_header
from blr.compressor.checkpoint.source import Source
from blr.compressor.workspace.manifest import is_digest

if TYPE_CHECKING:
    from torch import Tensor

Value = TypeVar("Value")
SHOWN_WITHIN = 90.0  # seconds in which network file systems show what another host has written
METADATA_KEY = "blr"  # one key only: safetensors writes several in random order
COMMANDS = {"recipe": "compress", "teacher": "heal", "export": "export"}  # by what their runs alone have


def layer_key(**determinants: object) -> str:
    """SHA-256 of everything the factors of one layer depend on, as canonical JSON."""
    return hashlib.sha256(canonical_json(determinants)).hexdigest()


def canonical_json(value: object) -> bytes:
    """The one JSON text of `value`: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


class Journal:
    """Factors of finished layers under one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def count(self, counts: Callable[[dict[str, object]], bool]) -> int:
        """How many entries have a record that `counts`; their tensors are not looked at."""
        found = 0
        for path in self.folder.glob("*.safetensors"):
            with suppress(InputError, OSError, ValueError, KeyError, TypeError):
                record = json.loads(read_header(path).metadata[METADATA_KEY])["record"]
                found += isinstance(record, dict) and counts(record)
        return found

    def load(self, key: str) -> tuple[dict[str, TensorEntry], dict[str, Any]] | None:
        """Stored tensors by suffix and the record beside them, or None if not (wholly) there."""
        path = self.folder / f"{key}.safetensors"
        try:
            header = read_header(path)
            kept = json.loads(header.metadata[METADATA_KEY])
            found = _of_each(self._described, header.entries)
            if kept["sha256"] == _seal(key, found, kept["record"]):
                return header.entries, kept["record"]
        except (InputError, OSError, ValueError, KeyError, TypeError, RecursionError):
            pass
        return None  # absent, damaged by the disk or another layer's: compute the layer again

    def reader(self, source: Source) -> Callable[[TensorEntry], Iterator[Bytes]]:
        """Reads tensors of files of `source` from there, all others from here."""

        def read(entry: TensorEntry) -> Iterator[Bytes]:
            return source.read_bytes(entry) if entry.file in source.shards else self.read_bytes(entry)

        return read

    def await_all(self, keys: list[str]) -> None:
        """Wait until the layers `keys` of other processes are seen here. Raises OutputError."""
        deadline = time.monotonic() + SHOWN_WITHIN
        for key in keys:
            while not (self.folder / f"{key}.safetensors").exists():
                if time.monotonic() > deadline:
                    found = "a layer that another process has finished is not there"
                    remedy = "processes on several hosts need an --output in a folder that they share"
                    raise OutputError(f"{self.folder}: {found}; {remedy}")
                time.sleep(0.1)
                os.listdir(self.folder)  # makes a network file system look again

    def tensors(self, key: str) -> dict[str, Tensor]:
        """What `load` found under `key`, as torch tensors on the CPU by suffix."""
        from safetensors.torch import load_file

        return load_file(self.folder / f"{key}.safetensors")

    def read_bytes(self, entry: TensorEntry) -> Iterator[bytes]:
        """The stored bytes of a tensor that `load` returned, a chunk at a time."""
        with open(entry.file, "rb") as file:
            file.seek(entry.start)
            for start in range(entry.start, entry.end, CHUNK):
                yield file.read(min(CHUNK, entry.end - start))

    def store(self, key: str, tensors: dict[str, Tensor], record: dict[str, object]) -> None:
        """Keep torch `tensors` (contiguous, CPU) and a JSON `record`, durably, under `key`."""
        from safetensors.torch import save_file

        record = json.loads(canonical_json(record))  # as it is read again
        described = _of_each(_described, tensors)
        kept = {"record": record, "sha256": _seal(key, described, record)}
        path = self.folder / f"{key}.safetensors"
        scratch = scratch_for(path)
        try:
            scratch.touch()  # by the umask, unlike what safetensors puts in its place
            mode = scratch.stat().st_mode
            save_file(tensors, scratch, metadata={METADATA_KEY: canonical_json(kept).decode()})
            scratch.chmod(mode)
            settle(scratch, path)
        except BaseException:
            scratch.unlink(missing_ok=True)
            raise
        fsync_folder(self.folder)

    def _described(self, entry: TensorEntry) -> list[object]:
        digest = hashlib.sha256()
        for chunk in self.read_bytes(entry):
            digest.update(chunk)
        return [TORCH_NAMES[entry.dtype], list(entry.shape), digest.hexdigest()]


def _of_each(
    describe: Callable[[Value], list[object]], named: Mapping[str, Value]
) -> dict[str, list[object]]:
    """What `describe` finds of each value, by name: digests of large ones take their time."""
    with ThreadPoolExecutor() as pool:
        return dict(zip(named, pool.map(describe, named.values()), strict=True))


def _described(tensor: Tensor) -> list[object]:
    """Dtype, shape and SHA-256 of a tensor that is stored."""
    import torch

    digest = hashlib.sha256(tensor.view(-1).view(torch.uint8).numpy().data).hexdigest()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), digest]


def _seal(key: str, tensors: dict[str, list[object]], record: dict[str, object]) -> str:
    """SHA-256 of the contents and the name of a journal's file: changes and swaps show."""
    return hashlib.sha256(canonical_json([key, tensors, record])).hexdigest()


def headers_digest(source: Source) -> str:
    """SHA-256 of a checkpoint's configuration and of its tensors' names, dtypes and shapes."""
    headers = [[e.name, e.dtype, e.shape, e.file.name] for e in source.entries.values()]
    return hashlib.sha256(canonical_json([source.config, headers])).hexdigest()


def versions() -> dict[str, str]:
    """Of everything that determines the bytes of an output."""
    libraries = {name: version(name) for name in ("torch", "transformers")}
    return {"blr": __version__, **libraries, "python": platform.python_version()}


def changes(left: dict[str, object], now: dict[str, object], prefix: str = "") -> list[str]:
    """Name the settings that differ between two fingerprints; of two commands' runs, the commands."""
    before, after = (next((COMMANDS[k] for k in COMMANDS if k in run), None) for run in (left, now))
    if not prefix and before != after:
        return [f"command was {before}, now {after}"]
    found = []
    for key in {**left, **now}:
        was, is_now = left.get(key), now.get(key)
        if type(was) is dict and type(is_now) is dict:
            found += changes(was, is_now, f"{prefix}{key}.")
        elif was != is_now:
            digests = all(map(is_digest, [*_several(was), *_several(is_now)]))
            said = "has changed" if digests else f"was {_short(was)}, now {_short(is_now)}"
            found.append(f"{prefix}{key} {said}")
    return found


def _several(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def _short(value: object) -> str:
    if value is None or is_digest(value):
        return "none" if value is None else f"{str(value)[:12]}..."
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
