"""Chooses the bits of the base and the rank of the correction of every layer together, without torch.

All layers of a recipe share one number of bits. Each bit goes where it saves the largest predicted loss:
rounding a layer costs what its sensitivity says of errors in all directions. More bits of the base and a
larger rank both leave a share of that.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, sqrt

from blr.compressor.planning.assign import Curves, Task
from blr.compressor.recipe.architectures import SIBLINGS

# The least mean squared error of rounding a normal number of variance 1 to so many bits (Max, 1960)
ROUNDING = {2: 0.1175, 3: 0.03454, 4: 0.009497}
LARGEST = 64  # rank
CORRECTED = 1.5  # a correction of the share x of a layer's parameters leaves exp(-1.5 √x), as measured


@dataclass(frozen=True)
class LayerBits:
    """One way to store a layer: it takes `bits` in all, and loses about `loss`."""

    base: int
    rank: int
    bits: float
    loss: float


def shared_bits(tasks: Sequence[Task], curves: Curves) -> list[Task]:
    """The tasks with a base and a rank in place of `bpw`, where sensitivities are known."""
    shared: dict[object, list[int]] = {}
    for n, task in enumerate(tasks):
        stored = task.settings.stored
        known = task.layer.module in curves and stored.base in ROUNDING and not stored.superblocks
        if known and task.bpw is not None:
            shared.setdefault((task.settings.rule, task.bpw), []).append(n)
    done = list(tasks)
    for numbers in shared.values():
        alike: dict[str, list[int]] = {}
        for n in numbers:
            alike.setdefault(_together(tasks[n]), []).append(n)
        budget = sum(tasks[n].size * (tasks[n].bpw or 0) for n in numbers)
        options = [_options([tasks[n] for n in members], curves) for members in alike.values()]
        for members, choice in zip(alike.values(), _chosen(options, budget), strict=False):
            for n in members:
                done[n] = _stored(tasks[n], choice)
    return done


def _together(task: Task) -> str:
    """A name for the layers that are stored alike: those of one input, which kernels and engines take
    together, and experts of one stack."""
    home, _, name = task.layer.module.rpartition(".")
    if task.layer.stack:
        return f"{home.rpartition('.')[0]}.{task.layer.stack}"
    number = next((n for n, names in enumerate(SIBLINGS) if name in names), name)
    return f"{home}.{number}"


def _stored(task: Task, choice: LayerBits) -> Task:
    settings = task.settings
    stored = replace(settings.stored, base=choice.base, bpw=None)
    rule = f"{settings.rule}, int{choice.base} by sensitivity"
    return replace(task, settings=replace(settings, rank=choice.rank, stored=stored, rule=rule))


def _options(tasks: Sequence[Task], curves: Curves) -> list[LayerBits]:
    """The ways to store these layers alike."""
    least, options = min(tasks, key=lambda task: task.most), list[LayerBits]()
    for base in (bits for bits in ROUNDING if bits >= (least.settings.stored.base or 0)):
        for rank in (rank for rank in least.corrections if rank <= LARGEST):
            kept = [_stored(task, LayerBits(base, rank, 0, 0)) for task in tasks]
            bits = sum(task.bits(rank) * task.size for task in kept)
            loss = sum(_loss(task, base, rank, curves[task.layer.module]) for task in tasks)
            options.append(LayerBits(base, rank, bits, loss))
    return options


def _loss(task: Task, base: int, rank: int, curve: Sequence[float]) -> float:
    """The predicted loss of a layer, up to a factor: of an error that is alike in all directions."""
    noise = sum(sqrt(max(value, 0.0)) for value in curve) ** 2 / len(curve)
    return noise * ROUNDING[base] * exp(-CORRECTED * sqrt(rank * task.cost / task.size))


def _chosen(options: Sequence[Sequence[LayerBits]], budget: float) -> list[LayerBits]:
    """The choices of the least loss that take at most `budget` bits in all; none if there are none."""

    def at(price: float) -> list[LayerBits]:
        return [min(ways, key=lambda way: way.loss + price * way.bits) for ways in options]

    low, high = 1e-30, 1e30
    for _ in range(100):
        price = sqrt(low * high)
        fits = sum(way.bits for way in at(price)) <= budget
        low, high = (low, price) if fits else (price, high)
    found = at(high)
    left = budget - sum(way.bits for way in found)
    if left < 0:
        return []
    for n in sorted(range(len(found)), key=lambda n: -found[n].loss):  # what is left, where most is lost
        fitting = [way for way in options[n] if way.bits <= found[n].bits + left]
        best = min(fitting, key=lambda way: way.loss)
        left, found[n] = left + found[n].bits - best.bits, best
    return found
