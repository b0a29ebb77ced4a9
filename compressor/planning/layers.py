"""Finds the compressible layers of a checkpoint, and those that a recipe selects, from headers. An
expert is a layer, ``model.layers.0.mlp.experts.gate_proj.N``, however a checkpoint keeps experts: one by
one (``experts.N.gate_proj.weight``) or in a stack."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from blr.compressor.base.errors import InputError, UsageError
from blr.compressor.base.globs import matches, matches_any
from blr.compressor.base.quoting import quote
from blr.compressor.checkpoint.config import DIFFUSERS
from blr.compressor.checkpoint.header import TensorEntry
from blr.compressor.checkpoint.shapes import evaluate
from blr.compressor.checkpoint.source import Source
from blr.compressor.recipe.architectures import Family, families, find_family
from blr.compressor.recipe.schema import DENSE, Recipe, StoredAs
from blr.compressor.structures.specs import BlastSpec, CorrectedSpec, DenseSpec, QuantizedSpec, Spec
from blr.kernels.decode.quantized.formats import GROUPS, K_GROUP, SUPERBLOCK

HEAD = "lm_head"  # of every family with one that `transformers` ties
Shape = tuple[int, int]  # (out_features, in_features)
# The stack of transformers that a layer is a part of, by what checkpoints call the layer
STACKS = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
STACKS |= {"w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"}
PAIRED = {"expert_up_proj", "expert_w3"}  # types that read what another layer of the expert reads
AT_ONCE = 16  # experts that a GPU fits by the same launches
TRANSPOSED = {"gpt_oss"}  # model types whose stacks are [E, i, o]
_ONE = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")
EXPERT = re.compile(r"(.+\.experts)\.(\w+)\.(\d+)")  # what its layers are called here
_STACKED = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")
_LINEAR = re.compile(r"(.+)\.(input_linear|output_linear)\.weight")  # of Granite
_OF_LINEAR = {"input_linear": "gate_up_proj", "output_linear": "down_proj"}


@dataclass(frozen=True)
class Layer:
    """A compressible linear layer, with `heads` heads next to each other on its `head_side`: outputs or
    inputs. `stack`: the parameter of transformers that an expert's weight is a part of."""

    module: str
    type: str
    entry: TensorEntry
    transposed: bool  # stored [in, out]
    heads: int = 1
    head_side: str = "out"
    stack: str = ""

    @property
    def width(self) -> int:
        """The bits of a stored number."""
        return 8 * self.entry.nbytes // self.entry.parameters

    @property
    def shape(self) -> Shape:
        rows, columns = self.entry.shape
        return (columns, rows) if self.transposed else (rows, columns)


def _ties(source: Source) -> bool:
    """Whether the head is the embedding, by config.json or else the family's default."""
    said = source.config.get("tie_word_embeddings")
    if said is not None or source.library is DIFFUSERS:
        return bool(said)
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known = source.model_type in CONFIG_MAPPING
    return known and bool(getattr(CONFIG_MAPPING[source.model_type](), "tie_word_embeddings", False))


def find_layers(source: Source, recipe: Recipe, notes: list[str]) -> list[Layer]:
    """The compressible layers of `source` in the order of its tensors. Raises InputError if there are
    none, or if all are stored as integers or in 8 bits."""
    family = _family(source, notes)
    entries, heads = source.entries.values(), bool(recipe.include)
    layers = [layer for entry in entries for layer in _layers(source, entry, family, heads)]
    if family.experts and not source.shards:
        notes.append("experts are not counted, whose shapes config.json does not tell: give the weights")
    if any(layer.module == HEAD for layer in layers) and _ties(source):
        # a tied head is the embedding, whether or not a copy of it is stored
        layers = [layer for layer in layers if layer.module != HEAD]
    if not layers:
        raise InputError(
            f"{source.folder}: found no linear layer of a {source.model_type!r} model; "
            "take config.json and weights from the same model, or another model, if it has none "
            "(SqueezeBERT's are convolutions, I-BERT's of a kind of their own)"
        )
    if kept := [layer.entry for layer in layers if not layer.entry.is_float]:
        dtypes = ", ".join(sorted({entry.dtype for entry in kept}))
        notes.append(
            f"{len(kept)} weights stored as {dtypes} are copied untouched, not compressed, "
            f"from {kept[0].name} on"
        )
        if len(kept) == len(layers):
            remedy = "take a checkpoint of floating-point weights"
            raise InputError(f"{source.folder}: {notes[-1]}; {remedy}")
    known = {layer.entry.name for layer in layers}
    experts = [e for e in entries if "experts" in e.name.split(".") and e.name not in known]
    stay = sum(e.parameters for e in experts if not e.name.endswith(("_bias", ".bias")))
    if share := stay / max(source.parameters, 1):
        notes.append(
            f"experts stay dense, which are {share:.0%} of the model's parameters: no table in configs/ "
            f"says that those of {source.model_type!r} are layers"
        )
    return [layer for layer in layers if layer.entry.is_float]


