"""Finds sizes and forms that give a factor of the whole model, a speed of decoding, or a good draft.
Weights are read at a share of the memory's bandwidth, and in few bits also unpacked. The rate of
that goes by multiprocessors and clock, as of exports on an H200 (LOG, 2026-11-25)."""

from collections.abc import Iterator
from math import sqrt

from blr.compressor.base.errors import BlrError, UsageError
from blr.compressor.checkpoint.context import of_text
from blr.compressor.checkpoint.source import Source
from blr.compressor.planning.pace import times_as_fast
from blr.compressor.planning.plan import Plan, make_plan
from blr.compressor.planning.roofline import DECODE, Gpu, chosen_gpu, layer_time
from blr.compressor.planning.training_sizes import dimensions_of
from blr.compressor.recipe.schema import DENSE, PACED, Recipe, make_recipe
from blr.compressor.structures.specs import DenseSpec, Spec
from blr.kernels.decode.quantized.formats import GROUP

READ = {True: 0.85, False: 0.75}  # of the copy's speed, by whether a weight is dense
# Weights that a multiprocessor unpacks a clock, by bits; 8 bits are unpacked as fast as they are read
UNPACKED = {4: 20.6, 3: 21.5, 2: 26.7}
PARTED = 0.5  # of that rate in structures, whose stages wait for each other
CORRECTED = 0.75  # microseconds that a correction adds to its layer
# Launches of a block, and the least microseconds of each (LOG, 2026-11-26: 4 to 5, nine a block)
LAUNCHES, LAUNCH = 9, 4.5
STEP = 0.05  # bits a weight between two sizes of a correction
# Bits a weight of the largest correction of a base that pays (LOG, 2026-11-22), and of the smallest
WIDEST, NARROWEST = {3: 3.75, 2: 2.85}, {3: 3.3, 2: 2.3}
TRIES, NEAR = 8, 0.01  # relative distance from the factor at which the search ends
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


def tokens_per_second(source: Source, recipe: Recipe, gpu: Gpu, calibrated: bool) -> float | None:
    """The speed of decoding, without attention and norms. None if the recipe cannot be planned."""
    try:
        return predicted(source, recipe, gpu, calibrated)
    except BlrError:
        return None


def predicted(source: Source, recipe: Recipe, gpu: Gpu, calibrated: bool) -> float:
    """The speed as `tokens_per_second` gives it. Raises UsageError if the recipe cannot be planned."""
    plan = make_plan(source, recipe, calibrated=calibrated)
    return _whole(source, [_decoded(planned.spec, gpu) for planned in [*plan.layers, *plan.kept]], gpu)


def dense_speed(source: Source, recipe: Recipe, gpu: Gpu) -> float:
    """The speed of the dense model whose layers `recipe` would replace."""
    plan = make_plan(source, recipe)
    shapes = [planned.layer.shape for planned in [*plan.layers, *plan.kept]]
    return _whole(source, [_decoded(DenseSpec(i, o), gpu) for o, i in shapes], gpu)


def _whole(source: Source, times: list[float], gpu: Gpu) -> float:
    """Tokens a second with layers of these microseconds, and the head."""
    words, width = (of_text(source.config).get(name) for name in ("vocab_size", "hidden_size"))
    if isinstance(words, int) and isinstance(width, int):
        times = [*times, _decoded(DenseSpec(width, words), gpu)]
    return 1e6 / max(sum(times), dimensions_of(source.config).blocks * LAUNCHES * LAUNCH)


def _decoded(spec: Spec, gpu: Gpu) -> float:
    """Microseconds of a layer for one token."""
    if spec.corrected:
        return CORRECTED + sum(_decoded(part, gpu) for _, part in spec.parts())
    whole = spec.structure == DenseSpec.structure
    time = layer_time(spec, DECODE, gpu, launch=False) / READ[whole]
    if spec.packing is None or spec.packing.bits not in UNPACKED:
        return time
    rate = UNPACKED[spec.packing.bits] * gpu.sm_ghz * 1e3 * (1.0 if whole else PARTED)  # a microsecond
    return max(time, spec.parameters / rate)


