"""Chooses in what form a model is the best draft of itself: many tokens a second of the two together."""

from math import sqrt

from blr.compressor.base.errors import UsageError
from blr.compressor.checkpoint.source import Source
from blr.compressor.planning.pace import times_as_fast
from blr.compressor.planning.roofline import chosen_gpu
from blr.compressor.planning.speed import dense_speed, predicted
from blr.compressor.recipe.schema import DENSE, PACED, Recipe, make_recipe

# Forms, and the divergence from the dense model in nats a token behind healing: of SmolLM2, eight
# minutes (LOG, 2026-11-26). int8 and int4 are estimates.
FORMS: tuple[tuple[dict[str, object], float], ...] = (
    ({"method": DENSE, "quantize": "int8"}, 0.001),
    ({"method": DENSE, "quantize": "int4"}, 0.03),
    ({"method": DENSE, "quantize": "int3"}, 0.135),
    ({"method": "svd", "base": "int3", "rank": 16}, 0.110),
    ({"method": DENSE, "quantize": "int2"}, 0.361),
    ({"method": "svd", "base": "int2", "rank": 16}, 0.281),
)
SPREAD = 0.6  # total variation over its bound by the divergence (LOG, 2026-11-27: .57 to .62)
MOST = 7  # drafts of a round


def accepted_share(kl: float) -> float:
    """The share of drafts that a model accepts whose draft is `kl` nats a token away: one less their
    total variation, which is at most the root of half the divergence (Pinsker)."""
    return 1 - SPREAD * sqrt(kl / 2)


def draft_form(source: Source, recipe: Recipe, calibrated: bool) -> tuple[Recipe, str]:
    """`recipe` in the form that is predicted to be the best draft on its GPU, and a line about it.
    Raises UsageError if a form was asked for, or nothing can be planned."""
    given = recipe.model_dump(exclude_unset=True)
    if asked := sorted(given.keys() & {"method", "tokens_per_second", *PACED}):
        raise UsageError(f"--for-draft chooses the form; leave out {', '.join(asked)}")
    gpu, best = chosen_gpu(recipe.gpu)[0], (0.0, recipe, "")
    for settings, kl in FORMS:
        tried = make_recipe(**given, **settings)
        cost = dense_speed(source, tried, gpu) / predicted(source, tried, gpu, calibrated)
        share = accepted_share(kl)
        fast, drafts = max((times_as_fast(share, k, cost), k) for k in range(1, MOST + 1))
        name = " ".join(f"{key} {value}" for key, value in settings.items())
        said = f"draft: {name}; predicted: {share:.2f} of drafts accepted, {fast:.2f} times as fast as "
        said += f"the dense model alone, with {drafts} drafts a round on {gpu.name}"
        best = max(best, (fast, tried, said), key=lambda found: found[0])
    return best[1:]
