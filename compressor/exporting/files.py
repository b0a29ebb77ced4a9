"""The small files of an export: configuration, model card, what is carried over, and those of a second,
smaller model, the draft, which proposes tokens to the first one."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import Any, cast

from blr.compressor import __version__
from blr.compressor.base.errors import CapabilityError, OutputError, UsageError
from blr.compressor.checkpoint.context import NGRAM
from blr.compressor.checkpoint.extras import CARD, LAYERS, MAX_BYTES, METRICS
from blr.compressor.checkpoint.regular import inside, read_whole
from blr.compressor.checkpoint.source import Source, open_source
from blr.compressor.exporting.origin import FORMAT, Checkpoint, open_checkpoint
from blr.compressor.loading.loader import load_empty, misfit
from blr.compressor.loading.native import read_context
from blr.compressor.loading.sidecar_files import token_ids
from blr.compressor.loading.vendor import code_files, exported_classes, needless, runtime_files
from blr.compressor.modeling.models import model_class
from blr.compressor.modeling.registry import auto_name
from blr.compressor.modeling.settings import ExportSettings
from blr.compressor.output.card import LOADING, card_front
from blr.compressor.output.files import carried_files, filled_class, json_file, structured_config
from blr.compressor.output.loss_messages import MARK
from blr.compressor.planning.plan import Plan
from blr.compressor.runtime.drafted import ENDS, FOLDER, WEIGHTS
from blr.compressor.runtime.phases import FAMILIES
from blr.compressor.structures.specs import Spec, spec_from_dict
from blr.compressor.workspace.shards import Slot

RECIPE = "recipe.yaml"
HEAD = """# {name}, exported by blr
"""
SECTION = """
## Exported for {gpu}

{what}
{loss}
{loading}

`blr verify` checks the files against `blr_manifest.json`. {how}
{kernels}
Written by blr {version}.
"""
PACKED = (
    "The weights of {count} linear layers are {kind} in groups of 128 with a scale each; all other"
    " tensors are {others}."
)
PACKED_BEFORE = (
    " {count} layers are packed as in the checkpoint that this was made from, byte for byte: {kinds}."
)
KERNEL_LAYOUT = (
    "The factors of {count} structured layers are stored in the order in which the kernels read them"
    " (`<factor>_kernel`), all other tensors are {others}."
)
FUSED = (
    "On an NVIDIA GPU with Triton `generate` runs in a fused decoding runtime, prepared for batches"
    " up to {batch} and contexts up to {context} tokens{cache}; what that does not support, and every"
    " other machine, is served by transformers with the same layers."
)
CACHES = {"whole": "", "int8": ", keys and values in int8"}
COMPILED = """
`model.pt2` is the forward pass compiled by AOTInductor, for machines like the one it was made on:

```python
run = torch._inductor.aoti_load_package(f"{folder}/model.pt2")
results = run(input_ids=ids, attention_mask=mask)  # or pixel_values=images
```
"""
GRAPH = """
`model.onnx` is the forward pass as an ONNX graph, batch and length free, without a cache:

```python
session = onnxruntime.InferenceSession(f"{folder}/model.onnx")
results = session.run(None, {"input_ids": ids, "attention_mask": mask})  # or pixel_values: images
```
"""
KERNELS = {
    True: "The folder carries the kernels and the runtime that this takes, in Python files to read"
    " before one trusts them.",
    False: "That takes `pip install blr-compress` and `blr.compressor.register()`; the one Python"
    " file here, `modeling_blr.py`, computes the same in plain torch.",
}
PASSES = {"pt2": COMPILED, "onnx": GRAPH}
OUTPUT_HEAD = " The output head has {kind} weights of its own."
CAPTURED = "On a GPU forward passes without gradients are replayed as CUDA graphs, one an input shape."
MOST_DRAFTED = 8  # sequences of which a pass takes two tokens each, its draft and one more
DRAFTS = 4  # tokens that another engine lets it propose
BESIDE = "The smaller model in `{folder}/` proposes tokens"
REPEATED = "The runtime proposes what followed the last two tokens before (n-gram lookup)"
DRAFTED = """ {what}, and this model checks several in one
pass. It keeps those that it would choose itself, so that the text is its own. Of weights in few bits,
rounding can part the two on a GPU.

Other engines do so, too, with models from their own folders:

```bash
{vllm}
```