def _family(source: Source, notes: list[str]) -> Family:
    """The family that lists the model type, else the layers of the model that transformers builds."""
    if found := find_family(source.model_type):
        return found
    if source.library is DIFFUSERS:  # its classes begin with a capital letter
        known = sorted(kind for f in families() for kind in f.model_types if kind[0].isupper())
        said = f"found {source.model_type}, which has no table in configs/"
        expected = f"expected one of diffusers that has one: {', '.join(known)}"
        raise InputError(f"{source.folder}: {said}; {expected}")
    from blr.compressor.loading.native import discover_family

    found = discover_family(source)
    notes.append(
        f"model type {source.model_type!r} has no table in configs/: "
        f"compressing the {len(found.modules)} linear layers found in the model"
    )
    return found


def _experts(entry: TensorEntry, transposed: bool) -> list[Layer]:
    """The layers of experts whose weights a stored tensor holds; none if it holds something else."""
    if match := _ONE.fullmatch(entry.name):
        home, number, part = match.groups()
        if part not in STACKS or len(entry.shape) != 2:
            return []
        module = f"{home}.{part}.{int(number)}"
        return [Layer(module, f"expert_{part}", entry, transposed, stack=STACKS[part])]
    if len(entry.shape) != 3:
        return []
    if match := _STACKED.fullmatch(entry.name):
        home, stack = match.groups()
    elif match := _LINEAR.fullmatch(entry.name):
        home, stack = f"{match[1]}.experts", _OF_LINEAR[match[2]]
    else:
        return []
    count, *shape = entry.shape
    size = entry.nbytes // max(count, 1)
    starts = [entry.start + n * size for n in range(count)]
    parts = (replace(entry, shape=tuple(shape), start=start, end=start + size) for start in starts)
    modules = ((f"{home}.{stack}.{n}", part) for n, part in enumerate(parts))
    return [Layer(m, f"expert_{stack}", part, transposed, stack=stack) for m, part in modules]


def _layers(source: Source, entry: TensorEntry, family: Family, heads: bool) -> list[Layer]:
    """The layers whose weights a stored tensor holds: one, none, or one an expert."""
    if family.experts and (experts := _experts(entry, source.model_type in TRANSPOSED)):
        return experts
    module, _, kind = entry.name.rpartition(".")
    layer_type = family.layer_type(module, include_heads=heads)
    if kind != "weight" or len(entry.shape) != 2 or layer_type is None:
        return []
    side, symbol = family.attention.get(layer_type, ("out", "1"))
    whole = Layer(module, layer_type, entry, family.transposed)
    number = evaluate(source, symbol) or 1
    divides = whole.shape[0 if side == "out" else 1] % number == 0
    return [replace(whole, heads=number, head_side=side) if divides else whole]


def select(layers: Sequence[Layer], recipe: Recipe, source: Source) -> list[Layer]:
    """The layers that `include` matches (all if it is empty) and `exclude` does not. Raises UsageError
    if none are left, or a glob matches nothing."""
    names = [layer.module for layer in layers]
    for glob in (*recipe.include, *recipe.exclude, *(rule.match for rule in recipe.rules)):
        if not any(matches(name, glob) for name in names):
            raise UsageError(f"the glob {quote(glob)} matches {_reason(source, recipe, glob, names)}")
    asked = [x for x in layers if not recipe.include or matches_any(x.module, recipe.include)]
    if chosen := [layer for layer in asked if not matches_any(layer.module, recipe.exclude)]:
        return chosen
    raise UsageError("no layer is left to compress: loosen --include or --exclude")


def _reason(source: Source, recipe: Recipe, glob: str, names: list[str]) -> str:
    """What a glob matches instead of a layer, and the remedy."""
    stored = {name.removesuffix(".weight"): entry for name, entry in source.entries.items()}
    found = next((entry for name, entry in stored.items() if matches(name, glob)), None)
    names_head = (source.config.get("architectures") or [""])[0].endswith(("CausalLM", "LMHeadModel"))
    tied = stored.get(HEAD) is found and _ties(source)
    if matches(HEAD, glob) and (tied or (found is None and names_head)):
        return (
            f"{HEAD!r}, which is tied to the embedding (tie_word_embeddings) and has no weight of its "
            "own; leave it out, or untie the model first"
        )
    if found is None:
        example = f", for example {names[0]!r}" if names else ""
        return f"no compressible layer: globs match module names{example}"
    if not found.is_float:
        remedy = "dequantize the checkpoint first, or leave the layer out"
        return f"{quote(found.name)}, stored as {found.dtype} and copied untouched; {remedy}"
    if not recipe.include and matches(found.name.removesuffix(".weight"), HEAD):
        return f"{quote(found.name)}, which stays dense unless --include asks for it"
    if called := next((layer.module for layer in _experts(found, False) if layer.module in names), None):
        return f"{quote(found.name)}, whose layer is called {called!r}; write the glob for that name"
    return f"{quote(found.name)}, which is no compressible linear layer; leave it out"


