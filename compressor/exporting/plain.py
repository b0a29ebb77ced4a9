"""Low-rank layers as pairs of `nn.Linear`, everything else dense: for tools that look for linear layers.

Quantizers, adapters and servers that replace `nn.Linear` take both halves of a pair. The folder needs
one Python file, since no model of transformers has pairs. Layers that hold pivot rows become
pairs where both factors together are smaller than the weight.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from blr.compressor import __version__
from blr.compressor.base.errors import UsageError
from blr.compressor.checkpoint.extras import CARD
from blr.compressor.checkpoint.source import Source
from blr.compressor.exporting.dense import dense_config, transposed_modules
from blr.compressor.exporting.options import ExportOptions
from blr.compressor.exporting.origin import FORMAT, Checkpoint
from blr.compressor.exporting.plan import ExportPlan
from blr.compressor.exporting.reload import check_fits
from blr.compressor.exporting.tensors import plan_tensors, whole_factors
from blr.compressor.loading.vendor import code_files
from blr.compressor.modeling.registry import auto_name
from blr.compressor.output.card import TAGS, card_front
from blr.compressor.output.files import carried_files, check_loads, json_file, structured_config
from blr.compressor.output.loss_messages import MARK
from blr.compressor.planning.plan import Plan
from blr.compressor.structures.specs import LowRankSpec, Spec

TEMPLATE = """# {name}, in plain linear layers by blr

{pairs} low-rank layers are two `nn.Linear` each, `V` and then `U`{dense}.
{loss}
```python
from transformers import {auto}
model = {auto}.from_pretrained(folder, trust_remote_code=True)
```

needs torch and transformers. Written by blr {version}; `blr verify` checks the files against
`blr_manifest.json`.
"""


def _small_files(
    source: Source, config: dict[str, Any], densified: int, name: str
) -> dict[str, bytes | Path]:
    dense = f"; {densified} of other form are dense" if densified else ""
    told = {"name": name, "pairs": len(config["blr"]["pairs"]), "dense": dense, "version": __version__}
    card = TEMPLATE.format(**told, auto=auto_name(config), loss=MARK)
    return {
        **carried_files(source),
        "config.json": json_file(config),
        CARD: (card_front(source.folder, name, TAGS[:1]) + card).encode(),
        **code_files(),
    }


def plan_plain(checkpoint: Checkpoint, options: ExportOptions) -> ExportPlan:
    """Every low-rank layer as a pair, all others dense.

    Raises UsageError: no layer is low-rank; InputError: tensors that would not load.
    """
    source, specs = checkpoint.source, checkpoint.specs
    pairs = {module: spec for module, spec in specs.items() if is_pair(spec)}
    rest = {module: spec for module, spec in specs.items() if module not in pairs}
    if not pairs:
        raise UsageError(f"--as plain: {source.folder} has no low-rank layer; take --as dense")
    transposed = transposed_modules(checkpoint)
    config = plain_config(checkpoint, pairs, options.dtype)
    tensors = plan_tensors(source, {}, options.dtype, None, rest, transposed, pairs)
    cls = check_fits(source, config, tensors.shapes)
    files = partial(_small_files, source, config, len(rest), options.source_name)
    how = (files, partial(check_loads, source, cls), {"pairs": sorted(pairs)})
    kept = replace(checkpoint, specs=pairs)
    return ExportPlan(kept, specs, config, tensors, sorted(rest), *how)


def is_pair(spec: Spec) -> bool:
    """Whether a layer becomes two matrices: low rank that is not in groups, packed or not."""
    whole = whole_factors(spec)
    small = whole.parameters < whole.dense_parameters or spec.structure == LowRankSpec.structure
    return isinstance(whole, LowRankSpec) and whole.groups == 1 and small


def plain_config(checkpoint: Checkpoint, pairs: dict[str, Spec], dtype: str | None) -> dict[str, Any]:
    """config.json: our model type and classes, and the sizes of every pair."""
    source = replace(checkpoint.source, config=dense_config(checkpoint.source, dtype))
    config = structured_config(source.config, Plan([]))
    config["blr"] = {"format": FORMAT, "pairs": {name: _sizes(spec) for name, spec in pairs.items()}}
    return config


def _sizes(spec: Spec) -> dict[str, int]:
    """What a `Pair` is made from."""
    rank = spec.shapes()["V"][-1]
    return {"in_features": spec.in_features, "out_features": spec.out_features, "rank": rank}
