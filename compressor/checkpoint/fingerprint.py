"""What runs of every command must agree on to finish each other's work: source and versions."""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import version

from blr.compressor import __version__
from blr.compressor.checkpoint.journal import canonical_json
from blr.compressor.checkpoint.source import Source


def headers_digest(source: Source) -> str:
    """SHA-256 of a checkpoint's configuration and of its tensors' names, dtypes and shapes."""
    headers = [[e.name, e.dtype, e.shape, e.file.name] for e in source.entries.values()]
    return hashlib.sha256(canonical_json([source.config, headers])).hexdigest()


def versions() -> dict[str, str]:
    """Of everything that determines the bytes of an output."""
    return {
        "blr": __version__,
        "torch": version("torch"),
        "transformers": version("transformers"),
        "python": platform.python_version(),
    }
