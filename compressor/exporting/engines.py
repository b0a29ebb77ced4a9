"""Exports for inference engines of others (`--as vllm`): what one engine is, and what all share. An
engine takes a weight in few bits, and low rank that corrects it as an adapter. What has no exact form
there is refused, or written dense with `--dense-rest`. To add an engine, write a module with a function
`engine` that returns its `Engine`, and name the module in `options.ENGINES`: that is what `--as`
takes."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_outputs import CausalLMOutput

from blr.compressor import __version__
from blr.compressor.base.errors import CapabilityError, UsageError
from blr.compressor.base.exhaustion import is_missing
from blr.compressor.checkpoint.extras import LAYERS
from blr.compressor.checkpoint.header import TensorEntry
from blr.compressor.checkpoint.source import Source
from blr.compressor.exporting.options import ENGINES, ExportOptions
from blr.compressor.exporting.origin import Checkpoint
from blr.compressor.exporting.plan import ExportPlan, dense_config, is_pair, ordinary_files
from blr.compressor.exporting.tensors import STORED, plan_tensors, unpacked_factor
from blr.compressor.loading.native import continues_text, meta_model, native_class
from blr.compressor.loading.sidecar_files import keep_tokenizer
from blr.compressor.modeling.modeling_blr import module_names
from blr.compressor.modeling.registry import register
from blr.compressor.output.files import check_fills, json_file
from blr.compressor.output.loss_messages import MARK
from blr.compressor.planning.layers import EXPERT, native_weights
from blr.compressor.structures.specs import (
    CorrectedSpec,
    DenseSpec,
    LowRankSpec,
    QuantizedSpec,
    Spec,
    stored_names,
)
from blr.kernels.decode.quantized.formats import GROUPS
from blr.kernels.decode.quantized.reference import unpack

WHAT = """{count} linear layers are in few bits ({kinds}).
All other tensors are those of a {type}."""
CARD_TEXT = """# {name}, for {title} by blr

{what}
{loss}
```sh
{commands}
```

Written by blr {version}; `blr verify` checks the files against `blr_manifest.json`.
"""
IMPORTED = {"llama-cpp-python": "llama_cpp"}  # packages that are imported by another name
CURVED = "int3 on the curved grid, which no engine has; compress again with --grid uniform"
PLACE = "OUT"  # stands for the folder in the commands of a card


@dataclass(frozen=True)
class FewBits:
    """A layer that `refusal` lets pass: a weight in few bits, perhaps with low rank that corrects it."""

    source: Source
    module: str
    spec: Spec

    @property
    def expert(self) -> str:
        """The module of the experts that it is a layer of one of; "" for other layers."""
        found = EXPERT.fullmatch(self.module)
        return found[1] if found else ""

    @property
    def base(self) -> QuantizedSpec:
        """How the weight is stored."""
        base = _base(self.spec)
        assert base is not None
        return base

    @property
    def correction(self) -> Spec | None:
        return self.spec.correction if isinstance(self.spec, CorrectedSpec) else None

    @property
    def rank(self) -> int:
        """The rank of the correction, 0 without one."""
        plain = self.correction and self.correction.plain
        return plain.rank if isinstance(plain, LowRankSpec) else 0

    @property
    def entries(self) -> list[TensorEntry]:
        """The stored levels and scales of the weight."""
        part = self.spec.parts()[0][0]
        prefix = f"{self.module}.{part}." if part else f"{self.module}."
        return [self.source.entries[f"{prefix}{name}"] for name in stored_names("weight")]

    def stored(self, dtype: str | None) -> str:
        """safetensors' name of `dtype`, torch's name; None: that of the scales, which is the model's."""
        return STORED[dtype] if dtype else self.entries[1].dtype

    def levels(self) -> tuple[Tensor, Tensor]:
        """Integer levels int8 [o, i] and scales [o, groups] of the weight."""
        (packed, scale), base = map(self.source.load_tensor, self.entries), self.base
        return unpack(packed, base.bits, base.group)[:, : base.in_features], scale

    def factor(self, name: str, dtype: str) -> Tensor:
        """The factor "V" [r, i] or "U" [o, r] of the correction, in a dtype of torch."""
        assert self.correction is not None
        return unpacked_factor(self.source, f"{self.module}.correction", self.correction, name, dtype)


