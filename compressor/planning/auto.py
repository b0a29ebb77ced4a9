"""`method: auto`: for each layer the structure of least predicted loss and time, or none.

Candidates share the parameters that the requested factor gives the layer. Two terms decide:

* predicted loss. Low rank loses the tail of the layer's curve where sensitivities are measured; how
  much less or more the other structures lose at equal parameters is `LOSS`, measured on mini-llama
  at CF 2 as the log perplexity over dense's (uniform ranks). Kronecker-sparse chains take the error
  that `patterns.predicted_log_error` gives theirs against low rank.
* predicted time, the geometric mean of decode and prefill rooflines against dense.

The least sum of both logarithms wins. Layers that no candidate makes faster in decode and of which
leaving dense costs the others little (k and v of grouped-query attention) stay dense, smallest
first; so does a layer that sensitivities would give all of its parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import exp, gcd, log, sqrt

from blr.compressor.errors import UsageError
from blr.compressor.planning.assign import Curves, Task
from blr.compressor.planning.budget import ALMOST_FULL, Item, equal_margins
from blr.compressor.planning.roofline import DECODE, PREFILL, Gpu, dense_time, find_gpu, layer_time
from blr.compressor.recipe.schema import LayerMethod, Recipe
from blr.compressor.structures.patterns import PENALTIES, choose_patterns, predicted_log_error
from blr.compressor.structures.specs import KroneckerSpec, Spec

# (method, blocks) to predicted loss over low rank's: ln(ppl/12.10), svd 277.5 | 44.4 sequential.
# Plain: Monarch 1378 (b=4), BLAST 131.7 (b=4) and 130.2 (b=16), b=8 between. Calibrated: Monarch
# 54.3, BLAST 100 rounds 22.06 (b=16) and 24.1 (b=8), b=4 continued from these.
LOSS: dict[str, dict[tuple[LayerMethod, int], float]] = {
    "plain": {
        ("svd", 1): 1.0,
        ("monarch", 4): 1.51,
        ("blast", 4): 0.762,
        ("blast", 8): 0.76,
        ("blast", 16): 0.758,
    },
    "calibrated": {
        ("svd", 1): 1.0,
        ("monarch", 4): 1.16,
        ("blast", 4): 0.61,
        ("blast", 8): 0.53,
        ("blast", 16): 0.46,
    },
}
OTHERS_PAY = 1.15  # dense layers may raise the factor that the others must reach by this much


def choose_methods(
    tasks: Sequence[Task], recipe: Recipe, curves: Curves, calibrated: bool, notes: list[str]
) -> list[Task]:
    """A method, and the reason for it, in the place of every `auto`; all other tasks unchanged.

    `curves` and `calibrated` as in `plan.make_plan`. Raises UsageError for an unknown GPU.
    """
    gpu = find_gpu(recipe.gpu)
    auto = [task for task in tasks if task.settings.method == "auto"]
    decided: dict[str, Task] = {}
    for task in auto:
        decided[task.layer.module] = _best(task, recipe, gpu, calibrated)
    decided |= _dense(tasks, decided, recipe, gpu, curves)
    for task in decided.values():
        if task.settings.method == "dense":
            note = f"auto keeps {task.layer.type} dense: {task.why}"
            notes.extend([note] if note not in notes else [])
    return [decided.get(task.layer.module, task) for task in tasks]


def _best(task: Task, recipe: Recipe, gpu: Gpu, calibrated: bool) -> Task:
    """The candidate of least predicted loss times predicted time."""
    factor = task.settings.cf or recipe.cf
    scores: dict[tuple[LayerMethod, int], tuple[float, float, float]] = {}
    for candidate, (spec, loss) in _candidates(task, factor, calibrated).items():
        times = [_gain(spec, tokens, gpu) for tokens in (DECODE, PREFILL)]
        scores[candidate] = (log(loss) + log(sqrt(times[0] * times[1])), loss, sqrt(times[0] * times[1]))
    if not scores:  # under one rank: let the assigner say what can be reached
        return _with(task, "svd", 1, "no structure reaches this factor alone")
    method, blocks = best = min(scores, key=lambda c: scores[c])
    _, loss, time = scores[best]
    name = f"{method} b={blocks}" if blocks > 1 else method
    return _with(
        task,
        method,
        blocks,
        f"auto: {name} of {len(scores)} candidates, predicted loss {loss:.2f} of low rank's, "
        f"time {time:.2f} of dense",
    )


def _candidates(
    task: Task, factor: float, calibrated: bool
) -> dict[tuple[LayerMethod, int], tuple[Spec, float]]:
    """Spec and predicted loss over low rank's of every structure that can meet `factor`."""
    o, i = task.layer.shape
    found: dict[tuple[LayerMethod, int], tuple[Spec, float]] = {}
    for (method, blocks), loss in LOSS["calibrated" if calibrated else "plain"].items():
        if gcd(o, i) % blocks:
            continue
        trial = _with(task, method, blocks, "")
        rank = int(o * i / (factor * trial.cost)) // trial.step * trial.step
        if rank:
            found[method, blocks] = (trial.spec(rank), loss)
    try:
        spec = KroneckerSpec(i, o, choose_patterns(i, o, factor, calibrated=calibrated).patterns)
    except UsageError:
        return found
    found["ks", 1] = (spec, _chain_loss(spec, factor, calibrated))
    return found