def decided(recipe: Recipe) -> Recipe:
    """`recipe` with a GPU if its result depends on one: a run that goes on elsewhere makes the same."""
    if recipe.gpu is not None or not recipe.tokens_per_second:
        return recipe
    return recipe.model_copy(update={"gpu": chosen_gpu(None)[0].name})


def paced(source: Source, recipe: Recipe, calibrated: bool) -> tuple[Recipe, str]:
    """`recipe` with the most bits that decode as fast as its ``tokens_per_second`` on its GPU, and a
    line about them. Raises UsageError if nothing is as fast, or nothing can be planned."""
    recipe = decided(recipe)
    wanted, (gpu, _), fastest = recipe.tokens_per_second, chosen_gpu(recipe.gpu), (0.0, "")
    if wanted is None:
        return recipe, ""
    refused: UsageError | None = None
    for settings in _storages(recipe):
        try:
            tried = _stored(recipe, settings)
            speed = predicted(source, tried, gpu, calibrated)
        except UsageError as error:  # of a rule, or a model: globs that match nothing
            refused = refused or error
            continue
        what = " ".join(f"{name} {value}" for name, value in settings.items())
        if speed >= wanted:
            return tried, f"{wanted:g} tokens/s: {what}, predicted {speed:,.0f} on {gpu.name}"
        fastest = max(fastest, (speed, what))
    if refused is not None and not fastest[1]:
        raise refused
    found = f"fastest on {gpu.name} is {fastest[1]}, predicted {fastest[0]:,.0f}"
    remedy = "ask for less, or take a faster --gpu"
    raise UsageError(f"--tokens-per-second {wanted:g}: {found}; {remedy}")


def _stored(recipe: Recipe, settings: dict[str, object]) -> Recipe:
    """`recipe` with one of `_storages`. Raises UsageError if a rule does not go with it."""
    solver = {"solver", "rounds"} if settings["method"] == DENSE else set()  # none fits plain weights
    left = {"tokens_per_second", "method", *PACED} | solver
    given = recipe.model_dump(exclude_unset=True)
    return make_recipe(**{n: value for n, value in given.items() if n not in left}, **settings)


def _storages(recipe: Recipe) -> Iterator[dict[str, object]]:
    """Ways to store the layers, from most bits to fewest."""
    yield {"method": DENSE, "quantize": "int8"}
    yield {"method": DENSE, "quantize": "int4"}
    finer = 16 / (recipe.group or GROUP) - 16 / GROUP  # bits that smaller groups of the base take
    for bits in (3, 2):
        bpw = WIDEST[bits]
        while bpw >= NARROWEST[bits]:
            yield {"method": recipe.method, "base": f"int{bits}", "bpw": round(bpw + finer, 3)}
            bpw -= STEP
        yield {"method": DENSE, "quantize": f"int{bits}"}


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
    found = f"no --cf of the layers gives it, the nearest gives {factor:.3f}"
    raise UsageError(f"{asked}: {found}; take that")


def _reached(plan: Plan, asked: str, wanted: float) -> tuple[float, float]:
    """The factor of the whole model, and that of the layers which is nearer to the `wanted` one."""
    if plan.whole is None:
        raise UsageError(f"{asked}: config.json alone tells no size of the whole model; give --cf")
    size, layers = plan.whole.nbytes, sum(planned.bits for planned in plan.layers) / 8
    stays = size - sum(planned.layer.entry.nbytes for planned in plan.layers)
    if size / wanted <= stays:
        held = f"embeddings, head and what else stays dense take {stays:,} of {size:,} bytes"
        bound = f"so the factor stays below {size / stays:.4g}"
        raise UsageError(f"{asked} cannot be met: {held}, {bound}; lower it or --include lm_head")
    kept, excess = (
        sum(planned.spec.parameters for planned in plan.kept),
        layers / (size / wanted - stays),
    )
    parameters = kept + (plan.structured_parameters - kept) / excess
    return size / (stays + layers), max(plan.dense_parameters / parameters, 1.0001)


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
