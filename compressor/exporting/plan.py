"""Plans an export from headers alone, and checks that it will load. `plan_export` is of folders with
kernels, `plan_ordinary` of those for tools that know nothing of blr. A dense one has the native model
type and class and no Python file. A plain one has low-rank layers as pairs of `nn.Linear`, for
quantizers, adapters and servers that replace `nn.Linear`. It needs one Python file, since no model of
transformers has pairs."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import GenerationMixin, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from blr.compressor import __version__
from blr.compressor.base.device import pick_device
from blr.compressor.base.errors import CapabilityError, UsageError
from blr.compressor.checkpoint.extras import CARD, inert
from blr.compressor.checkpoint.header import TensorEntry
from blr.compressor.checkpoint.source import Source
from blr.compressor.exporting import files
from blr.compressor.exporting.forward import check_pt2
from blr.compressor.exporting.options import DEFAULT_CONTEXT, ExportOptions
from blr.compressor.exporting.origin import FORMAT, Checkpoint
from blr.compressor.exporting.quantizer import Quantizer, find_head, make_quantizer
from blr.compressor.exporting.tensors import STORED, Tensors, plan_tensors
from blr.compressor.loading.native import meta_model, native_class, quiet_transformers, read_context
from blr.compressor.loading.vendor import code_files
from blr.compressor.modeling.modeling_blr import LAYOUT, module_names
from blr.compressor.modeling.models import model_class
from blr.compressor.modeling.registry import auto_name, declared_keys, register
from blr.compressor.modeling.settings import ExportSettings
from blr.compressor.output.card import TAGS, card_front
from blr.compressor.output.files import (
    carried_files,
    check_fills,
    check_loads,
    filled_class,
    json_file,
    structured_config,
)
from blr.compressor.output.loss_messages import MARK
from blr.compressor.planning.layers import TRANSPOSED
from blr.compressor.planning.plan import Plan
from blr.compressor.runtime.failures import CACHES
from blr.compressor.structures.specs import KroneckerSpec, LowRankSpec, Spec, families
from blr.compressor.workspace.shards import Slot

WHOLE, INT8 = CACHES
ROUNDED = ("int8", "int4")  # caches of ranks beside which the runtime's in int8 loses nothing

DENSE = """# {name}, made dense by blr

{count} structured layers multiplied out to dense weights: an ordinary {type} checkpoint of the size of
the model it came from, with the losses of its compression. Any tool that takes {type} takes it. Written
by blr {version}; `blr verify` checks the files against `blr_manifest.json`.
{loss}"""
PLAIN = """# {name}, in plain linear layers by blr

{pairs} low-rank layers are two `nn.Linear` each, `V` and then `U`{dense}.
{loss}
```python
from transformers import {auto}
model = {auto}.from_pretrained(folder, trust_remote_code=True)
```

