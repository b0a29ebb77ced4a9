"""A recipe says what to do with a checkpoint. It is validated before anything is read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError
from pydantic.functional_validators import ModelWrapValidatorHandler, model_validator

from blr.compressor.base.device import Dtype
from blr.compressor.base.errors import UsageError
from blr.compressor.base.globs import MAX_GLOBS, matches
from blr.compressor.recipe import fields
from blr.compressor.recipe.fields import NONE, Globs, Natural, Positive, Share, said_of, stores_alone
from blr.compressor.structures.registry import STRUCTURES
from blr.kernels.decode.quantized.formats import FP8_GROUPS, GROUP, K_GROUP, K_QUANTS, ROW

FORMER = {"auto": "blast"}  # methods of earlier versions, and what they are now
DENSE = "dense"  # no structure: unchanged, or in the bits of `quantize`
FP8 = "fp8"
KINDS = {"int8": 8, "int4": 4, "int3": 3, "int2": 2, FP8: 8, NONE: None}  # to bits
CORRECTING = ("svd", "monarch", "blast")  # methods that can correct a base
# Settings that `tokens_per_second` takes the place of
PACED = ("cf", "model_cf", "rank", "quantize", "base", "bpw", "kv_rank", "kv_cf", "kv_quantize")
CORRECTION_KIND = "int4"  # how a correction's factors are stored by default
if TYPE_CHECKING:
    Method: TypeAlias = str
else:
    Method = Literal[(*STRUCTURES, DENSE)]
Allocation = Literal["uniform", "sensitivity"]
Kind = Literal["int8", "int4", "int3", "int2", "fp8", "none"]
Base = Literal["int8", "int4", "int3", "int2", "none"]
Group = Literal[128, 64, 32]
Grid = Literal["uniform", "curved", "q2_k", "q3_k"]
Couplings = Literal["int8", "none"]
KvNumbers = Literal["int8", "int4", "none"]


class _Settings(BaseModel):
    """The settings that both a recipe and a rule can have."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    rank: Positive | None = None
    blocks: Positive | None = None
    pattern: fields.Chain | None = None
    solver: str | None = None
    rounds: Natural | None = None
    quantize: Kind | None = None
    group: Group | None = None
    grid: Grid | None = None
    couplings: Couplings | None = None
    base: Base | None = None
    bpw: fields.Bits | None = None
    _former: str | None = PrivateAttr(default=None)  # the method as it was written

    @model_validator(mode="wrap")
    @classmethod
    def _current(cls, data: Any, validated: ModelWrapValidatorHandler[Self]) -> Self:
        """Replace a method of earlier versions by what it is now."""
        named = data.get("method") if isinstance(data, dict) else None
        if not isinstance(named, str) or named not in FORMER:
            return validated(data)
        made = validated({**data, "method": FORMER[named]})
        made._former = named
        return made


class Rule(_Settings):
    """Settings for the layers whose module names match a glob (`*` spans dots); the first match counts.
    Without `cf` and `rank` these layers share the recipe's budget. A setting of None is the recipe's;
    one that belongs to a method is so only if the rule has the recipe's method."""

    match: fields.Glob
    method: Method | None = None
    cf: fields.Factor | None = None
    heads: fields.Heads | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        _refuse_pairs(self, self.method)
        if self.cf is not None and self.rank is not None:
            raise ValueError("a rule takes cf or rank, not both")
        known = {"match", "method", "quantize", "group", "grid"}
        if self.method == DENSE and self.model_dump(exclude_none=True).keys() - known:
            raise ValueError("a rule of method dense takes nothing but match, quantize, group and grid")
        return self


class RecipeFields(_Settings):
    """The keys of a recipe file. `Recipe` explains them and checks that they fit together."""

    extends: Annotated[str, Field(min_length=1)] | None = None
    method: Method = "svd"
    cf: fields.Factor = 2.0
    model_cf: fields.Factor | None = None
    heads: fields.Heads = "whole"
    rules: Annotated[list[Rule], Field(max_length=MAX_GLOBS)] = []
    include: Globs = []
    exclude: Globs = []
    kv_rank: Positive | None = None
    kv_cf: fields.CacheFactor | None = None
    kv_quantize: KvNumbers | None = None
    allocation: Allocation | None = None
    floor: Share = 0.3
    strength: Share = 0.7
    samples: Positive = 256
    seq_len: Annotated[int, Field(ge=2, le=2**31)] = 512
    mix: Share = 0.0
    sequential: bool = True
    refit: Natural | None = None
    finish: Natural | None = None
    dtype: Dtype | None = None
    seed: Natural = 0
    gpu: Annotated[str, Field(min_length=1)] | None = None
    tokens_per_second: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None