def layers_of(checkpoint: Checkpoint) -> list[FewBits]:
    """All layers of a checkpoint that has no others."""
    return [FewBits(checkpoint.source, module, spec) for module, spec in checkpoint.specs.items()]


@dataclass(frozen=True)
class Engine:
    """An inference engine, and how a folder for it is planned, run and checked.

    Attributes:
        name: of `--as`. title: as its authors write it.
        packages: what `load` imports, as pip names them; where one is missing nothing is run.
        refusal: why a layer has no exact form there, "" if it has one.
        kind: what a layer is stored as there, and adapter: what corrects layers, in words.
        plan: plans the folder from headers, given a plan with the native configuration and all tensors
            but those of layers in few bits.
        load: loads a written folder in a dtype of torch, or "auto". The result is called and asked as a
            causal language model of transformers is: ``model(input_ids=ids).logits``, ``model.config``.
        commands: the shell commands that run a folder, given its path and its plan.
        otherwise: another way to run there what it has no form of, as the end of a sentence.
        experts: model types whose experts it takes, in few bits or dense.
    """

    name: str
    title: str
    packages: tuple[str, ...]
    refusal: Callable[[FewBits], str]
    kind: Callable[[FewBits], str]
    adapter: str
    plan: Callable[[ExportPlan, ExportOptions], ExportPlan]
    load: Callable[[Path, object], Any]
    commands: Callable[[str, ExportPlan], list[str]]
    otherwise: str = ""
    experts: Collection[str] = ()

    @property
    def missing(self) -> list[str]:
        """The packages that are not installed."""
        imported = {name: IMPORTED.get(name, name.replace("-", "_")) for name in self.packages}
        return [name for name, module in imported.items() if is_missing(module)]


def engine_of(kind: str) -> Engine | None:
    """The engine that `--as kind` names; None for the other forms."""
    if kind not in ENGINES:
        return None
    return import_module(f"blr.compressor.exporting.{kind}").engine()  # type: ignore[no-any-return]


def plan_for(checkpoint: Checkpoint, options: ExportOptions) -> ExportPlan:
    """Plan an export for the engine of `--as`. Raises UsageError for layers without a form there, unless
    they are to be dense, and where none has one; as `engine.plan`."""
    engine = engine_of(options.kind)
    assert engine is not None
    rest = _without_form(checkpoint, engine, options.dense_rest)
    plan = engine.plan(_begun(checkpoint, engine, rest, options.dtype), options)
    return replace(plan, small_files=partial(_small_files, engine, plan, options))


def _without_form(checkpoint: Checkpoint, engine: Engine, dense: bool) -> dict[str, Spec]:
    """The layers without a form in `engine`. Raises UsageError for them unless they are to be `dense`,
    where there are no others, and for a model that it does not take."""
    source, strange = checkpoint.source, _strange_modules(checkpoint, engine)
    layers = layers_of(checkpoint)
    reasons = {layer.module: strange.get(layer.module) or refusal(engine, layer) for layer in layers}
    rest = {module: checkpoint.specs[module] for module, reason in reasons.items() if reason}
    said = remedy = ""
    if rest and not dense:
        module = next(iter(rest))
        said = f"{len(rest)} layers have no form in {engine.title}, as {module} ({reasons[module]})"
        remedy = f"add --dense-rest to write those dense, or take --as dense{engine.otherwise}"
    elif source.model_type not in engine.experts and any(".experts." in n for n in source.entries):
        said = f"{source.folder} has experts, which blr does not write for {engine.title}"
        remedy = "take --as dense"
    elif not continues_text(source):
        said, remedy = f"{source.model_type} writes no text", "take --as onnx"
    elif len(rest) == len(checkpoint.specs):
        said = f"{source.folder} has no layer in few bits that {engine.title} takes"
        remedy = "compress with --quantize int4 first, or take --as dense"
    if said:
        raise UsageError(f"--as {engine.name}: {said}; {remedy}")
    return rest


def refusal(engine: Engine, layer: FewBits) -> str:
    """Why a layer has no exact form in `engine`; "" if it has one."""
    spec, correction = layer.spec, layer.correction
    if _base(spec) is None:
        return f"{spec.structure} {spec.describe()} in the place of a weight"
    if correction is not None and not is_pair(correction):
        return f"a correction by {correction.structure}, which is no adapter of low rank"
    return engine.refusal(layer)