needs torch and transformers. Written by blr {version}; `blr verify` checks the files against
`blr_manifest.json`.
"""


def export_context(checkpoint: Checkpoint, asked: int | None, default: int) -> int | None:
    """How many tokens of context to prepare generation for; None for a model that does not generate.
    Raises UsageError: a context for an encoder; CapabilityError: more than the model has positions;
    InputError: a model type or architecture that transformers does not have."""
    source = checkpoint.source
    native = native_class(source)
    if not issubclass(native, GenerationMixin):
        if asked is not None:
            kind = native.__name__
            raise UsageError(f"--context {asked}: {kind} generates no text, leave the option out")
        return None
    limit = read_context(source)
    if asked is not None and asked > limit:
        raise CapabilityError(f"--context {asked}: the model has {limit} positions; choose at most that")
    return asked or min(limit, default)


def load_export(folder: Path, config: Mapping[str, Any], device: str = "auto") -> PreTrainedModel:
    """Load the model in `folder` for evaluation. device: "auto" takes a GPU if there is one."""
    with quiet_transformers():
        model = model_class(config["architectures"][0]).from_pretrained(folder, dtype="auto")
    return model.to(pick_device(device)).eval()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class ExportPlan:
    """The contents of one export.

    Attributes:
        checkpoint: with the layers that stay structured. stored: specs of all that it holds on disk.
        config: the export's config.json. small_files: everything but weights and manifest. check_loads:
            of the written folder, with the files that it rewrote. described: what a run that goes on
            must agree on.
        settings: what it was made for; None for an ordinary dense checkpoint.
        beside: tensors in files of their own, that no index lists. headers: of those that are no
            safetensors, by file. names: of layers in few bits there, where they are others. told: notes
            on what is written. draft: the model beside it, whose file is one of `beside`. more: small
            files of an engine alone.
    """

    checkpoint: Checkpoint
    stored: Mapping[str, Spec]
    config: dict[str, Any]
    tensors: Tensors
    small_files: Callable[[], dict[str, bytes | Path]]
    check_loads: Callable[[Path], dict[str, tuple[int, str]]]
    described: dict[str, object]
    settings: ExportSettings | None = None
    quantizer: Quantizer | None = None
    beside: Mapping[str, list[Slot]] = field(default_factory=dict)
    told: tuple[str, ...] = ()
    headers: Mapping[str, bytes] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    draft: files.Draft | None = None
    more: Mapping[str, bytes] = field(default_factory=dict)

    def source_of(self, entry: TensorEntry) -> Source:
        """The checkpoint that a tensor is read from."""
        beside = self.draft is not None and entry.file in self.draft.source.shards
        return self.draft.source if self.draft is not None and beside else self.checkpoint.source

    @property
    def densified(self) -> list[str]:
        """The modules whose dense weight is written."""
        return sorted(self.stored.keys() - self.checkpoint.specs.keys())

    @property
    def nbytes(self) -> int:
        beside = (slot.origin.nbytes for slots in self.beside.values() for slot in slots)
        return self.tensors.nbytes + sum(beside)

    @property
    def untied_bytes(self) -> int:
        """The bytes of a packed head that was the embedding before."""
        head = self.quantizer.head if self.quantizer is not None else None
        if head is None or not head.tied:
            return 0
        mine = [slot for slot in self.tensors.slots if slot.name.startswith(f"{head.module}.weight_")]
        return sum(slot.origin.nbytes for slot in mine)


def plan_export(checkpoint: Checkpoint, options: ExportOptions) -> ExportPlan:
    """Plan an export with layers in kernel layout, packed as `options` say. Raises BlrError for options
    that this model or machine has no use for, and for tensors that would not load."""
    source, specs = checkpoint.source, checkpoint.specs
    context = export_context(checkpoint, options.context, DEFAULT_CONTEXT)
    if options.kind == "pt2":
        check_pt2(source.model_type, generates=context is not None)
    quantizer = _make_quantizer(checkpoint, options)
    packed = {} if quantizer is None else quantizer.settings()
    cache = _cache(checkpoint, options, generates=context is not None)
    tensors = plan_tensors(source, specs, options.dtype, quantizer)
    draft = None
    if options.draft is not None:
        if options.batch > files.MOST_DRAFTED:
            said = f"with --draft up to {files.MOST_DRAFTED} sequences are decoded at once"
            raise CapabilityError(f"--batch {options.batch}: {said}; lower it")
        packed |= {"draft": options.draft}
    if options.small is not None:
        draft = files.open_draft(Path(options.small), checkpoint, context or 0, tensors.shapes)
        packed |= {"draft": draft.name}
    use = options.target, options.batch, __version__, context, cache
    settings = ExportSettings(LAYOUT, *use, **packed)
    config = files.export_config(checkpoint, settings, options.dtype, options.self_contained)
    cls = filled_class(source, config, tensors.shapes)
    about = settings, options.source_name, options.kind, draft
    slow = sum(map(without_kernels, specs.values()))
    said = f"{slow} layers of formats without kernels are unpacked by torch wherever they compute"
    return ExportPlan(
        checkpoint=checkpoint,
        stored=specs,
        config=config,
        tensors=tensors,
        small_files=partial(files.small_files, checkpoint, config, *about),
        check_loads=partial(check_loads, source, cls),
        described=config["blr"]["export"],
        settings=settings,
        quantizer=quantizer,
        beside={} if draft is None else draft.beside,
        told=(said,) if slow else (),
        draft=draft,
    )


def _cache(checkpoint: Checkpoint, options: ExportOptions, generates: bool) -> str:
    """How the runtime keeps keys and values: as asked, else as the checkpoint does. Raises UsageError
    where that is asked for a model that generates no text."""
    asked = options.kv_quantize
    if asked is not None and not generates:
        raise UsageError(f"--kv-quantize {asked}: this model generates no text, leave the option out")
    held = (checkpoint.source.config.get("blr") or {}).get("kv_cache")
    return INT8 if asked == INT8 or (asked is None and held in ROUNDED) else WHOLE


def _refuse_packed(checkpoint: Checkpoint, modules: Iterable[str], option: str) -> None:
    """Raise UsageError if one of `modules` is stored in few bits already."""
    packed = [module for module in modules if checkpoint.specs[module].quantized]
    if packed:
        found = f"{checkpoint.source.folder} holds {packed[0]} and {len(packed) - 1} more layers"
        said = "in few bits already, and they are exported as they are"
        raise UsageError(f"{option}: {found} {said}; leave the option out")


def without_kernels(spec: Spec) -> bool:
    """Whether the decoding runtime computes a layer by its own forward pass in plain torch."""
    packings = [leaf.packing for _, leaf in spec.parts() if leaf.packing is not None]
    if len(spec.parts()) == 1:
        return any(packing.fp8 or packing.tiled for packing in packings)
    return any(packing.fp8 for packing in packings) or KroneckerSpec.structure in families(spec)


def _make_quantizer(checkpoint: Checkpoint, options: ExportOptions) -> Quantizer | None:
    """The quantizer that `options` ask for. Raises UsageError for layers in few bits already."""
    source, specs, head = checkpoint.source, checkpoint.specs, None
    if (kind := options.quantize_head) is not None:
        head = find_head(source, specs, kind)
        if head.weight is None:
            _refuse_packed(checkpoint, [head.module], f"--quantize-head {kind}")
    if options.quantize is not None:
        _refuse_packed(checkpoint, specs, f"--quantize {options.quantize}")
    elif head is None:
        return None
    dtype = STORED[options.dtype] if options.dtype else None
    return make_quantizer(source, specs, options.quantize, dtype, head)


def plan_ordinary(checkpoint: Checkpoint, options: ExportOptions) -> ExportPlan:
    """Plan an export as dense or plain: low-rank layers as pairs in a plain one, all others dense.
    Raises UsageError: no layer is low-rank; InputError: tensors that would not load."""
    source, specs, plain = checkpoint.source, checkpoint.specs, options.kind == "plain"
    pairs = {module: spec for module, spec in specs.items() if plain and is_pair(spec)}
    rest = {module: spec for module, spec in specs.items() if module not in pairs}
    if plain and not pairs:
        raise UsageError(f"--as plain: {source.folder} has no low-rank layer; take --as dense")
    turned, config = transposed_modules(checkpoint), dense_config(source, options.dtype)
    tensors = plan_tensors(source, {}, options.dtype, None, rest, turned, pairs)
    told = {"name": options.source_name, "version": __version__, "loss": MARK}
    if plain:
        config = plain_config(config, pairs)
        cls = filled_class(source, config, tensors.shapes)
        dense = f"; {len(rest)} of other form are dense" if rest else ""
        card = PLAIN.format(**told, pairs=len(pairs), dense=dense, auto=auto_name(config))
    else:
        register(source.model_type)  # tokenizers of the source are loaded by its model type
        cls = native_class(source)
        check_fills(source, cls, config, tensors.shapes)
        card = DENSE.format(**told, count=len(rest), type=source.model_type)
    code = code_files() if plain else {}
    return ExportPlan(
        checkpoint=replace(checkpoint, specs=pairs),
        stored=specs,
        config=config,
        tensors=tensors,
        small_files=partial(ordinary_files, source, config, card, options.source_name, code),
        check_loads=partial(check_loads, source, cls),
        described={"pairs": sorted(pairs)} if plain else {},
    )


def dense_config(source: Source, dtype: str | None) -> dict[str, object]:
    """Make config.json of the native model, with `dtype` (torch's name) if one is given."""
    config = inert(dict(source.config), declared_keys(source.model_type))
    if dtype is None:
        return config
    return {**{key: value for key, value in config.items() if key != "torch_dtype"}, "dtype": dtype}


def transposed_modules(checkpoint: Checkpoint) -> set[str]:
    """The structured modules whose dense layers store their weight as [i, o], as GPT-2's do."""
    turned = checkpoint.source.model_type in TRANSPOSED
    model = meta_model(checkpoint.source)
    modules = dict(model.named_modules())
    named = module_names(model, checkpoint.specs)
    conv1d = {stored for stored, name in named.items() if isinstance(modules.get(name), Conv1D)}
    return conv1d | {stored for stored in named if turned and ".experts." in stored}


def is_pair(spec: Spec) -> bool:
    """Whether a layer becomes a pair: low rank that is not in groups, packed or not."""
    plain = spec.plain
    return isinstance(plain, LowRankSpec) and plain.groups == 1


def plain_config(dense: dict[str, object], pairs: dict[str, Spec]) -> dict[str, object]:
    """Make config.json with our model type and classes, and the sizes of every pair."""
    config = structured_config(dense, Plan([]))
    sizes = {}
    for name, s in pairs.items():
        rank = s.shapes()["V"][-1]
        sizes[name] = {"in_features": s.in_features, "out_features": s.out_features, "rank": rank}
    config["blr"] = {"format": FORMAT, "pairs": sizes}
    return config


def ordinary_files(
    source: Source, config: Mapping[str, object], card: str, name: str, more: Mapping[str, bytes]
) -> dict[str, bytes | Path]:
    """All files of an export for other tools but weights and manifest. name: of the source."""
    card = card_front(source.folder, name, TAGS[:1]) + card
    return {**carried_files(source), "config.json": json_file(config), CARD: card.encode(), **more}
