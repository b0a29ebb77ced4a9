"""Finds the factor of the layers that makes the whole model as many times smaller as asked."""

from blr.compressor.base.errors import UsageError
from blr.compressor.checkpoint.source import Source
from blr.compressor.planning.plan import Plan, make_plan
from blr.compressor.planning.speed import paced
from blr.compressor.recipe.schema import Recipe, make_recipe

TRIES, NEAR = 8, 0.01  # relative distance from the factor at which the search ends


def sized(source: Source, recipe: Recipe, calibrated: bool) -> tuple[Recipe, str]:
    """`recipe` with the sizes that its ``model_cf`` or ``tokens_per_second`` asks for, and a line about
    them. Raises UsageError if these cannot be reached, or nothing can be planned."""
    if recipe.model_cf is None:
        return paced(source, recipe, calibrated)
    wanted, cf, given = recipe.model_cf, recipe.model_cf, recipe.model_dump(exclude_unset=True)
    asked, factor = f"--model-cf {wanted:g}", 0.0
    for _ in range(TRIES):
        tried = make_recipe(**given | {"model_cf": None, "cf": round(cf, 4)})
        try:
            plan = make_plan(source, tried, calibrated=calibrated)
        except UsageError as error:
            raise UsageError(f"{asked} asks for --cf {cf:.4g} of the layers: {error}") from None
        factor, cf = _reached(plan, asked, wanted)
        if abs(factor / wanted - 1) <= NEAR:
            return tried, f"{asked}: --cf {tried.cf:g} of the layers, {factor:.3f} of the whole model"
    raise UsageError(
        f"{asked}: no --cf of the layers gives it, the nearest gives {factor:.3f}; take that"
    )


def _reached(plan: Plan, asked: str, wanted: float) -> tuple[float, float]:
    """The factor of the whole model, and that of the layers which is nearer to the `wanted` one."""
    if plan.whole is None:
        raise UsageError(f"{asked}: config.json alone tells no size of the whole model; give --cf")
    size, layers = plan.whole.nbytes, sum(planned.bits for planned in plan.layers) / 8
    stays = size - sum(planned.layer.entry.nbytes for planned in plan.layers)
    if size / wanted <= stays:
        raise UsageError(
            f"{asked} cannot be met: embeddings, head and what else stays dense take {stays:,} of "
            f"{size:,} bytes, so the factor stays below {size / stays:.4g}; lower it or"
            " --include lm_head"
        )
    kept, excess = sum(layer.parameters for layer in plan.kept), layers / (size / wanted - stays)
    parameters = kept + (plan.structured_parameters - kept) / excess
    return size / (stays + layers), max(plan.dense_parameters / parameters, 1.0001)
