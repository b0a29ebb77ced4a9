"""The manifest of an output: every file's size and SHA-256, and where the output came from."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from blr.compressor.checkpoint.disk import sha256_file
from blr.compressor.checkpoint.header import open_regular, parse_json, quote, read_exactly
from blr.compressor.errors import InputError, OutputError

MANIFEST = "blr_manifest.json"
FORMAT = 1
MAX_BYTES = 64 * 2**20


def build_manifest(files: dict[str, tuple[int, str]], **facts: Any) -> bytes:
    """The manifest as JSON text. `files` maps names to (bytes, SHA-256); no times, no paths."""
    listed = {name: {"size": size, "sha256": sha} for name, (size, sha) in sorted(files.items())}
    return json.dumps({"format": FORMAT, "files": listed, **facts}, indent=2).encode() + b"\n"


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of an output of ours.

    Raises OutputError when `folder` carries none that this version can read, or one that no `blr`
    has written: file names that leave the folder, sizes and digests that are none.
    """
    path = folder / MANIFEST
    try:
        with open_regular(path) as file:
            size = min(os.fstat(file.fileno()).st_size, MAX_BYTES)
            manifest = parse_json(read_exactly(file, path, 0, size), path)
    except InputError:
        manifest = {}
    if _is_ours(manifest):
        return manifest
    raise OutputError(
        f"{path}: missing or not a manifest of format {FORMAT}; the folder was not written by blr"
    )


def _is_ours(manifest: dict[str, Any]) -> bool:
    files = manifest.get("files")
    if manifest.get("format") != FORMAT or type(files) is not dict:
        return False
    return all(_is_inside(name) and _is_listing(found) for name, found in files.items())


def _is_inside(name: str) -> bool:
    """Whether a listed name is a plain relative path below the folder."""
    parts = name.split("/")
    return name.isprintable() and "\\" not in name and not {"", ".", ".."} & set(parts)


def _is_listing(found: Any) -> bool:
    return (
        type(found) is dict
        and type(found.get("size")) is int
        and type(found.get("sha256")) is str
        and re.fullmatch(r"[0-9a-f]{64}", found["sha256"]) is not None
    )


def verify_files(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """What differs between the folder and its manifest, one line a file; empty when nothing."""
    listed = manifest["files"]
    present = {str(path.relative_to(folder)) for path in folder.rglob("*") if not _is_folder(path)}
    extra = sorted(present - set(listed) - {MANIFEST})
    unlisted = [f"{quote(name)[1:-1]}: not listed in the manifest" for name in extra]
    return verify_listed(folder, manifest) + unlisted


def verify_listed(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """`verify_files` without a look at files that the manifest does not list."""
    listed = manifest["files"]
    return [f"{name}: {problem}" for name in listed if (problem := _check(folder / name, listed[name]))]


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _check(path: Path, expected: dict[str, Any]) -> str | None:
    try:
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode):
            return "not a regular file"
        if status.st_size != expected["size"]:
            return f"{status.st_size} bytes, expected {expected['size']}"
        found = sha256_file(path)
    except OSError as error:
        return "missing" if isinstance(error, FileNotFoundError) else f"unreadable ({error.strerror})"
    return None if found == expected["sha256"] else f"SHA-256 {found}, expected {expected['sha256']}"
