"""Plans folders for llama.cpp (`--as gguf`): one file in GGUF, and corrections as an adapter in
another. A weight in 8 bits becomes Q8_0, one in 4, 3 or 2 bits Q4_0, with the values that it had. That
takes 8.5 and 4.5 bits a weight. On the grids q2_k and q3_k it becomes Q2_K or Q3_K, of 2.6 and 3.4
bits. Groups are of 32; larger ones repeat their scale. Scales are in float16 there: those of bfloat16
are exact down to 6e-5, others are rounded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from shlex import quote

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from blr.compressor.base.errors import CapabilityError, NumericsError
from blr.compressor.checkpoint.source import Source
from blr.compressor.exporting.engines import (
    Engine,
    FewBits,
    ForeignModel,
    blocks_refusal,
    layers_of,
    rotary_of,
    window_told,
)
from blr.compressor.exporting.gguf_file import BLOCK, File, blocks, counted, superblocks
from blr.compressor.exporting.gguf_models import REMEDY, GgufModel, check_architecture, tokenizer_values
from blr.compressor.exporting.options import ExportOptions
from blr.compressor.exporting.plan import ExportPlan
from blr.compressor.exporting.tensors import Make, Tensors
from blr.compressor.loading.load import load_tokenizer
from blr.compressor.loading.sidecar_files import keep_tokenizer
from blr.compressor.loading.tokenizer import PROBE
from blr.compressor.output.files import Written
from blr.compressor.structures.specs import QuantizedSpec
from blr.kernels.decode.quantized.formats import SUPERBLOCK

MODEL, ADAPTER = "model.gguf", "adapter.gguf"
# alpha 0: the product of the factors is added as it is, at any rank
ADAPTER_VALUES = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 0.0}
CONTEXT = 2048  # tokens that a check reads at most


def engine() -> Engine:
    """llama.cpp by llama-cpp-python."""
    how = blocks_refusal, kind, f"The adapter `{ADAPTER}`", plan, load, commands
    return Engine("gguf", "llama.cpp", ("llama-cpp-python",), *how)


def kind(layer: FewBits) -> str:
    """What a layer is stored as."""
    base = layer.base
    return f"Q{base.bits}_K" if base.superblocks else "Q8_0" if base.bits == 8 else "Q4_0"


def plan(begun: ExportPlan, options: ExportOptions) -> ExportPlan:
    """The whole plan. Raises CapabilityError for models and tokenizers that llama.cpp does not have."""
    source, layers = begun.checkpoint.source, layers_of(begun.checkpoint)
    make = dict(begun.tensors.make)
    native = GgufModel(check_architecture(source, engine()))
    values = native.values(options.source_name)
    values |= tokenizer_values(source.folder, native.config.vocab_size)
    model = File(values, Tensors(source, make=make))
    adapter = File(ADAPTER_VALUES | native.type, Tensors(source, make=make))
    _add_others(model, source, native, begun.tensors)
    for layer in layers:
        _add_packed(model, native, layer)
        if layer.rank:
            _add_adapter(adapter, native, layer)
    files = {MODEL: model} | ({ADAPTER: adapter} if adapter.infos else {})
    named = {layer.module: native.name_of(f"{layer.module}.weight") for layer in layers}
    window = () if native.architecture.period else window_told(native.config, engine())
    return replace(
        begun,
        tensors=Tensors(source, make=make),
        check_loads=partial(_check_loads, source),
        beside={name: file.tensors.slots for name, file in files.items()},
        told=_told(layers) + window,
        headers={name: file.header() for name, file in files.items()},
        names={module: name.removesuffix(".weight") for module, name in named.items()},
    )


def _told(layers: Sequence[FewBits]) -> tuple[str, ...]:
    wider = [layer for layer in layers if kind(layer) == "Q4_0" and layer.base.bits < 4]
    said = (
        f"{len(wider)} layers of under 4 bits are written as Q4_0: the same values in 4.5 bits a weight"
    )
    if any(layer.spec.in_features % (SUPERBLOCK * BLOCK) == 0 for layer in wider):
        said += "; --grid q2_k or q3_k of blr compress keeps int2 or int3 as they are"
    return (said,) if wider else ()


def _add_others(model: File, source: Source, native: GgufModel, others: Tensors) -> None:
    """Add the tensors beside the layers in few bits, and the factors of rotary positions."""
    config = native.config
    for slot in others.slots:
        name, entry = native.name_of(slot.name), slot.origin
        if slot.name.endswith("rotary_emb.inv_freq") or (
            slot.name == "lm_head.weight" and config.tie_word_embeddings
        ):
            continue
        if not name:
            found = f"llama.cpp has no place for {slot.name} of a {config.model_type}"
            raise CapabilityError(f"--as gguf: {found}; {REMEDY}")
        kind = entry.dtype if len(entry.shape) > 1 and entry.dtype in ("F16", "BF16") else "F32"
        read = others.make.get(entry) or partial(source.load_tensor, entry)
        make = partial(_plain, read, kind, native.row_order(name), native.added_to(name))
        model.add(name, kind, entry.shape, make)
    if rotary_of(config).get("", {}).get("rope_type") == "llama3":
        factors = rotary_factors(config)
        model.add("rope_freqs.weight", "F32", tuple(factors.shape), lambda: factors)


def _plain(read: Make, kind: str, order: Tensor | None, added: float = 0.0) -> Tensor:
    """A tensor in a plain type, its rows in `order`, plus `added` where it is F32."""
    found = read() if order is None else read()[order]
    return found.float() + added if kind == "F32" else found


def rotary_factors(config: PreTrainedConfig) -> Tensor:
    """By what llama.cpp divides the frequencies of rotary positions, for a Llama 3."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    places = torch.arange(len(scaled), dtype=torch.float32) / len(scaled)
    return config.rope_parameters["rope_theta"] ** -places / scaled


