"""A recipe: what to do with a checkpoint, validated before anything is read."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from blr.compressor.errors import UsageError

Method = Literal["svd", "monarch", "blast", "ks"]
Dtype = Literal["float32", "float16", "bfloat16"]
DEFAULT_BLOCKS = {"monarch": 4, "blast": 16}
SOLVERS: dict[str, tuple[str, ...]] = {  # the default first
    "svd": ("closed-form",),
    "monarch": ("varpro",),
    "blast": ("varpro", "precgd"),
    "ks": ("hierarchical",),
}


class Recipe(BaseModel):
    """The settings of one compression.

    Attributes:
        method: structured family of the replaced layers.
        cf: compression factor, dense over structured parameters of the replaced layers.
        rank: fixed rank instead of one that follows from `cf`.
        blocks: number of blocks b of Monarch and BLAST.
        pattern: Kronecker-sparse chain, "butterfly", or None to choose one.
        solver, rounds: how to fit; None takes the family's default.
        include, exclude: globs over module names; include also admits heads.
        dtype: stored dtype of the factors; None keeps that of each weight.
        seed: of the solvers that start from random numbers.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    method: Method = "svd"
    cf: Annotated[float, Field(gt=1.0, allow_inf_nan=False)] = 2.0
    rank: Annotated[int, Field(ge=1)] | None = None
    blocks: Annotated[int, Field(ge=1)] | None = None
    pattern: str | None = None
    solver: str | None = None
    rounds: Annotated[int, Field(ge=0)] | None = None
    include: list[str] = []
    exclude: list[str] = []
    dtype: Dtype | None = None
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _solver_belongs_to_method(self) -> Self:
        if self.solver is not None and self.solver not in SOLVERS[self.method]:
            known = ", ".join(SOLVERS[self.method])
            raise ValueError(f"solver {self.solver!r} is not one of {self.method}'s: {known}")
        return self

    @property
    def target_blocks(self) -> int:
        """Blocks asked for, or the family's default."""
        return self.blocks or DEFAULT_BLOCKS.get(self.method, 1)


def make_recipe(**settings: object) -> Recipe:
    """Validate settings given one by one, as on the command line.

    Raises UsageError naming the setting, what it is and what it must be.
    """
    try:
        return Recipe(**settings)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        what = f"{where} is {first['input']!r}: " if where else ""
        message = first["msg"].removeprefix("Value error, ")
        raise UsageError(f"{what}{message}; see `blr compress --help`") from None
