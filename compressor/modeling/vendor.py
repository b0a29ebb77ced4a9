"""The modeling files shipped inside a checkpoint, so that it loads where `blr` is not installed.

They are the package's own modules with imports rewritten to flat siblings: constant bytes for a
version of `blr`, whatever the model (its layer names live only in `config.json`).
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

# Name inside the checkpoint -> module of this package.
SHIPPED = {
    "configuration_blr": "blr.compressor.modeling.configuration_blr",
    "modeling_blr": "blr.compressor.modeling.modeling_blr",
    "layers_blr": "blr.compressor.modeling.layers",
    "specs_blr": "blr.compressor.structures.specs",
    "lowrank_blr": "blr.kernels.lowrank.reference",
    "monarch_blr": "blr.kernels.monarch.reference",
    "blast_blr": "blr.kernels.blast.reference",
    "kronecker_blr": "blr.kernels.kronecker.reference",
}
_IMPORT = re.compile(r"^from (blr\.[\w.]+) import", re.MULTILINE)


@cache
def vendored_files() -> dict[str, bytes]:
    """File name to contents of everything `from_pretrained(..., trust_remote_code=True)` runs.

    Raises KeyError when a shipped module imports one of ours that is not shipped.
    """
    return {f"{name}.py": _flatten(module).encode() for name, module in SHIPPED.items()}


def _flatten(module: str) -> str:
    flat = {source: name for name, source in SHIPPED.items()}
    package, _, name = module.rpartition(".")
    text = files(package).joinpath(f"{name}.py").read_text("utf-8")
    return _IMPORT.sub(lambda match: f"from .{flat[match[1]]} import", text)
