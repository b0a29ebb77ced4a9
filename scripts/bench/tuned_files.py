"""Writes tables of measured kernels, with checks; a file is written whole or not at all."""

from __future__ import annotations

import os
import stat
from io import StringIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from blr.compressor.base.disk import write_stream
from blr.compressor.base.errors import OutputError, UsageError
from blr.compressor.base.exhaustion import storage_errors
from blr.compressor.recipe.tuned_table import TunedRule, TunedTable, read_table
from blr.compressor.recipe.yaml_file import MAX_BYTES

HEADER = "# Kernel variants measured by `blr tune`; format: kernels/common/tables.py.\n"


def table_text(gpu: str, source: str, rules: list[dict[str, Any]]) -> str:
    """A table as YAML, a rule a line. Raises UsageError for too many rules, ValueError for an invalid
    one."""
    TunedTable(gpu=gpu, source=source, rules=[TunedRule(**rule) for rule in rules])
    text = HEADER + _yaml({"gpu": gpu, "source": source, "rules": rules})
    if len(text.encode()) > MAX_BYTES:
        raise UsageError(
            f"table of {gpu}: found {len(rules)} rules of {len(text.encode())} bytes, expected at most "
            f"{MAX_BYTES}; tune fewer shapes or write to another file"
        )
    return text


def check_table(path: Path) -> None:
    """Check that `path` can be written: it is absent, or a table of ours. Raises OutputError or
    RecipeError."""
    if path == Path() or path.is_dir():
        raise OutputError(f"{path}: a folder; expected the name of a YAML file, give another --output")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=path.parent).close()
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise OutputError(
            f"{path}: {path.parent} cannot be written to ({reason}); give another --output"
        ) from error
    if not os.path.lexists(path):
        return
    plain = stat.S_ISREG(os.lstat(path).st_mode)
    first, *rest = (path.read_bytes()[:MAX_BYTES] if plain else b"").splitlines(keepends=True) or [b""]
    if first != HEADER.encode() or any(line.lstrip().startswith(b"#") for line in rest):
        raise OutputError(
            f"{path}: in the way, not a table as `blr tune` wrote it; move it away, or give another "
            "--output"
        )
    read_table(path)


def write_table(path: Path, text: str) -> None:
    """Write `text` to `path` by renaming a finished file; its folder is made. Raises OutputError or
    StorageError."""
    with storage_errors(path.parent):
        write_stream(path, [text.encode()])


def _yaml(table: dict[str, Any]) -> str:
    """A mapping of texts and lists as YAML, an item a line."""
    rules = [CommentedMap(rule) for rule in table["rules"]]
    for rule in rules:
        rule.fa.set_flow_style()
    writer, out = YAML(), StringIO()
    writer.width = MAX_BYTES
    writer.representer.ignore_aliases = lambda _: True  # readers take none
    writer.indent(mapping=2, sequence=4, offset=2)
    writer.dump({**table, "rules": rules}, out)
    return out.getvalue()
