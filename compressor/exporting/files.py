"""Makes the small files of an export: configuration, model card, and what is carried over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from blr.compressor import __version__
from blr.compressor.checkpoint.context import NGRAM
from blr.compressor.checkpoint.extras import CARD, LAYERS, MAX_BYTES, METRICS
from blr.compressor.checkpoint.regular import inside, read_whole
from blr.compressor.exporting.drafts import REPEATED, Draft, elsewhere
from blr.compressor.exporting.drafts import SECTION as DRAFTED
from blr.compressor.exporting.origin import FORMAT, Checkpoint
from blr.compressor.loading.vendor import code_files, contents_of, exported_classes, runtime_files
from blr.compressor.modeling.registry import auto_name
from blr.compressor.modeling.settings import ExportSettings
from blr.compressor.output.card import LOADING, card_front
from blr.compressor.output.files import carried_files, json_file, structured_config
from blr.compressor.output.loss_messages import MARK
from blr.compressor.planning.plan import Plan

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
    folder, contents = (
        checkpoint.source.folder,
        contents_of([*checkpoint.specs.values(), *(draft.specs if draft else [])], settings, config),
    )
    files = carried_files(checkpoint.source)
    kept = {file: _read(folder, file) for file in kept_files(checkpoint)}
    kept_card = kept.pop(CARD, b"").decode("utf-8", "replace")
    drafted = "" if draft is None else draft.section(name)
    if settings.draft == NGRAM:
        drafted = DRAFTED.format(what=REPEATED, **elsewhere(name, NGRAM))
    loading = LOADING[checkpoint.source.library].format(auto=auto_name(config))
    section = _section(checkpoint, config, settings, loading, drafted) + PASSES.get(kind, "")
    return {
        LAYERS: b"{}\n",
        **files,
        **kept,
        "config.json": json_file(config),
        CARD: _card(kept_card or card_front(folder, name), HEAD.format(name=name) + section, loading),
        **(draft.small_files if draft else {}),
        **(runtime_files(contents) if _is_self_contained(config) else code_files()),
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


def _read(folder: Path, name: str) -> bytes:
    return bytes(read_whole(inside(folder, name), MAX_BYTES))


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
