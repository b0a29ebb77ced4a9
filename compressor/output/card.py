"""The model card of an output: what it is, how to load it, what was lost."""

from __future__ import annotations

from typing import Any

from blr.compressor import __version__
from blr.compressor.checkpoint.library import DIFFUSERS, TRANSFORMERS
from blr.compressor.checkpoint.source import Source
from blr.compressor.output.front import TAGS, card_front
from blr.compressor.output.loss_messages import MARK
from blr.compressor.output.records import by_type
from blr.compressor.planning.plan import Plan
from blr.compressor.planning.rank_caches import cache_notes
from blr.compressor.planning.storage_choice import what_became
from blr.compressor.recipe.schema import Recipe

TEMPLATE = """# {name}, compressed by blr

{what}{kept}: {bits:.3f} bits a weight, {size}; every other tensor is unchanged.
{loss}{cache}
{loading}

| layer type | layers | structure | mean relative error of the {of} |
|---|---|---|---|
{rows}

`recipe.yaml` is the recipe as resolved, `blr_layers.json` the record of every layer and
`blr_manifest.json` lists every file with its SHA-256. Written by blr {version}.
"""

CACHE = "\nHeld as ranks by `generate` of transformers, not by the runtime of an export: the {note}.\n"
LOADING = {
    TRANSFORMERS: """Load it with `blr-compress` installed:

```python
from blr.compressor import register
from transformers import {auto}
register()
model = {auto}.from_pretrained(folder)
```

or without it, running the modeling files in this folder (`AutoTokenizer` runs none, but asks before it
reads the configuration unless it is told the same):

```python
model = {auto}.from_pretrained(folder, trust_remote_code=True)
```""",
    DIFFUSERS: """Load it with `blr-compress` installed:

```python
from blr.compressor.loading.diffusion import load_diffusion
model = load_diffusion(folder)
```

or without it, running the modeling files in this folder:

```python
from diffusers import AutoModel
model = AutoModel.from_pretrained(folder, trust_remote_code=True)
```

and give it to a pipeline as its `transformer`.""",
}


def model_card(
    source: Source, recipe: Recipe, plan: Plan, records: dict[str, Any], name: str, auto: str
) -> str:
    """Markdown for the README.md of an output, which `auto` of transformers loads, made from the
    checkpoint called `name`."""
    known = any(record.get("weighted_error") is not None for record in records.values())
    error = "weighted_error" if known else "error"
    front = card_front(source.folder, name, (*TAGS, recipe.method), source.library.name)
    return front + TEMPLATE.format(
        name=name,
        what=what_became((planned.spec for planned in plan.layers), "linear layers "),
        size=_size(plan),
        bits=plan.bits,
        kept=f" and {len(plan.kept)} left dense on purpose" if plan.kept else "",
        cache="".join(CACHE.format(note=note) for note in cache_notes(plan, {}, 0)),
        loading=LOADING[source.library].format(auto=auto),
        loss=MARK,
        of="weights" if error == "error" else "outputs, on the calibration's text",
        rows="\n".join(_row(kind, plan, records, error) for kind in _types(records)),
        version=__version__,
    )


def _size(plan: Plan) -> str:
    dense, now = plan.dense_parameters, plan.structured_parameters
    if now >= dense:
        return f"{dense:,} weights"
    return f"compression factor {plan.cf:.3f} of those layers ({dense:,} parameters became {now:,})"


def _types(records: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(record["type"] for record in records.values()))


def _row(kind: str, plan: Plan, records: dict[str, Any], error: str) -> str:
    chosen = [p for p in plan.layers if p.layer.type == kind]
    shapes = dict.fromkeys(f"{p.spec.structure} {p.spec.describe()}" for p in chosen)
    found = by_type({p.layer.module: records[p.layer.module] for p in chosen}, error)
    mean = f"{found[kind]:.4f}" if kind in found else "–"
    return f"| {kind} | {len(chosen)} | {', '.join(shapes)} | {mean} |"
