"""Finds a checkpoint: a local folder, a short name, or a hub repository."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from blr.compressor.checkpoint.disk import FULL
from blr.compressor.errors import HubError, InputError, StorageError, UsageError
from blr.compressor.families import short_names
from blr.compressor.recipe import Recipe

PATTERNS = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.bin"]


@dataclass(frozen=True)
class Found:
    """A checkpoint's folder, the name to record for it and its hub commit, if any."""

    folder: Path
    name: str
    revision: str | None = None


def resolve_model(
    model: str, *, revision: str | None = None, offline: bool = False, weights: bool = True
) -> Found:
    """The local folder of `model`, downloaded if it is a hub id and not yet in the cache.

    Without `weights` no more than its config.json is downloaded.

    Raises:
        UsageError: a revision of a local folder.
        InputError: neither an existing folder nor the form of a hub id.
        HubError: the hub cannot be reached, refuses, or has no such repository.
        StorageError: the hub's cache is full.
    """
    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"  # for every library that is imported from here on
    folder = Path(model).expanduser()
    if folder.exists():
        if revision is not None:
            raise UsageError(f"--revision {revision}: {model} is a local folder; only the hub has them")
        return Found(folder, folder.resolve().name)
    repository = short_names().get(model.lower(), model)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository) or model.startswith((".", "/", "~")):
        raise InputError(
            f"{model}: no such folder; expected a checkpoint folder, a hub id (owner/name) or one of "
            f"the short names {', '.join(sorted(short_names()))}"
        )
    patterns = PATTERNS if weights else ["config.json"]
    return _download(repository, revision, offline or _offline(), patterns)


def default_output(model: str, recipe: Recipe) -> Path:
    """``<name>-<method>-cf<cf>`` in the current folder."""
    name = Path(os.path.abspath(Path(model).expanduser())).name
    return Path(f"{name}-{recipe.method}-cf{recipe.cf:g}")


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def _download(repository: str, revision: str | None, offline: bool, patterns: list[str]) -> Found:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            repository, revision=revision, allow_patterns=patterns, local_files_only=offline
        )
    except Exception as error:  # the hub client raises its own, httpx's and the system's errors
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        if getattr(error, "errno", None) in FULL:
            remedy = "free or enlarge the disk of the hub's cache (HF_HOME), then run again"
            raise StorageError(f"{repository}: {reason}; {remedy}") from error
        remedy = (
            "it is not in the local cache: run once without --offline, or give a local folder"
            if offline
            else "check the name, the network and `hf auth login`, or give a local folder"
        )
        raise HubError(f"{repository}: {type(error).__name__}: {reason}; {remedy}") from error
    return Found(Path(folder), repository, Path(folder).name)