class Recipe(RecipeFields):
    """The settings of one compression.

    Attributes:
        extends: a shipped recipe, or a path relative to this one; None once resolved.
        cf: dense parameters over structured ones; layers that a rule keeps dense count in both.
        heads: `auto` uses the thresholds of `blr.compressor.planning.assign`.
        rules: settings for some layers; the first rule that matches counts.
        include: globs over module names; they admit heads as well.
        kv_rank, kv_cf: give k and v (q, k and v of GPT-2) a low rank in groups of heads of about 256
            features, or as `heads` says. Each group has rank kv_rank, or all ranks together are the
            width over kv_cf, shared out by sensitivity if it is measured.
        floor: least share of its uniform rank that allocation by sensitivity leaves to a layer.
        strength: weight of the sensitivities against uniform ranks.
        sequential: fit each layer to the inputs that the compressed layers before it give.

    Options:
        method (--method, -m): Structure of the replaced layers: {values}. ks is Kronecker-sparse; dense
            changes only the storage. [svd; dense for --quantize alone]
        cf: Make the replaced layers this many times smaller, counted in parameters. [2]
        model_cf: Make the whole model this many times smaller, in bytes, in place of --cf. [none]
        rank: Give every replaced layer this rank, in place of --cf.
        blocks: Divide Monarch and BLAST layers into this many blocks. [4 for Monarch, 16 for BLAST]
        pattern: Factors of Kronecker-sparse layers: '(1,192,48,2)(2,48,192,1)' or butterfly.
            [the pattern of the least predicted error]
        heads: Split attention layers for svd: whole, grouped:G, per-head or auto. [whole]
        kv_rank: Reduce K and V of each group of heads to this rank, and cache the ranks. [none]
        kv_cf: Make the KV cache this many times smaller, in place of --kv-rank.
            [none; 1 with --kv-quantize]
        kv_quantize: Cache these ranks in int8, or in int4 all but the most important quarter. [none]
        quantize: Store dense weights, or the factors of --method, in int8, int4, int3, int2 or fp8.
            [not; corrections by --base in int4]
        group: Let this many numbers share a scale: 128, 64 or 32. [128; 32 on q2_k, q3_k; a row for fp8]
        grid: Space the levels of int3 all alike (uniform), or wider outwards (curved), for blr alone; or
            round int2 or int3 to what llama.cpp holds as Q2_K or Q3_K (q2_k, q3_k). [uniform]
        base: Store the dense weights in int2, int3, int4 or int8, and let --method correct them. [none]
        bpw: Bits a weight of --base and correction, in place of --rank; --text gives some layers more.
        tokens_per_second: Take the largest size that is predicted to decode one sequence at this speed.
        gpu: GPU that times are predicted for, a name in configs/gpus.yaml. [this machine's, else h200]
        couplings: Store the couplings of BLAST in int8, or none. [int8 in a correction]
        solver: Solver of BLAST: varpro or precgd. [varpro]
        rounds: Rounds or steps of the solver. [the solver's]
        include: Compress only modules whose name matches this glob; repeatable.
        exclude: Keep modules whose name matches this glob dense; repeatable.
        dtype: Store the factors in this dtype. [the weight's own]
        seed: Seed of solvers that start at random. [0]
        samples: Calibrate with at most this many windows or sentences. [256]
        seq_len: Tokens of a calibration window. [512]
        mix: Let the model write this share of the calibration text itself. [none]
        allocation: Share out ranks, or --bpw: uniform, or by sensitivity, which needs --text.
            [sensitivity if it can be]
        refit: Epochs of training each block after its fits.
            [2 on a GPU, 4 of packed weights, 0 on a CPU]
        finish: Epochs of a last pass that trains all blocks together to predict as the dense model.
            [8 on a GPU with the room, else 0]
    """

    @model_validator(mode="before")
    @classmethod
    def _dense_for_storing_alone(cls, data: object) -> object:
        return {**data, "method": DENSE} if isinstance(data, dict) and stores_alone(data) else data

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        _refuse_pairs(self, self.method)
        for rule in self.rules:
            if rule.method is None:
                _refuse_pairs(rule, self.method)
        resolved = self.layers()
        _refuse_sizes(self, resolved)
        for layer in resolved:
            _refuse_unfit(layer)
        return self

    @property
    def former_methods(self) -> list[str]:
        """The methods of earlier versions that are written in the recipe, each once."""
        named = [self._former, *(rule._former for rule in self.rules)]
        return list(dict.fromkeys(name for name in named if name))

    @property
    def caches_ranks(self) -> bool:
        """Whether the cache of keys and values holds ranks."""
        return self.kv_rank is not None or self.kv_cf is not None

    @property
    def sized_by_cf(self) -> bool:
        """Whether `cf` determines the size of most layers."""
        own = self.own()
        return own.method != DENSE and own.stored.base is None and own.rank is None

    def settings_for(self, module: str) -> LayerSettings:
        """The settings for `module`: those of the first rule that matches, else the recipe's own."""
        for number, rule in enumerate(self.rules, 1):
            if matches(module, rule.match):
                return self._by_rule(rule, f"rule {number} {rule.match!r}")
        return self.own()

    def own(self) -> LayerSettings:
        """The settings for layers that no rule matches."""
        return self._by_rule(Rule(match="*"), "recipe")

    def layers(self) -> list[LayerSettings]:
        """All settings that a layer may get: the recipe's own, and those of every rule."""
        return [self.own(), *(self._by_rule(rule, "") for rule in self.rules)]

    def _said(self, rule: Rule, name: str) -> Any:
        own = getattr(rule, name)
        return getattr(self, name) if own is None else own

    def _stored(self, rule: Rule) -> StoredAs:
        """How the layers of a rule are stored."""
        said = partial(self._said, rule)
        base = None if said("method") == DENSE else KINDS[said("base") or NONE]
        kind = said("quantize") or (CORRECTION_KIND if base else NONE)
        coupled = said("couplings") or ("int8" if base else NONE)
        bpw = None if base is None or rule.rank else said("bpw")
        shared, curved = K_QUANTS.get(said("grid")), said("grid") == "curved"
        group = said("group") or (ROW if kind == FP8 else K_GROUP if shared else GROUP)
        form = KINDS[kind], group, KINDS[coupled], base, bpw, kind == FP8, curved
        return StoredAs(*form, superblocks=shared == (base or KINDS[kind] or 0))

    def _by_rule(self, rule: Rule, name: str) -> LayerSettings:
        said, method = partial(self._said, rule), rule.method or self.method
        bound = said if method == self.method else partial(getattr, rule)
        ranked = method == DENSE or STRUCTURES[method].ranked
        sized = rule.rank or rule.cf or rule.pattern or rule.bpw or not ranked
        return LayerSettings(
            method,
            rule.cf,
            rule.rank if sized else self.rank,
            *(bound("blocks"), bound("pattern"), said("heads"), bound("solver"), bound("rounds")),
            name,
            self._stored(rule),
        )