def _strange_modules(checkpoint: Checkpoint, engine: Engine) -> dict[str, str]:
    """The layers that are no linear layer of their own in the model, and why; but for experts that a
    checkpoint has one by one, where `engine` takes them."""
    source = checkpoint.source
    model = meta_model(source)
    modules, names = dict(model.named_modules()), module_names(model, checkpoint.specs)
    known = {m for m, name in names.items() if type(modules.get(name)) is nn.Linear}
    known |= (
        set(_native_names(source, checkpoint.specs)) if source.model_type in engine.experts else set()
    )
    return {m: "no nn.Linear of its own" for m in checkpoint.specs if m not in known}


def _native_names(source: Source, modules: Collection[str]) -> dict[str, str]:
    """What native checkpoints call `modules`, but for those whose weight is a part of a stack."""
    found = native_weights(source, modules).items()
    named = {each[0]: name for name, each in found if name.endswith(".weight")}
    return {module: name.removesuffix(".weight") for module, name in named.items()}


def _base(spec: Spec) -> QuantizedSpec | None:
    """How the weight of a layer is stored in integers of few bits; None if it is not."""
    base = spec.parts()[0][1].packing
    return None if base is None or base.fp8 or base.structure != DenseSpec.structure else base


def pack(levels: Tensor, bits: int) -> Tensor:
    """Levels int8 [o, i] as words int32 [o, i·bits/32]: level + 2^(bits - 1), the lowest bits first."""
    codes = levels.to(torch.int16) + 2 ** (bits - 1)
    codes = torch.nn.functional.pad(codes, (0, -levels.shape[1] % 32)).to(torch.uint8)
    stream = (codes.unsqueeze(-1) >> torch.arange(bits, dtype=torch.uint8) & 1).flatten(-2)
    weights = 1 << torch.arange(8, dtype=torch.uint8)
    octets = (stream.unflatten(-1, (-1, 8)) * weights).sum(-1, dtype=torch.uint8)
    words = -(-levels.shape[1] * bits // 32)
    return octets.contiguous().view(torch.int32)[:, :words]


def _begun(
    checkpoint: Checkpoint, engine: Engine, rest: Mapping[str, Spec], dtype: str | None
) -> ExportPlan:
    """What is there before an engine plans. Raises InputError where it does not fill the model."""
    source = checkpoint.source
    kept = {module: spec for module, spec in checkpoint.specs.items() if module not in rest}
    register(source.model_type)  # tokenizers of the source are loaded by its model type
    plan_tensors(source, kept, None)  # checks that they are stored
    taken = {f"{module}.{name}" for module, spec in kept.items() for name in spec.stored()}
    entries = {name: entry for name, entry in source.entries.items() if name not in taken}
    others = plan_tensors(replace(source, entries=entries), {}, dtype, None, rest)
    names = _native_names(source, kept)
    dense = {f"{names[m]}.weight": (s.out_features, s.in_features) for m, s in kept.items()}
    config = dense_config(source, dtype)
    check_fills(source, native_class(source), config, others.shapes | dense)
    return ExportPlan(
        checkpoint=replace(checkpoint, specs=kept),
        stored=checkpoint.specs,
        config=config,
        tensors=others,
        small_files=dict,
        check_loads=partial(keep_tokenizer, source.folder),
        described={"engine": engine.name, "layers": sorted(kept)},
        names=names,
    )


def stored_bits(plan: ExportPlan) -> dict[str, float]:
    """By layer in few bits, the bits a weight of all that is written for it but its bias."""
    slots = [slot for each in (plan.tensors.slots, *plan.beside.values()) for slot in each]
    found = {}
    for module, spec in plan.checkpoint.specs.items():
        name = plan.names.get(module, module)
        own = [s for s in slots if f"{name}." in s.name and not s.name.endswith(".bias")]
        found[module] = 8 * sum(slot.origin.nbytes for slot in own) / spec.dense_parameters
    return found


def _small_files(engine: Engine, plan: ExportPlan, options: ExportOptions) -> dict[str, bytes | Path]:
    """Card, record of the layers, configuration and carried files of an export."""
    source, name = plan.checkpoint.source, options.source_name
    told = {"name": name, "title": engine.title, "what": _told(engine, plan.checkpoint), "loss": MARK}
    commands = "\n".join(engine.commands(PLACE, plan))
    card = CARD_TEXT.format(**told, commands=commands, version=__version__)
    records: dict[str, Any] = {
        module: {"type": module.rpartition(".")[2], "spec": spec.to_dict(), "error": None, "notes": []}
        for module, spec in plan.checkpoint.specs.items()
    }
    for module, bits in stored_bits(plan).items():
        records[module]["bits"] = bits
    return ordinary_files(source, plan.config, card, name, {**plan.more, LAYERS: json_file(records)})


def _told(engine: Engine, kept: Checkpoint) -> str:
    layers = layers_of(kept)
    kinds = ", ".join(f"{n} {kind}" for kind, n in Counter(map(engine.kind, layers)).items())
    said = WHAT.format(count=len(layers), kinds=kinds, type=kept.source.model_type)
    corrected = sum(layer.correction is not None for layer in layers)
    return said + (f"\n{engine.adapter} corrects {corrected} of them." if corrected else "")


# Types of models and their activation, and scalings of rotary positions, that MLX and llama.cpp compute
# as transformers does
TYPES = dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), "silu")
ROTARY = ("default", "linear", "llama3")