def stored_spec(spec: Spec, stored: StoredAs, width: int) -> Spec:
    """How `spec` is stored beside numbers of `width` bits; `spec` itself if packing saves nothing."""
    if stored.base is not None:
        dense = DenseSpec(spec.in_features, spec.out_features)
        return CorrectedSpec(_quantized(dense, stored.base, stored), _correction(spec, stored, width))
    if stored.bits is None:
        return spec
    packed = _quantized(spec, stored.bits, stored)
    return packed if packed.stored_bits(width) < spec.stored_bits(width) else spec


def _quantized(spec: Spec, bits: int, stored: StoredAs) -> QuantizedSpec:
    """`spec` in few bits. Dense weights of whole superblocks have them, where those are asked for."""
    whole = spec.structure == DenseSpec.structure and spec.in_features % (SUPERBLOCK * K_GROUP) == 0
    grid = {"curved": stored.curved, "superblocks": stored.superblocks and whole}
    return QuantizedSpec(spec, bits, stored.group, _couplings(spec, stored), fp8=stored.fp8, **grid)


def _correction(spec: Spec, stored: StoredAs, width: int) -> Spec:
    """The packed correction with the groups, up to those asked for, that take the fewest bits."""
    if stored.bits is None:
        return spec
    kept, curved = _couplings(spec, stored), stored.curved
    groups = [g for g in GROUPS if g <= stored.group]
    tried = [QuantizedSpec(spec, stored.bits, g, kept, tiled=True, curved=curved) for g in groups]
    return min(tried, key=lambda packed: packed.stored_bits(width))


def _couplings(spec: Spec, stored: StoredAs) -> int | None:
    return stored.couplings if spec.structure == BlastSpec.structure else None


def what_became(specs: Iterable[Spec], layers: str = "") -> str:
    """A line on how many layers became what, the most first; `layers` is put before the first kind."""
    (first, count), *others = Counter(map(_became, specs)).most_common()
    return f"{count} {layers}{first}" + "".join(f", {number} {became}" for became, number in others)


def _became(spec: Spec) -> str:
    if spec.corrected:
        (_, base), (_, added) = spec.parts()
        return f"stored{_packed(base)}, corrected by {added.structure}{_packed(added)}"
    if spec.structure == DENSE:
        return f"stored{_packed(spec)}"
    return f"replaced by {spec.structure}{_packed(spec)}"


def _packed(spec: Spec) -> str:
    return f" in {spec.packing.kind}" if spec.packing else ""


def native_weights(source: Source, modules: Collection[str]) -> dict[str, list[str]]:
    """The layers that each weight of transformers' checkpoints holds: one, or all of a stack."""
    found: dict[str, list[str]] = {}
    known = {*modules, *source.entries}
    for module in modules:
        name = f"{module}.weight"
        if match := EXPERT.fullmatch(module):
            home, part, number = match.groups()
            apart = ("w1.0", "gate_proj.0", "0.w1.weight", "0.gate_proj.weight")  # not of stacks
            firsts = {f"{home}.{first}" for first in apart}
            name = f"{home}.{number}.{part}.weight" if known & firsts else f"{home}.{part}"
        found.setdefault(name, []).append(module)
    return found


def check_stacks(layers: Iterable[Layer], chosen: Collection[str]) -> None:
    """Raise UsageError if of the layers in one stack some are `chosen` and some are not."""
    stacks: dict[str, list[str]] = {}
    for layer in layers:
        if layer.stack:
            home = layer.module.rsplit(".", 2)[0]
            stacks.setdefault(f"{home}.{layer.stack}", []).append(layer.module)
    for stack, modules in stacks.items():
        left = [module for module in modules if module not in chosen]
        if 0 < len(left) < len(modules):
            found = f"{len(left)} of {len(modules)} layers stay dense, from {left[0]} on"
            expected = "expected all experts of a stack or none"
            remedy = "--exclude '*.experts.*', or give them another method"
            raise UsageError(f"{stack}: {found}, and the others do not; {expected}: {remedy}")
