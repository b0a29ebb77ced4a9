"""A folder that stands in for a repository on the hub whose weights are fetched as they are read."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from blr.compressor.base.disk import write_stream
from blr.compressor.base.errors import HubError, OutputError
from blr.compressor.checkpoint.extras import MODULES
from blr.compressor.checkpoint.header import MAX_HEADER_BYTES
from blr.compressor.checkpoint.regular import read_whole
from blr.compressor.checkpoint.remedies import storage_errors
from blr.compressor.checkpoint.remote import STANDING_IN, RemoteShard
from blr.compressor.checkpoint.source import read_index

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHTS = ".safetensors", ".bin"
WHOLE = [f"*/*{suffix}" for suffix in WEIGHTS]  # of modules beside the model
REMEDY = "download it: leave out --stream, and set HF_HOME to a disk with room"


def stand_in(repository: str, revision: str | None, patterns: list[str]) -> tuple[Path, str]:
    """The folder, with all but the weights of the model, and the commit.

    Raises:
        HubError: a repository without safetensors. InputError: an index of other than plain names.
        What the hub's client raises.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HOME

    small = [pattern for pattern in patterns if not pattern.endswith(WEIGHTS)]
    snapshot = Path(snapshot_download(repository, revision=revision, allow_patterns=small))
    if (snapshot / MODULES).is_file():
        snapshot_download(repository, revision=snapshot.name, allow_patterns=WHOLE)
    folder = Path(HF_HOME) / "blr-standing-in" / repository.replace("/", "--") / snapshot.name
    shards = _shards(repository, snapshot)
    for path in (path for path in snapshot.rglob("*") if path.is_file()):
        name = path.relative_to(snapshot)
        if name.suffix not in WEIGHTS or len(name.parts) > 1:  # the cache may have some of them
            _put(folder / name, path.read_bytes())
    for shard in shards:
        _put(folder / shard.name, _header(shard))
        STANDING_IN[folder / shard.name] = shard
    return folder, snapshot.name


def _shards(repository: str, snapshot: Path) -> list[RemoteShard]:
    from huggingface_hub import HfApi, hf_hub_url
    from huggingface_hub.hf_api import RepoFile

    index = snapshot / INDEX
    names = sorted(set(read_index(index, ".safetensors").values())) if index.exists() else [SINGLE]
    listed = HfApi().get_paths_info(repository, names, revision=snapshot.name)
    files = {file.path: file for file in listed if isinstance(file, RepoFile)}
    if missing := [name for name in names if name not in files]:
        raise HubError(f"{repository}: found no {missing[0]}, expected it to be streamed; {REMEDY}")
    made = []
    for name in names:
        lfs, url = files[name].lfs, hf_hub_url(repository, name, revision=snapshot.name)
        made.append(RemoteShard(url, name, files[name].size, lfs.sha256 if lfs else None))
    return made


def _header(shard: RemoteShard) -> bytes:
    """All of a shard before its tensors."""
    length = int.from_bytes(shard.fetch(0, min(8, shard.size)), "little")
    if length > min(MAX_HEADER_BYTES, shard.size - 8):
        found = f"found a header of {length} bytes, expected a safetensors file"
        raise HubError(f"{shard.name}: {found}; {REMEDY}")
    return bytes(shard.fetch(0, 8 + length))


def _put(path: Path, data: bytes) -> None:
    """Write a file whole, unless it is there: other processes of the run may read it.

    Raises OutputError where something else is: a commit's files never change.
    """
    with storage_errors(path.parent), suppress(FileExistsError):
        write_stream(path, [data], new=True)
    found = b"" if os.path.islink(path) else bytes(read_whole(path, max(len(data), 1)))
    if found != data:
        raise OutputError(f"{path}: in the way, not written by blr; move it away")