def check_decoder(
    source: Source, engine: Engine, types: Mapping[str, str] = TYPES, rotary: Collection[str] = ROTARY
) -> PreTrainedConfig:
    """The configuration of a model that `engine` computes as transformers does. Raises CapabilityError
    for types and activations that `types` does not have, and scalings that `rotary` does not."""
    config = meta_model(source).config
    if source.model_type not in types:
        raise unlike(source, engine, f"a model of type {source.model_type}", *types)
    activation = getattr(config, "hidden_act", None) or config.hidden_activation
    if activation != types[source.model_type]:
        raise unlike(source, engine, f"the activation {activation}", types[source.model_type])
    for positions in rotary_of(config).values():
        if positions["rope_type"] not in rotary:
            said = f"rotary positions of type {positions['rope_type']}"
            raise unlike(source, engine, said, *rotary)
    return config


def rotary_of(config: PreTrainedConfig) -> dict[str, dict[str, Any]]:
    """The rotary positions of a model by type of layer, "" where all have the same."""
    found = config.rope_parameters
    return {"": found} if "rope_type" in found else found


def unlike(source: Source, engine: Engine, found: str, *expected: str) -> CapabilityError:
    """The error that `engine` computes a model otherwise than transformers does."""
    return CapabilityError(
        f"--as {engine.name}: {source.folder} has {found}, expected {' or '.join(expected)}; "
        "take --as vllm or --as dense"
    )


def window_told(config: PreTrainedConfig, engine: Engine) -> tuple[str, ...]:
    """A note on a sliding window of attention, which `engine` does not have in these model types."""
    window = getattr(config, "sliding_window", None)
    if window is None or window >= config.max_position_embeddings:
        return ()
    said = f"{engine.title} attends to all tokens before, the model to the last {window}"
    return (f"{said}: they agree up to {window} tokens",)


def blocks_refusal(layer: FewBits) -> str:
    """Why MLX and llama.cpp have no exact form of a weight in few bits; "" if they have one."""
    base = layer.base
    if base.bits == 3 and base.curved:
        return CURVED
    if not finest(base.group, base.in_features):
        return f"{base.in_features} inputs, which 32 does not divide"
    return ""


def finest(group: int, inputs: int) -> int:
    """The largest group of 128, 64 or 32 that divides both `group` and `inputs`; 0 if there is none."""
    return next((each for each in GROUPS if each <= group and inputs % each == 0), 0)


class ForeignModel:
    """A model of another library that is called as those of transformers are. `logits` computes them,
    [batch, tokens, vocabulary], from tokens [batch, tokens]."""

    def __init__(self, folder: Path, logits: Callable[[Tensor], Tensor]) -> None:
        self.config = AutoConfig.from_pretrained(folder, local_files_only=True)
        self.logits = logits

    def __call__(self, input_ids: Tensor, return_dict: bool = True) -> CausalLMOutput:
        return CausalLMOutput(logits=self.logits(input_ids))