```python
{transformers}
```
"""


def export_config(
    checkpoint: Checkpoint, settings: ExportSettings, dtype: str | None, self_contained: bool = False
) -> dict[str, Any]:
    """Make config.json of an export, with our model type and classes, the layer table and `settings`."""
    config = structured_config(checkpoint.source.config, Plan([]))
    config["blr"] = {
        "format": FORMAT,
        "layers": {name: spec.to_dict() for name, spec in checkpoint.specs.items()},
        "export": {k: v for k, v in asdict(settings).items() if v is not None and v not in ({}, [])},
    }
    if "head" in config["blr"]["export"]:
        config["tie_word_embeddings"] = False  # a packed head is no embedding
    if dtype is not None:
        config = {key: value for key, value in config.items() if key != "torch_dtype"}
        config["dtype"] = dtype
    classes = config["auto_map"]
    return {**config, "auto_map": exported_classes(classes) if self_contained else classes}


def small_files(
    checkpoint: Checkpoint,
    config: Mapping[str, object],
    settings: ExportSettings,
    name: str,
    kind: str = "folder",
    draft: Draft | None = None,
) -> dict[str, bytes | Path]:
    """All files of an export but weights and manifest, by name: contents, or the file to carry over.
    name: of the source. kind: of the export, which may have a forward pass (`PASSES`). Raises InputError
    for a file to carry over that cannot be read."""
    folder, specs = checkpoint.source.folder, [*checkpoint.specs.values()]
    left_out = needless([*specs, *(draft.specs if draft else [])], settings, config)
    files = carried_files(checkpoint.source)
    kept = {n: bytes(read_whole(inside(folder, n), MAX_BYTES)) for n in kept_files(checkpoint)}
    kept_card = kept.pop(CARD, b"").decode("utf-8", "replace")
    drafted = "" if draft is None else draft.section(name)
    if settings.draft == NGRAM:
        drafted = DRAFTED.format(what=REPEATED, **elsewhere(name, NGRAM))
    loading = LOADING[checkpoint.source.library].format(auto=auto_name(config))
    section = _section(checkpoint, config, settings, loading, drafted) + PASSES.get(kind, "")
    card = _card(kept_card or card_front(folder, name), HEAD.format(name=name) + section, loading)
    return {
        LAYERS: b"{}\n",
        **files,
        **kept,
        "config.json": json_file(config),
        CARD: card,
        **({f"{FOLDER}/config.json": json_file(draft.config)} if draft else {}),
        **(runtime_files(left_out) if _is_self_contained(config) else code_files()),
    }


def _card(kept: str, section: str, loading: str) -> bytes:
    """The `kept` card of the compression behind `section`, which says the `loading` already."""
    heading = kept.find("\n# ") + 1 or len(kept)
    before = f"\n#{kept[heading:]}".replace(f"{loading}\n\n", "", 1) if kept[heading:] else ""
    return (kept[:heading] + section + before).encode()


def _is_self_contained(config: Mapping[str, Any]) -> bool:
    return bool(config["auto_map"] == exported_classes(config["auto_map"]))


def kept_files(checkpoint: Checkpoint) -> list[str]:
    """The files of `blr compress` and `blr heal` about their work that an export keeps."""
    names = (CARD, LAYERS, RECIPE, METRICS) if checkpoint.compressed else ()
    return [name for name in names if (checkpoint.source.folder / name).is_file()]


def _section(
    checkpoint: Checkpoint,
    config: Mapping[str, Any],
    settings: ExportSettings,
    loading: str,
    drafted: str,
) -> str:
    decoder = settings.context is not None
    head = config["blr"]["export"].get("head", {})
    others = "unchanged" if config.get("dtype") == checkpoint.source.config.get("dtype") else "cast"
    before = {name: spec for name, spec in checkpoint.specs.items() if spec.quantized}
    count = len(checkpoint.specs.keys() - {*head, *settings.plain, *before}) + len(settings.dense)
    layout = PACKED if settings.quantize else KERNEL_LAYOUT
    unpacked = "other tensors are" if before else "tensors are those of the dense model,"
    plain = f"All {unpacked} {others}."
    what = layout.format(count=count, kind=settings.quantize, others=others) if count else plain
    kinds = ", ".join(sorted({f"{s.structure} {s.describe()}" for s in before.values()}))
    kept = [PACKED_BEFORE.format(count=len(before), kinds=kinds)] if before else []
    packed = [OUTPUT_HEAD.format(kind=f"int{entry['bits']}") for entry in head.values()]
    fused = FUSED.format(batch=settings.batch, context=settings.context, cache=CACHES[settings.cache])
    return SECTION.format(
        gpu=settings.gpu,
        loss=MARK,
        what="".join([what, *kept, *packed]),
        loading=loading,
        how=fused + drafted if decoder else CAPTURED,
        kernels=KERNELS[_is_self_contained(config)],
        version=__version__,
    )


@dataclass(frozen=True)
class Draft:
    """The model that proposes tokens. config: in the export. shared: tensors of the first model."""

    source: Source
    config: dict[str, Any]
    shared: frozenset[str]

    @property
    def name(self) -> str:
        return str(self.config["architectures"][0])

    @property
    def specs(self) -> list[Spec]:
        return [spec_from_dict(fields) for fields in self.config["blr"]["layers"].values()]

    @property
    def beside(self) -> dict[str, list[Slot]]:
        """Its file of weights, without those shared."""
        kept = (e for e in self.source.entries.values() if e.name not in self.shared)
        return {WEIGHTS: [Slot(entry.name, entry) for entry in kept]}

    def section(self, name: str) -> str:
        """What the card of the first model, of this name, says of it."""
        what = BESIDE.format(folder=FOLDER)
        return DRAFTED.format(what=what, **elsewhere(name, self.source.folder.name))

    def check_loads(self, folder: Path) -> None:
        """Raise OutputError unless the tensors in `folder`, with those shared, fill the model."""
        _, info = load_empty(model_class(self.name), folder / FOLDER)
        lacking = set(cast("Iterable[str]", info["missing_keys"])) - set(ENDS if self.shared else ())
        if found := misfit({**info, "missing_keys": lacking}, "missing", "unexpected", "mismatched"):
            raise OutputError(
                f"{folder / FOLDER}: {found} when reloaded; this is a bug in blr, keep the checkpoint"
            )


def elsewhere(name: str, draft: str) -> dict[str, str]:
    """How other engines decode `name` with `draft`: a command of vLLM and a call of transformers."""
    given: dict[str, Any] = {"method": "draft_model", "model": draft}
    call = f"assistant_model=AutoModelForCausalLM.from_pretrained({draft!r})"
    if draft == NGRAM:
        given, call = {"method": NGRAM, "prompt_lookup_max": 2}, f"prompt_lookup_num_tokens={DRAFTS}"
    given |= {"num_speculative_tokens": DRAFTS}
    return {
        "vllm": f"vllm serve {quote(name)} --speculative-config {quote(json.dumps(given))}",
        "transformers": f"model.generate(**inputs, {call})",
    }


def open_draft(folder: Path, checkpoint: Checkpoint, context: int, kept: Collection[str]) -> Draft:
    """Open the draft in `folder` for an export of `checkpoint`, whose tensors `kept` stay as they are.
    Raises UsageError for a model that is no draft of this one."""
    source, config = _opened(folder)
    _check_pair(checkpoint.source, source, context)
    ends = [name for name in ENDS if name in kept and checkpoint.source.has(name, source, name)]
    draft = Draft(source, config, frozenset(ends))
    filled_class(source, config, {name: entry.shape for name, entry in source.entries.items()})
    return draft


def _opened(folder: Path) -> tuple[Source, dict[str, Any]]:
    """The model in `folder`, and its configuration as one of ours."""
    source = open_source(folder)
    table = source.config.get("blr")
    if not isinstance(table, dict) or "export" not in table:
        checkpoint = open_checkpoint(folder)
        if not checkpoint.compressed:
            return checkpoint.source, structured_config(checkpoint.source.config, Plan([]))
        return source, source.config
    export = {key: value for key, value in table["export"].items() if key != "draft"}
    return source, {**source.config, "blr": {**table, "export": export}}


def _check_pair(dense: Source, draft: Source, context: int) -> None:
    for source in (dense, draft):
        if (kind := source.model_type.removeprefix("blr_")) not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise UsageError(f"--draft: {source.folder} is a {kind}; expected one of {known}")
    name, remedy = f"--draft {draft.folder}", "give a model compressed from this one"
    sizes = [source.config.get("vocab_size") for source in (dense, draft)]
    if sizes[0] != sizes[1]:
        found = f"a vocabulary of {sizes[1]} tokens, expected the model's {sizes[0]}"
        raise UsageError(f"{name}: {found}; {remedy}")
    ids = [found and found[1] for found in (token_ids(dense.folder), token_ids(draft.folder))]
    if ids[0] != ids[1]:
        raise UsageError(f"{name}: another tokenizer than the model's; {remedy}")
    limit = read_context(draft)
    if context > limit:
        expected = f"expected at least the context of {context}"
        raise CapabilityError(f"{name}: {limit} positions, {expected}; give --context {limit}")
