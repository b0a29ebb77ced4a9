"""Compares an output of ours with its manifest before anything of it is used.

`blr verify` looks at all files of a folder; a loader looks at those it reads, and does not read twice
what it can hash on the way. A folder without a manifest (a dense checkpoint) passes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from blr.compressor.base.disk import sha256_file
from blr.compressor.base.errors import InputError, OutputError
from blr.compressor.checkpoint.header import TensorEntry, header_bytes
from blr.compressor.checkpoint.regular import inside, refuse
from blr.compressor.checkpoint.remote import remote_shard
from blr.compressor.checkpoint.source import Source
from blr.compressor.workspace.manifest import HEADER, MANIFEST, header_digest, read_manifest

Hashes = Literal["all", "small", "none"]  # of which files: every one, all but the shards, none
SHARD = ".safetensors"
# What loaders look at, and what is downloaded of a repository on the hub
READ = frozenset({SHARD, ".json", ".txt", ".model", ".jinja", ".tiktoken"})
THREADS = 4  # hashing more files at once waits for the disk
REMEDY = "copy or compress it again; `blr verify` lists all that differs"


def read_listed(folder: Path) -> dict[str, dict[str, Any]]:
    """What the manifest of `folder` lists of the files that loaders read; empty without a manifest.

    Raises InputError for a manifest that is damaged.
    """
    if not os.path.lexists(folder / MANIFEST):
        return {}
    try:
        files = read_manifest(folder)["files"]
    except OutputError as error:
        raise InputError(f"{error}; {REMEDY}") from None
    return {name: found for name, found in files.items() if Path(name).suffix in READ}


def check_listed(folder: Path, hashes: Hashes) -> None:
    """Compare the files of an output with its manifest: their sizes, the headers of shards, and the
    SHA-256 of those that `hashes` says.

    Raises InputError naming the first file that differs.
    """
    listed = read_listed(folder)
    for name, expected in listed.items():
        _check_outline(folder, name, expected)
    read = {n: e for n, e in listed.items() if hashes == "all" or (hashes == "small" and not _shard(n))}
    with ThreadPoolExecutor(min(THREADS, len(os.sched_getaffinity(0)))) as pool:
        paths = [folder / name for name in read]
        for (name, expected), found in zip(read.items(), pool.map(_sha256, paths), strict=True):
            _compare(folder / name, found, expected["sha256"])


class ShardDigests:
    """SHA-256 of the whole shards that a manifest or the hub lists, made from the bytes of their tensors
    as they are read in order."""

    def __init__(self, source: Source) -> None:
        self._listed = read_listed(source.folder)
        known = [path for path in source.shards if self._expected(path)]
        self._open = {path: hashlib.sha256(header_bytes(path)) for path in known}

    def _expected(self, path: Path) -> dict[str, str]:
        """What a shard should have, by who says so."""
        found = {}
        if (shard := remote_shard(path)) is not None and shard.sha256 is not None:
            found["the hub"] = shard.sha256
        if path.name in self._listed:
            found[MANIFEST] = self._listed[path.name]["sha256"]
        return found

    def update(self, entry: TensorEntry, piece: bytes | bytearray) -> None:
        """Take the next bytes of a shard, a part of `entry`; shards may be read at once."""
        if (digest := self._open.get(entry.file)) is not None:
            digest.update(piece)

    def check(self) -> None:
        """Raise InputError for a shard that is not what is listed."""
        for path, digest in self._open.items():
            for by, expected in self._expected(path).items():
                _compare(path, digest.hexdigest(), expected, by)


def _shard(name: str) -> bool:
    return name.endswith(SHARD)


def _check_outline(folder: Path, name: str, expected: Mapping[str, Any]) -> None:
    path = inside(folder, name)
    size = os.stat(path).st_size
    if size != expected["size"]:
        refuse(path, f"{size} bytes", f"{expected['size']} by {MANIFEST}", REMEDY)
    if HEADER in expected and header_digest(path) != expected[HEADER]:
        refuse(path, "another header", f"the one that {MANIFEST} lists", REMEDY)


def _sha256(path: Path) -> str:
    try:
        return sha256_file(path)
    except OSError as error:
        refuse(path, f"a read error ({error.strerror})", "a readable file", "check the disk")


def _compare(path: Path, found: str, expected: str, by: str = MANIFEST) -> None:
    if found != expected:
        refuse(path, f"SHA-256 {found}", f"{expected} by {by}", REMEDY)
