"""The modeling files shipped inside a checkpoint, so that it loads where `blr` is not installed.

They are the package's own modules with imports rewritten to flat siblings: constant bytes for a
version of `blr`, whatever the model (its layer names live only in `config.json`). Shipped is what
the two modules that `auto_map` names import, at the top or inside functions, and what that imports:
``blr.kernels.blast.op`` becomes ``blast_op_blr.py``.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from pprint import pformat

from blr.compressor.tuned_table import read_table, shipped_gpus, shipped_table

# What transformers imports by name (`auto_map`).
ROOTS = ("blr.compressor.modeling.configuration_blr", "blr.compressor.modeling.modeling_blr")
# The same of an export.
EXPORT_ROOTS = (ROOTS[0], "blr.compressor.modeling.exported")
# What else may be shipped beside the kernels; everything in the kernel folders may.
SHIPPED = {
    *ROOTS,
    "blr.compressor.errors",
    "blr.compressor.modeling.captured",
    "blr.compressor.modeling.exported",
    "blr.compressor.modeling.fused",
    "blr.compressor.modeling.physical",
    "blr.compressor.modeling.quantized",
    "blr.compressor.modeling.requests",
    "blr.compressor.modeling.settings",
    "blr.compressor.modeling.shared",
    "blr.compressor.modeling.layers",
    "blr.compressor.structures.specs",
}
KERNELS, RUNTIME = "blr.kernels.", "blr.compressor.runtime."
TUNED = "blr.kernels.common.tuned"  # reads YAML files that a checkpoint has not
_IMPORT = re.compile(r"^([ \t]*)from (blr\.[\w.]+) import", re.MULTILINE)
_TUNED_TEXT = '''"""Measured kernel tables, as shipped with this version of blr in configs/tuned/."""

from __future__ import annotations

from functools import cache
from typing import Any

TABLE: dict[str, list[dict[str, Any]]] = {table}


@cache
def tuned_rules(gpu: str) -> list[dict[str, Any]]:
    """Rules for a GPU by its key; [] if nobody measured it."""
    return TABLE.get(gpu, [])
'''


@cache
def vendored_files(roots: tuple[str, ...] = ROOTS) -> dict[str, bytes]:
    """File name to contents of everything `from_pretrained(..., trust_remote_code=True)` runs.

    Args:
        roots: modules that `auto_map` names: `ROOTS`, or `EXPORT_ROOTS`.

    Raises KeyError when a shipped module imports one of ours that is neither in `SHIPPED` nor a kernel.
    """
    found: dict[str, bytes] = {}
    waiting = list(roots)
    while waiting:
        module = waiting.pop()
        name = f"{flat_name(module)}.py"
        if name not in found:
            text = _tuned_text() if module == TUNED else _source(module)
            waiting += [match[2] for match in _IMPORT.finditer(text)]
            found[name] = flatten(text).encode()
    return dict(sorted(found.items()))


def flat_name(module: str) -> str:
    """The name inside a checkpoint of one of our modules. Raises KeyError for one not shipped."""
    if module.startswith(KERNELS) and module.count(".") == 3:
        return module.removeprefix(KERNELS).replace(".", "_") + "_blr"
    if module.startswith(RUNTIME):
        return f"runtime_{module.removeprefix(RUNTIME)}_blr"
    if module not in SHIPPED:
        raise KeyError(f"a shipped module imports {module}, which is not shipped")
    return f"{module.rpartition('.')[2].removesuffix('_blr')}_blr"


def flatten(text: str) -> str:
    """`text` with imports of our modules, indented or not, turned into imports of siblings."""
    return _IMPORT.sub(lambda match: f"{match[1]}from .{flat_name(match[2])} import", text)


def _source(module: str) -> str:
    package, _, name = module.rpartition(".")
    return files(package).joinpath(f"{name}.py").read_text("utf-8")


def _tuned_text() -> str:
    table = {gpu: read_table(shipped_table(gpu)) for gpu in shipped_gpus()}
    return _TUNED_TEXT.replace("{table}", pformat(table, width=100, sort_dicts=False))