@dataclass(frozen=True)
class StoredAs:
    """How a layer is stored: in `bits` (None: as its weight) on a grid, `curved` or of `superblocks`, in
    groups of `group`, BLAST's S in `couplings` bits, beside a weight of `base` bits; `bpw` of both."""

    bits: int | None = None
    group: int = GROUP
    couplings: int | None = None
    base: int | None = None
    bpw: float | None = None
    fp8: bool = False
    curved: bool = True
    superblocks: bool = False

    @property
    def kind(self) -> str:
        """The name of the numbers' storage, such as "int4"."""
        return FP8 if self.fp8 else f"int{self.bits}"


@dataclass(frozen=True)
class LayerSettings:
    """The settings of one layer, from `rule`; `cf` is the rule's own, None for the recipe's budget."""

    method: str
    cf: float | None = None
    rank: int | None = None
    blocks: int | None = None
    pattern: str | None = None
    heads: str = "whole"
    solver: str | None = None
    rounds: int | None = None
    rule: str = "recipe"
    stored: StoredAs = StoredAs()

    @property
    def target_blocks(self) -> int:
        """The blocks asked for, else the method's default; at most 4 by default in a correction."""
        structure = STRUCTURES.get(self.method)
        usual = (structure and structure.blocks) or 1
        return self.blocks or (min(usual, 4) if self.stored.base else usual)

    @property
    def kept(self) -> bool:
        """Whether the layer stays as it is."""
        return self.method == DENSE and self.stored.bits is None


