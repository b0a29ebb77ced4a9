"""Reads and writes tables of measured kernels, with checks; a file is written whole or not at all."""

from __future__ import annotations

import os
import stat
import warnings
from importlib.resources import files
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from blr.compressor.base.device import Dtype
from blr.compressor.base.disk import write_probe, write_stream
from blr.compressor.base.errors import BlrError, OutputError, UsageError
from blr.compressor.base.exhaustion import storage_errors
from blr.compressor.recipe.yaml_file import MAX_BYTES, validate
from blr.kernels.common.names import FOLDERS

Scalar = int | float | bool | str
Bounds = tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]]
RANGES = ("inputs", "outputs", "features", "blocks", "rank", "n")
# Of tables of earlier versions, read and not used
FORMER = ("fp8", "fp8_dense", "fp8_lowrank", "fp8_monarch", "fp8_blast", "token", "forward")
HEADER = "# Kernel variants measured by `blr tune`; format: kernels/common/tables.py.\n"


if TYPE_CHECKING:
    Kind = str
else:
    Kind = Literal[(*FOLDERS.values(), *FORMER)]


class TunedRule(BaseModel):
    """One rule; a condition that is left out holds for everything. See `kernels/common/tables.py`."""

    model_config = ConfigDict(extra="forbid")

    structure: Kind
    dtype: Dtype | list[Dtype] | None = None
    inputs: Bounds | None = None
    outputs: Bounds | None = None
    features: Bounds | None = None
    blocks: Bounds | None = None
    rank: Bounds | None = None
    n: Bounds | None = None
    variant: Annotated[str, Field(pattern=r"^[a-z_0-9]+$")]
    config: dict[str, Scalar | dict[str, Scalar]] = {}

    @model_validator(mode="after")
    def _ordered(self) -> TunedRule:
        for name in RANGES:
            bounds = getattr(self, name)
            if bounds is not None and bounds[0] > bounds[1]:
                raise ValueError(f"found {name} from {bounds[0]} to {bounds[1]}, expected [least, most]")
        return self


class TunedTable(BaseModel):
    """The rules of one GPU, the most specific first, and where they come from."""

    model_config = ConfigDict(extra="forbid")

    gpu: str
    source: str
    rules: list[TunedRule]


def user_table(gpu: str) -> Path:
    """The file in which `blr tune` keeps a GPU's table: in BLR_TUNED_DIR, else in the user's cache
    folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = os.environ.get("BLR_TUNED_DIR") or f"{cache}/blr/tuned"
    return Path(os.path.expanduser(folder)) / f"{gpu}.yaml"


def shipped_table(gpu: str) -> Path:
    """The table of a GPU in configs/tuned/, which may not exist."""
    return Path(str(files("blr.configs"))) / "tuned" / f"{gpu}.yaml"


def shipped_gpus() -> list[str]:
    """The keys of the GPUs with a shipped table, sorted."""
    return sorted(path.stem for path in shipped_table("any").parent.glob("*.yaml"))


def read_table(path: Path) -> list[dict[str, object]]:
    """The rules in `path`; [] if there is no such file. Raises RecipeError if it is no table."""
    if not os.path.exists(path):
        return []
    table = validate(path, TunedTable)
    return [rule.model_dump(exclude_none=True, exclude_defaults=True) for rule in table.rules]


def measured_rules(gpu: str) -> list[dict[str, object]]:
    """The rules for a GPU, the user's before the shipped ones. A user's table that cannot be read gives
    a warning."""
    rules = []
    try:
        rules += read_table(user_table(gpu))
    except BlrError as error:
        warnings.warn(f"tuned kernels: {error}", stacklevel=2)
    return rules + read_table(shipped_table(gpu))


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
        write_probe(path.parent)
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
    from ruamel.yaml import YAML
    from ruamel.yaml.comments import CommentedMap

    rules = [CommentedMap(rule) for rule in table["rules"]]
    for rule in rules:
        rule.fa.set_flow_style()
    writer, out = YAML(), StringIO()
    writer.width = MAX_BYTES
    writer.representer.ignore_aliases = lambda _: True  # readers take none
    writer.indent(mapping=2, sequence=4, offset=2)
    writer.dump({**table, "rules": rules}, out)
    return out.getvalue()
