"""Turns each layer's settings into its spec: blocks, groups of heads, chains, and ranks that meet the
budget. Heads are next to each other on one side of a projection. D is its other side, and s the width of
one of G groups there, whose factors are [s, r] and [D, r]. Parameters fall if r(D + s) < D·s a group,
and activation memory of M tokens if G·r·(M + s) < M·G·s (FlashSVD, theorems 8.13, 8.22 and 8.25)."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, gcd, inf, log

from blr.compressor.base.errors import UsageError
from blr.compressor.planning.budget import Item, exact_ranks, snap
from blr.compressor.planning.layers import Layer, stored_spec
from blr.compressor.recipe.schema import LayerSettings, Recipe
from blr.compressor.structures.patterns import (
    choose_patterns,
    parse_patterns,
    predicted_log_error,
    validate_chain,
)
from blr.compressor.structures.registry import STRUCTURES, LayerSizes, Structure
from blr.compressor.structures.specs import KroneckerSpec, Spec

CHAIN_TOLERANCE = 0.005  # by which a chain may exceed the compression factor, relative to it
CHAIN_TRIES = 8
RANK_UNIT = 4  # ranks of corrections that are sized by bits are multiples of it
TOKENS = 4096  # batch × length for which activation memory is judged: one long prefill

Curves = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Task:
    """A layer, its settings and what is decided so far; `width` is the bits of an unpacked number."""

    layer: Layer
    settings: LayerSettings
    blocks: int = 1
    groups: int = 1
    why: str = ""
    width: int = 16

    @property
    def size(self) -> int:
        """Parameters of the dense layer."""
        o, i = self.layer.shape
        return o * i

    @property
    def cost(self) -> int:
        """Parameters of one unit of rank, that of low rank for a chain."""
        if not self.structure.ranked:
            return sum(self.layer.shape)
        return self.spec(self.step).parameters // self.step

    @property
    def structure(self) -> Structure:
        return STRUCTURES[self.settings.method]

    @property
    def step(self) -> int:
        """The number that the rank is a multiple of."""
        return self.blocks if self.structure.stepped else 1

    @property
    def most(self) -> int:
        """The largest rank that the structure can use."""
        o, i = self.layer.shape
        out = self.layer.head_side == "out"
        limit = min(o // self.groups, i) if out else min(o, i // self.groups)
        return max(limit - limit % self.step, self.step)

    @property
    def bpw(self) -> float | None:
        return self.settings.stored.bpw

    @property
    def corrections(self) -> Sequence[int]:
        """The ranks that a correction may have if it is sized by bits."""
        unit = max(self.step, RANK_UNIT // self.step * self.step)
        return range(unit, self.most + 1, unit) or [self.step]

    def bits(self, rank: int) -> float:
        """Stored bits a weight of a correction of this rank and its base."""
        stored = stored_spec(self.spec(rank), self.settings.stored, self.width)
        return stored.stored_bits(self.width) / self.size

    def spec(self, rank: int) -> Spec:
        o, i = self.layer.shape
        form = LayerSizes(i, o, self.blocks, self.groups, self.layer.head_side)
        make = self.structure.of_rank
        assert make is not None
        return make(form, rank)

    def decided(self, why: str) -> str:
        """The rule in words: where the settings come from, what was decided before, and `why`."""
        return f"{self.settings.rule}: {'; '.join(part for part in (self.why, why) if part)}"


Assigned = dict[str, tuple[Spec, str]]  # module to its spec and the rule that chose it


@dataclass(frozen=True)
class Assigner:
    """Chooses specs for tasks. `curves` are those of `budget.Item`, by module."""

    recipe: Recipe
    curves: Curves
    calibrated: bool
    notes: list[str]

    def assign(self, tasks: Sequence[Task], budget: float) -> Assigned:
        """The specs of all tasks (`shaped`, none dense), with `budget` parameters. Raises UsageError."""
        self._check_bits(tasks)
        given = {task.layer.module: done for task in tasks if (done := self._given(task))}
        own: dict[str, list[Task]] = {}
        for task in tasks:
            if task.layer.module not in given and task.settings.cf is not None:
                own.setdefault(task.settings.rule, []).append(task)
        for group in own.values():
            factor = group[0].settings.cf or self.recipe.cf
            given |= self._shared(group, sum(t.size for t in group) / factor, f"cf {factor:g}")
        free = [task for task in tasks if task.layer.module not in given]
        spent = sum(spec.parameters for spec, _ in given.values())
        if free:
            given |= self._shared(free, budget - spent, f"cf {self.recipe.cf:g}")
        elif "cf" in self.recipe.model_fields_set and budget and self.recipe.rank is None:
            held = f"they hold {spent:,} parameters where cf {self.recipe.cf:g} would leave"
            if abs(spent - budget) > 0.01 * budget:
                self.notes.append(f"rules fix every layer: {held} them {budget:,.0f}")
        return {task.layer.module: given[task.layer.module] for task in tasks}

    def shaped(self, task: Task) -> Task:
        """The task with blocks that divide its layer, or groups that keep its heads whole."""
        if task.structure.blocks is not None:
            (o, i), wanted = task.layer.shape, task.settings.target_blocks
            divisors = [d for d in range(1, gcd(o, i) + 1) if gcd(o, i) % d == 0]
            nearest = min(divisors, key=lambda d: (abs(log(d / wanted)), d))
            if nearest != wanted:
                self._say(f"{o}x{i}: {wanted} blocks do not divide it, using {nearest}")
            return replace(task, blocks=nearest)
        if task.structure.grouped and task.settings.heads != "whole" and task.layer.heads > 1:
            return self._grouped(task)
        return task

    def _grouped(self, task: Task) -> Task:
        (o, i), layer, wanted = task.layer.shape, task.layer, task.settings.heads
        width, other = (o, i) if layer.head_side == "out" else (i, o)
        if wanted == "auto":
            sides, rank = (width, other, layer.heads), task.settings.rank
            factor = task.settings.cf or self.recipe.cf
            found = groups_for_budget(*sides, factor) if rank is None else groups_for_rank(*sides, rank)
            return replace(task, groups=found[0], why=found[1])
        asked = layer.heads if wanted == "per-head" else int(wanted.removeprefix("grouped:"))
        groups = nearest_grouping(asked, layer.heads, width)
        if groups != asked:
            self._say(f"{layer.type}: {asked} groups do not divide {layer.heads} heads, using {groups}")
        return replace(task, groups=groups, why=f"{groups} group{'s' * (groups > 1)} of heads")

    def _given(self, task: Task) -> tuple[Spec, str] | None:
        """The spec and its rule if the settings name a rank, a chain or bits; else None."""
        o, i = task.layer.shape
        settings = task.settings
        if settings.pattern is not None:
            patterns = parse_patterns(settings.pattern, i, o)
            validate_chain(patterns, i, o)
            return KroneckerSpec(i, o, patterns), task.decided("chain as given")
        if task.bpw is not None:
            ranks = task.corrections
            found = bisect_right(ranks, task.bpw, key=task.bits)  # groups fill up in steps, never fewer
            return task.spec(ranks[found - 1]), task.decided(f"at most {task.bpw:g} bits a weight")
        if settings.rank is None:
            return None
        rank = min(max(settings.rank // task.step, 1) * task.step, task.most)
        if rank != settings.rank:
            self._say(f"{o}x{i}: rank {settings.rank} is not possible, using {rank}")
        return task.spec(rank), task.decided("rank as given")

    def _check_bits(self, tasks: Sequence[Task]) -> None:
        """Raise UsageError for fewer bits a weight than the smallest correction takes."""
        least = {n: task.bits(task.corrections[0]) for n, task in enumerate(tasks) if task.bpw}
        short = [n for n, bits in least.items() if bits > (tasks[n].bpw or 0)]
        if short:
            n = max(short, key=lambda number: least[number])
            task, (o, i) = tasks[n], tasks[n].layer.shape
            padded = task.settings.stored.group and i % task.settings.stored.group
            finer = " or a smaller --group" if padded else ""
            base = f"int{task.settings.stored.base} and the smallest correction"
            taken = f"take {least[n]:.4g} bits a weight of {task.layer.module} ({o}x{i})"
            remedy = f"take a base of fewer bits{finer}, or exclude the layer"
            remedy = f"give {ceil(100 * least[n]) / 100:g}, {remedy}"
            raise UsageError(f"bpw {task.bpw:g} cannot be met: {base} {taken}; {remedy}")

    def _shared(self, tasks: Sequence[Task], budget: float, goal: str) -> Assigned:
        """The specs of tasks that share `budget` parameters."""
        items = [self._item(task) for task in tasks]
        if budget < sum(item.least for item in items):
            raise UsageError(self._impossible(tasks, items, budget, goal))
        if budget > sum(task.size for task in tasks):
            found = f"leaves {budget:,.0f} parameters to {len(tasks)} layers that have fewer dense"
            why = "for rules make the others smaller than that"
            raise UsageError(f"{goal} {found}, {why}; raise cf, or keep these dense by a rule")
        groups = self._merged(tasks, items)
        items = [item for item, _ in groups]
        exact = exact_ranks(items, budget, strength=self._strength, floor=self.recipe.floor)
        chains = self._chains(groups, exact)
        ranked = [n for n, (_, members) in enumerate(groups) if members[0].structure.ranked]
        left = budget - sum(spec.parameters for spec, _ in chains.values())
        ranks = snap([items[n] for n in ranked], [exact[n] for n in ranked], left) if ranked else []
        measured = f"sensitivity, {{:.2f}} times the uniform rank of {goal}"
        done, share = dict(chains), measured if self._strength else f"uniform share of {goal}"
        for n, rank in zip(ranked, ranks, strict=True):
            uniform = items[n].rank_of(items[n].size * budget / sum(task.size for task in tasks))
            for task in groups[n][1]:
                why = task.decided(share.format(rank / uniform))
                done[task.layer.module] = task.spec(rank), why
        return done

    @property
    def _strength(self) -> float:
        """The weight of the sensitivities; 0 unless they are known and wanted."""
        return 0.0 if self.recipe.allocation == "uniform" or not self.curves else self.recipe.strength

    def _item(self, task: Task) -> Item:
        curve = self.curves.get(task.layer.module) if self._strength else None
        return Item(task.size, task.cost, task.step, curve=curve, width=task.groups)

    def _merged(self, tasks: Sequence[Task], items: Sequence[Item]) -> list[tuple[Item, list[Task]]]:
        """Items with their tasks; without sensitivities, one for layers of equal shape and structure."""
        if self._strength:
            return [(item, [task]) for task, item in zip(tasks, items, strict=True)]
        merged: dict[tuple[object, ...], list[Task]] = {}
        for task in tasks:
            key = (task.layer.shape, task.settings.method, task.blocks, task.groups, task.cost)
            merged.setdefault(key, []).append(task)
        pairs = [(self._item(members[0]), members) for members in merged.values()]
        return [(replace(item, count=len(members)), members) for item, members in pairs]

    def _chains(self, groups: Sequence[tuple[Item, list[Task]]], exact: Sequence[float]) -> Assigned:
        """Kronecker-sparse chains that together come within a percent of their share of the budget."""
        pairs = [
            (members, rank * item.cost) for (item, members), rank in zip(groups, exact, strict=True)
        ]
        wanted = [(members, share) for members, share in pairs if not members[0].structure.ranked]
        budget, scale = sum(share * len(members) for members, share in wanted), 1.0
        best: Assigned = {}
        for _ in range(CHAIN_TRIES if wanted else 0):
            found: Assigned = {}
            for members, share in wanted:
                found |= self._chain(members, share * scale)
            spent = sum(spec.parameters for spec, _ in found.values())
            if not best or spent <= 1.005 * budget:
                best = found
            if spent > 0.99 * budget:
                break
            scale *= budget / spent
        return best

    def _chain(self, members: Sequence[Task], share: float) -> Assigned:
        """One chain of about `share` parameters for layers of the same shape."""
        o, i = members[0].layer.shape
        factor = max(o * i / share, 1.0 + 1e-6)
        choose = partial(choose_patterns, calibrated=self.calibrated, tolerance=CHAIN_TOLERANCE)
        try:
            chain, reason = choose(i, o, factor)
        except UsageError:  # rank 1 of the smallest chain is over this layer's share: others pay
            chain, why = choose(i, o, o * i / (o + i))
            reason = f"the smallest chain, cf {factor:.4g} is out of reach: {why}"
            self._say(f"{o}x{i}: {reason}")
        spec = KroneckerSpec(i, o, chain)
        return {task.layer.module: (spec, task.decided(reason)) for task in members}

    def _impossible(self, tasks: Sequence[Task], items: Sequence[Item], budget: float, goal: str) -> str:
        least, size = sum(item.least for item in items), sum(task.size for task in tasks)
        methods = "/".join(dict.fromkeys(task.settings.method for task in tasks))
        if budget <= 0:
            return (
                f"{goal} cannot be met: layers that rules keep dense or fix already take "
                f"{-budget:,.0f} parameters more than it leaves; lower cf or loosen the rules"
            )
        o, i = max(zip(tasks, items, strict=True), key=lambda p: p[1].least / p[0].size)[0].layer.shape
        return (
            f"{goal} cannot be met: with the smallest ranks {methods} reaches at most cf "
            f"{size / least:.4g} on these {len(tasks)} layers (a {o}x{i} one is the tightest), and "
            f"{budget:,.0f} parameters are left for them; lower cf or exclude layers"
        )

    def _say(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


Grouping = tuple[int, str]  # a number of groups, and why it was chosen


def parameter_threshold(width: int, other: int, groups: int) -> float:
    """The rank of each of G `groups` below which the factors have fewer parameters than the dense weight
    of `width` features on the heads' side and `other` ones (theorems 8.13 and 8.22)."""
    part = width / groups
    return part * other / (part + other)