def _refuse_pairs(settings: _Settings, method: str | None) -> None:
    """Raise ValueError for settings that do not belong to `method` (None: it may be any)."""
    if method is None:
        return
    structure = STRUCTURES.get(method)
    known = structure.solvers if structure else ()
    if settings.solver is not None and settings.solver not in known:
        names = ", ".join(known) or "none, it chooses"
        raise ValueError(f"solver {settings.solver!r} is not one of {method}'s: {names}")
    if settings.pattern is not None and (structure is None or structure.ranked):
        raise ValueError(f"pattern belongs to method ks, not {method}")
    _refuse_correction(method, settings.base)
    if settings.rank is not None and structure and not structure.ranked:
        raise ValueError(f"rank does not belong to method {method}; give cf")


def _refuse_correction(method: str, base: object) -> None:
    """Raise ValueError for a base with a method that cannot correct it."""
    if base not in (None, NONE) and method not in (*CORRECTING, DENSE):
        raise ValueError(f"method {method} corrects no base; expected one of {', '.join(CORRECTING)}")


def _refuse_sizes(recipe: Recipe, resolved: list[LayerSettings]) -> None:
    """Raise ValueError for sizes that contradict each other or the method, or for nothing to do."""
    if recipe.tokens_per_second is not None:
        fields_set = recipe.model_fields_set
        if given := [n for n in PACED if n in fields_set and getattr(recipe, n) is not None]:
            raise ValueError(f"tokens_per_second chooses what is stored; leave out {', '.join(given)}")
        if recipe.method not in CORRECTING:
            found = f"tokens_per_second stores dense weights that {', '.join(CORRECTING)} correct"
            raise ValueError(f"{found}; leave out method {recipe.method}")
        return
    if recipe.kv_rank is not None and recipe.kv_cf is not None:
        raise ValueError("the cache is sized by kv_rank or kv_cf, not both")
    if recipe.kv_quantize is not None and not recipe.caches_ranks:
        raise ValueError("kv_quantize belongs to a cache of ranks; give kv_rank or kv_cf")
    if recipe.method == DENSE and recipe.base not in (None, NONE):
        expected = f"method {', '.join(CORRECTING)}; or leave it out and give quantize"
        raise ValueError(f"base {recipe.base} is what a structure corrects, expected {expected}")
    if all(layer.kept for layer in resolved) and not recipe.caches_ranks:
        raise ValueError("method dense keeps every layer as it is; give quantize, as int4")
    if recipe.method == DENSE and recipe.rank is not None:
        raise ValueError("rank does not belong to method dense; leave it out")
    if recipe.rank is not None and recipe.bpw is not None:
        raise ValueError("a correction is sized by rank or bpw, not both")
    if recipe.bpw is not None and all(layer.stored.base is None for layer in resolved):
        raise ValueError("bpw sizes the correction of a base; give base, as int2")
    factors = ["cf"] * ("cf" in recipe.model_fields_set) + ["model_cf"] * (recipe.model_cf is not None)
    if factors and (recipe.method == DENSE or recipe.base not in (None, NONE)):
        base = "" if recipe.method == DENSE else f"base {recipe.base}, which rank or bpw size"
        raise ValueError(f"{factors[0]} does not belong to {base or 'method dense'}; leave it out")
    if recipe.model_cf is not None and (factors[1:] or recipe.rank is not None):
        raise ValueError("the layers are sized by model_cf, cf or rank; give one of them")


def _refuse_unfit(layer: LayerSettings) -> None:
    """Raise ValueError for a layer that cannot be stored as its settings say."""
    stored = layer.stored
    _refuse_correction(layer.method, stored.base)
    if stored.fp8 and stored.group not in FP8_GROUPS:
        raise ValueError(f"group {stored.group} does not belong to fp8: leave it out, or take 128")
    if stored.superblocks and stored.group != K_GROUP:
        raise ValueError(f"group {stored.group} does not belong to a K-quant: leave it out, it is 32")
    base = f"int{stored.base}"
    if stored.fp8 and stored.base is not None:
        raise ValueError(f"fp8 does not belong to a correction of {base}; expected int8 to int2")
    if stored.base is not None and (layer.cf or not (layer.rank or stored.bpw)):
        raise ValueError(f"base {base} needs the size of its correction: give rank or bpw")


def make_recipe(**settings: object) -> Recipe:
    """Validate settings given one by one. Raises UsageError: the setting, and what it must be."""
    try:
        return Recipe.model_validate(settings)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(said_of(first, f"{where} is" if where else "found")) from None
