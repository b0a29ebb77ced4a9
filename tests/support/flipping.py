"""Flips bits of files one at a time and asks `verify` about each."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from blr.compressor.base.errors import OutputError, VerifyError
from blr.compressor.workspace.manifest import MANIFEST, read_manifest, verify_listed, verify_manifest

FLIPS = 16  # in each file


def every_flip_is_found(output: Path) -> None:
    """Asserts that the manifest lists every file and that each flip of each file is found."""
    listed = read_manifest(output)["files"]
    assert verify_manifest(output) == len(listed)
    files = {str(path.relative_to(output)) for path in output.rglob("*") if path.is_file()}
    assert files == {*listed, MANIFEST}
    for name in sorted(files):
        for damaged in flipped(output / name):
            if name == MANIFEST:
                with pytest.raises((VerifyError, OutputError)):
                    verify_manifest(output)
            else:
                found = verify_listed(output, {"files": {name: listed[name]}})
                assert found and found[0].startswith(f"{name}: SHA-256 "), damaged
    assert verify_manifest(output) == len(listed)


def flipped(path: Path) -> Iterator[str]:
    """Puts `FLIPS` versions of a file in its place, one bit of each another; then the file again."""
    whole = path.read_bytes()
    for bit in random.Random(path.name).sample(range(8 * len(whole)), min(FLIPS, 8 * len(whole))):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        yield f"{path.name}: bit {bit}"
    path.write_bytes(whole)
