"""A recipe: what to do with a checkpoint, validated before anything is read."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from blr.compressor.errors import RecipeError

Method = Literal["svd", "monarch", "blast", "ks"]
Dtype = Literal["float32", "float16", "bfloat16"]
DEFAULT_BLOCKS = {"monarch": 4, "blast": 16}


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

    @property
    def target_blocks(self) -> int:
        """Blocks asked for, or the family's default."""
        return self.blocks or DEFAULT_BLOCKS.get(self.method, 1)


def make_recipe(**settings: object) -> Recipe:
    """Validate `settings`. Raises RecipeError naming the setting, what it is and what it must be."""
    try:
        return Recipe(**settings)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise RecipeError(
            f"{where} is {first.get('input')!r}: {first['msg'].lower()}; "
            f"see `blr compress --help` for what {where} may be"
        ) from None