def _chain_loss(spec: KroneckerSpec, factor: float, calibrated: bool) -> float:
    """Predicted squared error of a two-factor chain over that of low rank at equal parameters."""
    o, i = spec.out_features, spec.in_features
    penalties = PENALTIES["calibrated" if calibrated else "plain"]
    (_, _, c, d1), (a2, _, _, _) = spec.patterns
    chain = predicted_log_error(i, o, d1, a2, max(c // a2, 1), penalties)
    low = predicted_log_error(i, o, 1, 1, max(int(o * i / (factor * (o + i))), 1), penalties)
    return exp(2 * (chain - low))


def _dense(
    tasks: Sequence[Task], decided: dict[str, Task], recipe: Recipe, gpu: Gpu, curves: Curves
) -> dict[str, Task]:
    """Layers to leave dense, as long as the others can pay for it."""
    reasons = {name: why for name, task in decided.items() if (why := _no_gain(task, recipe, gpu))}
    reasons |= _insatiable(list(decided.values()), recipe, curves)
    total = sum(task.size for task in tasks)
    taken = sum(task.size for task in tasks if task.settings.method == "dense")
    kept = {}
    for name in sorted(reasons, key=lambda name: decided[name].size):
        task = decided[name]
        left = total / recipe.cf - taken - task.size
        if left <= 0 or (total - taken - task.size) / left > OTHERS_PAY * recipe.cf:
            break
        taken += task.size
        kept[name] = _with(task, "dense", 1, reasons[name])
    same = {_kind(task) for task in kept.values()}
    whole = {k for k in same if all(n in kept for n, t in decided.items() if _kind(t) == k)}
    return kept if curves else {name: task for name, task in kept.items() if _kind(task) in whole}


def _kind(task: Task) -> tuple[str, tuple[int, int]]:
    return task.layer.type, task.layer.shape


def _no_gain(task: Task, recipe: Recipe, gpu: Gpu) -> str | None:
    """Why nothing makes the layer faster for one token, if so."""
    o, i = task.layer.shape
    factor = task.settings.cf or recipe.cf
    specs = [spec for spec, _ in _candidates(task, factor, False).values()]
    best = min((layer_time(spec, DECODE, gpu) for spec in specs), default=0.0)
    dense = dense_time(i, o, DECODE, gpu)
    if specs and best >= dense:
        return f"decode takes {dense:.1f} µs dense, {best:.1f} µs in the best structure on {gpu.name}"
    return None


def _insatiable(tasks: Sequence[Task], recipe: Recipe, curves: Curves) -> dict[str, str]:
    """Layers that equal margins would give (almost) all of their dense parameters."""
    known = [task for task in tasks if task.layer.module in curves]
    if not known or recipe.allocation == "uniform":
        return {}
    items = [Item(t.size, sum(t.layer.shape), curve=curves[t.layer.module]) for t in known]
    ranks = equal_margins(items, sum(t.size for t in known) / recipe.cf, recipe.floor)
    return {
        task.layer.module: "its sensitivity asks for all of its parameters"
        for task, item, rank in zip(known, items, ranks, strict=True)
        if rank >= ALMOST_FULL * item.full - 1
    }


def _gain(spec: Spec, tokens: int, gpu: Gpu) -> float:
    """Predicted time over dense's."""
    dense = dense_time(spec.in_features, spec.out_features, tokens, gpu)
    return layer_time(spec, tokens, gpu) / dense


def _with(task: Task, method: LayerMethod, blocks: int, why: str) -> Task:
    settings = replace(task.settings, method=method, blocks=blocks if blocks > 1 else None)
    return replace(task, settings=settings, blocks=blocks, why=why)