def memory_threshold(width: int, groups: int, tokens: int = TOKENS) -> float:
    """The rank of each of G `groups` below which activations of `tokens` take less memory than dense
    heads (theorems 8.13, 8.22 and 8.25)."""
    return tokens * width / (groups * tokens + width)


def saves(width: int, other: int, groups: int, rank: float, tokens: int = TOKENS) -> bool:
    """Whether G groups of this rank have fewer parameters and take less activation memory than dense."""
    return rank < min(parameter_threshold(width, other, groups), memory_threshold(width, groups, tokens))


def candidates(heads: int) -> list[int]:
    """The numbers of groups that hold whole heads: the divisors of `heads`, falling."""
    return [g for g in range(heads, 0, -1) if heads % g == 0]


def groups_for_rank(width: int, other: int, heads: int, rank: int) -> Grouping:
    """The most groups for which a given rank of each still saves parameters and memory."""
    for groups in candidates(heads):
        if saves(width, other, groups, rank):
            limit = min(parameter_threshold(width, other, groups), memory_threshold(width, groups))
            return groups, f"{_name(groups, heads)}: rank {rank} is under {limit:.4g}"
    return 1, f"whole: rank {rank} saves nothing in any grouping"


def groups_for_budget(width: int, other: int, heads: int, cf: float) -> Grouping:
    """The grouping of least predicted error that meets a compression factor and saves memory."""
    options = {}
    for groups in candidates(heads):
        rank = parameter_threshold(width, other, groups) / cf
        if rank >= 1 and saves(width, other, groups, rank):
            options[groups] = predicted_log_error(other, width, groups, 1, int(rank))
    if not options:
        return 1, "whole: no grouping saves memory at this budget"
    best = min(options, key=lambda g: (options[g] if options[g] > -inf else -inf, g))
    rank = parameter_threshold(width, other, best) / cf
    return best, (
        f"{_name(best, heads)}: least predicted error of {len(options)} groupings, rank {rank:.0f}"
    )


def nearest_grouping(wanted: int, heads: int, width: int) -> int:
    """The number of groups nearest `wanted` that keeps heads whole and divides `width`."""
    common = [g for g in candidates(heads) if width % g == 0]
    return min(common, key=lambda g: (abs(log(g / wanted)), g))


def _name(groups: int, heads: int) -> str:
    if groups == 1:
        return "whole"
    return "per head" if groups == heads else f"{groups} groups of {heads // groups} heads"
