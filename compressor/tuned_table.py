"""The file format of measured kernel tables: read with checks, written at once or not at all."""

from __future__ import annotations

import json
import os
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from blr.compressor.checkpoint.disk import storage_errors, write_stream
from blr.compressor.errors import UsageError
from blr.compressor.recipe_file import MAX_BYTES, validate

Scalar = int | float | bool | str
Bounds = tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]]
DType = Literal["float16", "bfloat16", "float32"]
RANGES = ("inputs", "outputs", "features", "blocks", "rank", "n")
HEADER = "# Kernel variants measured by `blr tune`; format: kernels/common/tables.py.\n"


class TunedRule(BaseModel):
    """One rule; conditions left out hold for everything. See `kernels/common/tables.py`."""

    model_config = ConfigDict(extra="forbid")

    structure: Literal["lowrank", "monarch", "blast", "kronecker", "token"]
    dtype: DType | list[DType] | None = None
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
    """Where `blr tune` keeps the table of a GPU: BLR_TUNED_DIR, else the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = os.environ.get("BLR_TUNED_DIR") or f"{cache}/blr/tuned"
    return Path(folder).expanduser() / f"{gpu}.yaml"


def shipped_table(gpu: str) -> Path:
    """The table of a GPU in configs/tuned/, which need not exist."""
    return Path(str(files("blr.configs"))) / "tuned" / f"{gpu}.yaml"


def shipped_gpus() -> list[str]:
    """Keys of the GPUs with a shipped table, sorted."""
    return sorted(path.stem for path in shipped_table("any").parent.glob("*.yaml"))


def read_table(path: Path) -> list[dict[str, Any]]:
    """The rules in `path` as plain data; [] when there is no such file.

    Raises RecipeError, one line with file, line and key, for anything else than a table.
    """
    if not path.exists():
        return []
    table = validate(path, TunedTable)
    return [rule.model_dump(exclude_none=True, exclude_defaults=True) for rule in table.rules]


def table_text(gpu: str, source: str, rules: list[dict[str, Any]]) -> str:
    """A table as YAML, a rule a line.

    Raises UsageError for more rules than a reader takes; ValueError for a rule that is none.
    """
    TunedTable(gpu=gpu, source=source, rules=[TunedRule(**rule) for rule in rules])
    lines = [HEADER, f"gpu: {_flow(gpu)}\n", f"source: {_flow(source)}\n", "rules:\n"]
    lines += [f"  - {_flow(rule)}\n" for rule in rules]
    text = "".join(lines) if rules else "".join(lines).replace("rules:\n", "rules: []\n")
    if len(text.encode()) > MAX_BYTES:
        raise UsageError(
            f"table of {gpu}: found {len(rules)} rules of {len(text.encode())} bytes, expected at most "
            f"{MAX_BYTES}; tune fewer shapes or write to another file"
        )
    return text


def write_table(path: Path, text: str) -> None:
    """Write `text` to `path` by a rename, making its folder. Raises OutputError or StorageError."""
    with storage_errors(path.parent):
        write_stream(path, [text.encode()])


def _flow(value: Any) -> str:
    """`value` in YAML's flow style; texts of other than plain characters in quotes."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(held)}" for key, held in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value if value.isidentifier() and value not in _WORDS else json.dumps(value)
    return str(value)


_WORDS = {"true", "True", "TRUE", "false", "False", "FALSE", "null", "Null", "NULL"}
