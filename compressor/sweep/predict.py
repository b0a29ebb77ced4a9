"""Predicted speed of a point, from headers alone."""

from __future__ import annotations

from blr.compressor.checkpoint.source import Source
from blr.compressor.errors import BlrError
from blr.compressor.planning.plan import make_plan
from blr.compressor.planning.roofline import DECODE, Gpu, dense_time, layer_time
from blr.compressor.recipe.schema import Recipe


def tokens_per_second(source: Source, recipe: Recipe, gpu: Gpu, calibrated: bool) -> float | None:
    """Of one sequence, by the rooflines of its weights' products: a ceiling, attention and norms left
    out. None where the recipe cannot be planned."""
    try:
        plan = make_plan(source, recipe, calibrated=calibrated)
    except BlrError:
        return None
    times = [layer_time(planned.spec, DECODE, gpu, launch=False) for planned in plan.layers]
    for kept in plan.kept:
        o, i = kept.layer.shape
        times.append(dense_time(i, o, DECODE, gpu, launch=False))
    return 1e6 / (sum(times) + _head(source, gpu))


def _head(source: Source, gpu: Gpu) -> float:
    """Microseconds of the product with the vocabulary."""
    words, width = (source.config.get(name) for name in ("vocab_size", "hidden_size"))
    if not isinstance(words, int) or not isinstance(width, int):
        return 0.0
    return dense_time(width, words, DECODE, gpu, launch=False)
