"""`method: auto`: for each layer the structure of least predicted loss.

Candidates share the parameters that the requested factor gives the layer. Low rank loses the tail of
the layer's curve where sensitivities are measured; how much less or more the other structures lose at
equal parameters is `LOSS`, measured on mini-llama at CF 2 as the log perplexity over dense's (uniform
ranks). Kronecker-sparse chains take the error that `patterns.predicted_log_error` gives theirs against
low rank. Predicted time, the geometric mean of decode and prefill rooflines against dense, decides
between structures of equal loss only, so that no plan is predicted to lose more, layer by layer, than
one structure everywhere.

No layer is left dense: neither where decoding gains no time, nor where sensitivities ask for all of its
parameters. The others would have to pay for it, which cost more than it saved (LOG, 2026-11-22).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import exp, gcd, log, sqrt

from blr.compressor.errors import UsageError
from blr.compressor.planning.assign import Task, nearest_blocks
from blr.compressor.planning.budget import Item
from blr.compressor.planning.roofline import DECODE, PREFILL, Gpu, chosen_gpu, dense_time, layer_time
from blr.compressor.recipe.schema import AUTO, PIVOTED, LayerMethod, Recipe
from blr.compressor.structures.patterns import PENALTIES, choose_patterns, predicted_log_error
from blr.compressor.structures.registry import STRUCTURES
from blr.compressor.structures.specs import KroneckerSpec, Spec

# (method, blocks) to predicted loss over low rank's: ln(ppl/12.10), svd 277.5 | 44.4 sequential.
# Plain: Monarch 1378 (b=4), BLAST 131.7 (b=4) and 130.2 (b=16), b=8 between. Calibrated: Monarch
# 54.3, BLAST 100 rounds 22.06 (b=16) and 24.1 (b=8), b=4 continued from these. Pivots | low rank:
# plain 141.2 | 272.2 of 14.75, calibrated, ranks by sensitivity, 20.63 | 25.26 (LOG, 2026-11-23).
LOSS: dict[str, dict[tuple[LayerMethod, int], float]] = {
    "plain": {
        ("svd", 1): 1.0,
        (PIVOTED, 1): 0.775,
        ("monarch", 4): 1.51,
        ("blast", 4): 0.762,
        ("blast", 8): 0.76,
        ("blast", 16): 0.758,
    },
    "calibrated": {
        ("svd", 1): 1.0,
        (PIVOTED, 1): 0.73,
        ("monarch", 4): 1.16,
        ("blast", 4): 0.61,
        ("blast", 8): 0.53,
        ("blast", 16): 0.46,
    },
}
ROUNDS = 10  # of BLAST's solver, below which it may still lose more than low rank
FEWEST = 4  # blocks of BLAST whose loss is known


def choose_methods(tasks: Sequence[Task], recipe: Recipe, calibrated: bool) -> list[Task]:
    """A method, and the reason for it, in the place of every `auto`; all other tasks unchanged.

    `calibrated` as in `plan.make_plan`. Raises UsageError for an unknown GPU.
    """
    gpu, _ = chosen_gpu(recipe.gpu)
    return [
        _best(task, recipe, gpu, calibrated) if task.settings.method == AUTO else task for task in tasks
    ]


def _best(task: Task, recipe: Recipe, gpu: Gpu, calibrated: bool) -> Task:
    """The candidate of least predicted loss, of equal ones the fastest."""
    factor = task.settings.cf or recipe.cf
    scores = {
        candidate: (loss, sqrt(_gain(spec, DECODE, gpu) * _gain(spec, PREFILL, gpu)))
        for candidate, (spec, loss) in _candidates(task, factor, calibrated).items()
    }
    if not scores:  # under one rank: let the assigner say what can be reached
        return _with(task, "svd", 1, "no structure reaches this factor alone")
    method, blocks = best = min(scores, key=lambda c: scores[c])
    loss, time = scores[best]
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
    few = task.settings.rounds is not None and task.settings.rounds < ROUNDS
    for (method, blocks), loss in known_losses(o, i, calibrated).items():
        if (method == "blast" and few) or (method == PIVOTED and task.settings.heads != "whole"):
            continue
        trial = _with(task, method, blocks, "")
        item = Item(trial.size, trial.cost, trial.step, pivots=trial.structure.pivots)
        rank = int(item.rank_of(o * i / factor)) // trial.step * trial.step
        if rank:
            found[method, blocks] = (trial.spec(rank), loss)
    try:
        spec = KroneckerSpec(i, o, choose_patterns(i, o, factor, calibrated=calibrated).patterns)
    except UsageError:
        return found
    found["ks", 1] = (spec, _chain_loss(spec, factor, calibrated))
    return found


def known_losses(o: int, i: int, calibrated: bool) -> dict[tuple[LayerMethod, int], float]:
    """`LOSS` of what divides the layer; of BLAST also the blocks that it has where it is asked for."""
    known = LOSS["calibrated" if calibrated else "plain"]
    found = {key: loss for key, loss in known.items() if gcd(o, i) % key[1] == 0}
    usual = nearest_blocks(o, i, STRUCTURES["blast"].blocks or 1)
    if usual >= FEWEST and ("blast", usual) not in found:
        alike = min((b for m, b in known if m == "blast"), key=lambda b: abs(log(b / usual)))
        found["blast", usual] = known["blast", alike]
    return found


def _chain_loss(spec: KroneckerSpec, factor: float, calibrated: bool) -> float:
    """Predicted squared error of a two-factor chain over that of low rank at equal parameters."""
    o, i = spec.out_features, spec.in_features
    penalties = PENALTIES["calibrated" if calibrated else "plain"]
    (_, _, c, d1), (a2, _, _, _) = spec.patterns
    chain = predicted_log_error(i, o, d1, a2, max(c // a2, 1), penalties)
    low = predicted_log_error(i, o, 1, 1, max(int(o * i / (factor * (o + i))), 1), penalties)
    return exp(2 * (chain - low))


def _gain(spec: Spec, tokens: int, gpu: Gpu) -> float:
    """Predicted time over dense's."""
    dense = dense_time(spec.in_features, spec.out_features, tokens, gpu)
    return layer_time(spec, tokens, gpu) / dense


def _with(task: Task, method: LayerMethod, blocks: int, why: str) -> Task:
    settings = replace(task.settings, method=method, blocks=blocks if blocks > 1 else None)
    return replace(task, settings=settings, blocks=blocks, why=why)
