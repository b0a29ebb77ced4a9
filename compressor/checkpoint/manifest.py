"""The manifest of an output: every file's size and SHA-256, and where the output came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from blr.compressor.checkpoint.disk import sha256_file
from blr.compressor.errors import OutputError

MANIFEST = "blr_manifest.json"
FORMAT = 1


def build_manifest(files: dict[str, tuple[int, str]], **facts: Any) -> bytes:
    """The manifest as JSON text. `files` maps names to (bytes, SHA-256); no times, no paths."""
    listed = {name: {"size": size, "sha256": sha} for name, (size, sha) in sorted(files.items())}
    return json.dumps({"format": FORMAT, "files": listed, **facts}, indent=2).encode() + b"\n"


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of an output of ours.

    Raises OutputError when `folder` carries none that this version can read.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        if manifest["format"] == FORMAT and isinstance(manifest["files"], dict):
            return manifest
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    raise OutputError(
        f"{path}: missing or not a manifest of format {FORMAT}; the folder was not written by blr"
    )


def verify_files(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """What differs between the folder and its manifest, one line a file; empty when nothing."""
    listed = manifest["files"]
    problems = [f"{name}: {problem}" for name in listed if (problem := _check(folder, name, listed))]
    present = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    extra = sorted(present - set(listed) - {MANIFEST})
    return problems + [f"{name}: not listed in the manifest" for name in extra]


def _check(folder: Path, name: str, listed: dict[str, Any]) -> str | None:
    path = folder / name
    if not path.is_file():
        return "missing"
    size = path.stat().st_size
    if size != listed[name]["size"]:
        return f"{size} bytes, expected {listed[name]['size']}"
    found = sha256_file(path)
    if found != listed[name]["sha256"]:
        return f"SHA-256 {found}, expected {listed[name]['sha256']}"
    return None
