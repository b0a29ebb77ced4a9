"""Plans exports for tools that know nothing of blr.

`plan_dense` multiplies every structured layer out: native model type and class, no Python files, for
converters (GGUF) and engines. `plan_plain` writes low-rank layers as pairs of `nn.Linear` and all others
dense, for quantizers, adapters and servers that replace `nn.Linear`; that folder needs one Python file,
since no model of transformers has pairs.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from transformers.pytorch_utils import Conv1D

from blr.compressor import __version__
from blr.compressor.base.errors import UsageError
from blr.compressor.checkpoint.extras import CARD, inert
from blr.compressor.checkpoint.source import Source
from blr.compressor.exporting.options import ExportOptions
from blr.compressor.exporting.origin import FORMAT, Checkpoint
from blr.compressor.exporting.plan import ExportPlan, check_fits
from blr.compressor.exporting.tensors import plan_tensors
from blr.compressor.loading.native import meta_model, native_class
from blr.compressor.loading.vendor import code_files
from blr.compressor.modeling.modeling_blr import module_names
from blr.compressor.modeling.registry import auto_name, declared_keys, register
from blr.compressor.output.card import TAGS, card_front
from blr.compressor.output.files import (
    carried_files,
    check_fills,
    check_loads,
    json_file,
    structured_config,
)
from blr.compressor.output.loss_messages import MARK
from blr.compressor.planning.layers import TRANSPOSED
from blr.compressor.planning.plan import Plan
from blr.compressor.structures.specs import LowRankSpec, Spec

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


def plan_dense(checkpoint: Checkpoint, options: ExportOptions) -> ExportPlan:
    """Plan an export with every structured layer made dense. Raises InputError for tensors that would
    not load."""
    source, specs, dtype = checkpoint.source, checkpoint.specs, options.dtype
    register(source.model_type)  # tokenizers of the source are loaded by its model type
    config = dense_config(source, dtype)
    tensors = plan_tensors(source, {}, dtype, None, specs, transposed_modules(checkpoint))
    cls = native_class(source)
    check_fills(source, cls, config, tensors.shapes)
    told = {"name": options.source_name, "count": len(specs), "type": source.model_type}
    card = DENSE.format(**told, version=__version__, loss=MARK)
    files = partial(_small_files, source, config, card, options.source_name, {})
    what = replace(checkpoint, specs={}), specs, config, tensors, sorted(specs)
    return ExportPlan(*what, files, partial(check_loads, source, cls), {})


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


def plan_plain(checkpoint: Checkpoint, options: ExportOptions) -> ExportPlan:
    """Plan an export with every low-rank layer as a pair, all others dense. Raises UsageError: no layer
    is low-rank; InputError: tensors that would not load."""
    source, specs = checkpoint.source, checkpoint.specs
    pairs = {module: spec for module, spec in specs.items() if is_pair(spec)}
    rest = {module: spec for module, spec in specs.items() if module not in pairs}
    if not pairs:
        raise UsageError(f"--as plain: {source.folder} has no low-rank layer; take --as dense")
    transposed = transposed_modules(checkpoint)
    config = plain_config(checkpoint, pairs, options.dtype)
    tensors = plan_tensors(source, {}, options.dtype, None, rest, transposed, pairs)
    cls = check_fits(source, config, tensors.shapes)
    dense = f"; {len(rest)} of other form are dense" if rest else ""
    told = {"name": options.source_name, "pairs": len(pairs), "dense": dense, "loss": MARK}
    card = PLAIN.format(**told, auto=auto_name(config), version=__version__)
    files = partial(_small_files, source, config, card, options.source_name, code_files())
    kept, loads = replace(checkpoint, specs=pairs), partial(check_loads, source, cls)
    how = (files, loads)
    return ExportPlan(kept, specs, config, tensors, sorted(rest), *how, {"pairs": sorted(pairs)})


def is_pair(spec: Spec) -> bool:
    """Whether a layer becomes a pair: low rank that is not in groups, packed or not."""
    plain = spec.plain
    return isinstance(plain, LowRankSpec) and plain.groups == 1


def plain_config(checkpoint: Checkpoint, pairs: dict[str, Spec], dtype: str | None) -> dict[str, object]:
    """Make config.json with our model type and classes, and the sizes of every pair."""
    source = replace(checkpoint.source, config=dense_config(checkpoint.source, dtype))
    config = structured_config(source.config, Plan([]))
    config["blr"] = {
        "format": FORMAT,
        "pairs": {
            name: {
                "in_features": s.in_features,
                "out_features": s.out_features,
                "rank": s.shapes()["V"][-1],
            }
            for name, s in pairs.items()
        },
    }
    return config


def _small_files(
    source: Source, config: dict[str, object], card: str, name: str, code: Mapping[str, bytes]
) -> dict[str, bytes | Path]:
    """All files but weights and manifest. card: text of the model card. name: of the source."""
    card = card_front(source.folder, name, TAGS[:1]) + card
    return {**carried_files(source), "config.json": json_file(config), CARD: card.encode(), **code}