def _add_packed(model: File, native: GgufModel, layer: FewBits) -> None:
    shape = layer.spec.out_features, layer.spec.in_features
    name = native.name_of(f"{layer.module}.weight")
    model.add(name, kind(layer), shape, partial(_blocks, layer, native.row_order(name)))


def _blocks(layer: FewBits, order: Tensor | None) -> Tensor:
    base, (levels, scale) = layer.base, layer.levels()
    each = scale.repeat_interleave(base.group // BLOCK, 1)[:, : base.in_features // BLOCK]
    if not _held(each, base):
        said = f"scales of {layer.module} beyond float16, which GGUF holds"
        raise NumericsError(f"{layer.source.folder}: {said}; take --as mlx")
    rows = slice(None) if order is None else order
    form = superblocks if base.superblocks else blocks
    return form(levels[rows], each[rows], base.bits)


def _held(scale: Tensor, base: QuantizedSpec) -> bool:
    if base.superblocks:
        scale = counted(scale.float().unflatten(-1, (-1, SUPERBLOCK)), base.bits)[0]
    return bool(scale.to(torch.float16).isfinite().all())


def _add_adapter(adapter: File, native: GgufModel, layer: FewBits) -> None:
    """Add the factors of a correction."""
    name, spec = native.name_of(f"{layer.module}.weight"), layer.spec
    for factor, part, shape, order in (
        ("V", "lora_a", (layer.rank, spec.in_features), None),
        ("U", "lora_b", (spec.out_features, layer.rank), native.row_order(name)),
    ):
        make = partial(_plain, partial(layer.factor, factor, "float32"), "F32", order)
        adapter.add(f"{name}.{part}", "F32", shape, make)


def load(folder: Path, dtype: object = "auto") -> ForeignModel:
    """The model in a written folder, by llama-cpp-python alone, which computes in types of its own."""
    import llama_cpp

    llama_cpp.llama_log_set(_silent(), None)
    context = min(json.loads((folder / "config.json").read_bytes())["max_position_embeddings"], CONTEXT)
    size = {"n_ctx": context, "n_batch": context, "n_ubatch": context}
    adapter = str(folder / ADAPTER) if (folder / ADAPTER).is_file() else None
    how = {"lora_path": adapter, "logits_all": True, "verbose": False}
    model = llama_cpp.Llama(str(folder / MODEL), **size, **how)

    def logits(ids: Tensor) -> Tensor:
        found = []
        for row in ids.tolist():
            model.reset()
            model.eval(row)
            found.append(torch.tensor(model.scores[: len(row)]))
        return torch.stack(found)

    return ForeignModel(folder, logits)


def _check_loads(source: Source, folder: Path) -> Written:
    """Check the tokenizer of a written folder, by llama.cpp where that is installed. Raises
    CapabilityError where it reads a text as other tokens."""
    written = keep_tokenizer(source.folder, folder)
    if not engine().missing:
        import llama_cpp

        llama_cpp.llama_log_set(_silent(), None)
        reader = llama_cpp.Llama(str(folder / MODEL), vocab_only=True, verbose=False)
        found = reader.tokenize(PROBE.encode(), add_bos=True, special=False)
        if found != load_tokenizer(source.folder)(PROBE).input_ids:
            said = f"llama.cpp reads a text as other tokens than the tokenizer of {source.folder}"
            raise CapabilityError(f"--as gguf: {said}, expected the same; {REMEDY}")
    return written


@cache
def _silent() -> object:
    """A function for the messages of llama.cpp, which says nothing; llama.cpp keeps it."""
    import llama_cpp

    return llama_cpp.llama_log_callback(lambda level, text, data: None)


def commands(folder: str, made: ExportPlan) -> list[str]:
    """The command that generates from a folder."""
    adapter = f" --lora {quote(f'{folder}/{ADAPTER}')}" if ADAPTER in made.beside else ""
    return [f'llama-cli -m {quote(f"{folder}/{MODEL}")}{adapter} -p "A prompt"']
