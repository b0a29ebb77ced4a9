"""Reads tables of measured kernels, with checks; `blr tune` writes them."""

from __future__ import annotations

import os
import warnings
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from blr.compressor.base.device import Dtype
from blr.compressor.base.errors import BlrError
from blr.compressor.recipe.yaml_file import validate
from blr.kernels.common.names import FOLDERS

Scalar = int | float | bool | str
Bounds = tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]]
RANGES = ("inputs", "outputs", "features", "blocks", "rank", "n")
# Of tables of earlier versions, read and not used
FORMER = ("fp8", "fp8_dense", "fp8_lowrank", "fp8_monarch", "fp8_blast", "token", "forward")


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
    """The file of a GPU's table by `blr tune`: in BLR_TUNED_DIR, else in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = os.environ.get("BLR_TUNED_DIR") or f"{cache}/blr/tuned"
    return Path(os.path.expanduser(folder)) / f"{gpu}.yaml"


def shipped_table(gpu: str) -> Path:
    """The table of a GPU in configs/tuned/, which may not exist."""
    return Path(str(files("blr.configs"))) / "tuned" / f"{gpu}.yaml"


def read_table(path: Path) -> list[dict[str, object]]:
    """The rules in `path`; [] if there is no such file. Raises RecipeError if it is no table."""
    if not os.path.exists(path):
        return []
    table = validate(path, TunedTable)
    return [rule.model_dump(exclude_none=True, exclude_defaults=True) for rule in table.rules]


def measured_rules(gpu: str) -> list[dict[str, object]]:
    """The rules for a GPU, the user's before the shipped ones; warns of a user's that cannot be read."""
    rules = []
    try:
        rules += read_table(user_table(gpu))
    except BlrError as error:
        warnings.warn(f"tuned kernels: {error}", stacklevel=2)
    return rules + read_table(shipped_table(gpu))
