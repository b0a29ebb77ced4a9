"""The model card of an output: what it is, how to load it, what was lost."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.representer import SafeRepresenter

from blr.compressor import __version__
from blr.compressor.base.errors import BlrError
from blr.compressor.checkpoint.config import DIFFUSERS, TRANSFORMERS
from blr.compressor.checkpoint.extras import CARD, MAX_BYTES
from blr.compressor.checkpoint.regular import inside, read_text
from blr.compressor.checkpoint.source import Source
from blr.compressor.output.loss_messages import MARK
from blr.compressor.output.report import Records, by_type
from blr.compressor.planning.layers import what_became
from blr.compressor.planning.plan import Plan, cache_notes
from blr.compressor.recipe.schema import Recipe
from blr.compressor.recipe.yaml_file import parse_mapping

FENCE = "---\n"
_HEAD = re.compile(r"\s*---[ \t]*\n(?P<head>.*?)(?:(?<=\n)---[ \t]*(?:\n|\Z))", re.DOTALL)
# Plain scalars that YAML 1.1, by which the hub reads cards, takes for text as YAML 1.2 does
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./+ -]*(?<! )", re.ASCII)
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}
KEPT = (
    *("license", "license_name", "license_link", "base_model", "language", "pipeline_tag"),
    *("library_name", "tags"),
)
TAGS = ("blr", "structured-compression")
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

or without it, running the modeling file in this folder:

```python
from transformers import {auto}, AutoTokenizer
model = {auto}.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)  # if there is one
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


def card_front(
    folder: Path, name: str, tags: tuple[str, ...] = TAGS, library: str = TRANSFORMERS.name
) -> str:
    """The head of the card of an output made from the checkpoint in `folder`, called `name`.

    A hub id as `name` becomes a base model; `tags` follow the source's; `library` loads the output.
    """
    kept = source_front(folder)
    bases = [*_texts(kept.pop("base_model", None)), *([name] if "/" in name else [])]
    front = {
        **kept,
        **({"base_model": list(dict.fromkeys(bases))} if bases else {}),
        "library_name": kept.get("library_name", library),
        "tags": list(dict.fromkeys([*_texts(kept.get("tags")), *tags])),
    }
    return write_front(front)


def write_front(front: dict[str, object]) -> str:
    """The head of a card, fences and all."""

    class Representer(SafeRepresenter):
        """For readers of YAML 1.1 and 1.2 alike."""

    Representer.add_representer(str, _text_node)
    Representer.add_representer(float, _float_node)
    out = StringIO()
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.Representer = Representer
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False
    yaml.dump(front, out)
    return f"{FENCE}{out.getvalue()}{FENCE}"


def read_front(text: str, path: Path) -> tuple[dict[str, Any], str]:
    """Split a card into its head as plain YAML (empty if it has none) and the rest of its text. Raises
    RecipeError for another head; `path` names it."""
    found = _HEAD.match(text)
    if found is None:
        return {}, text
    head = found["head"]
    return (parse_mapping(path, head) if head.strip() else {}), text[found.end() :]


def source_front(folder: Path) -> dict[str, object]:
    """The texts under `KEPT` in the head of the source's card; {} without such a head."""
    try:
        found, _ = read_front(read_text(inside(folder, CARD), MAX_BYTES), folder / CARD)
    except BlrError:
        return {}
    listed = {key: found[key] for key in KEPT if isinstance(found.get(key), str | list)}
    return {key: v for key, v in listed.items() if all(isinstance(item, str) for item in v)}


def _texts(value: object) -> list[str]:
    return [value] if isinstance(value, str) else list(value) if isinstance(value, list) else []


def _text_node(representer: SafeRepresenter, text: str) -> object:
    plain = _PLAIN.fullmatch(text) is not None and text.lower() not in _WORDS
    return representer.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


def _float_node(representer: SafeRepresenter, number: float) -> object:
    """A float with a point, without which YAML 1.1 takes one with an exponent for text."""
    mantissa, e, exponent = repr(number).partition("e")
    shown = mantissa + ".0" * bool(e and "." not in mantissa) + e + exponent
    words = {math.inf: ".inf", -math.inf: "-.inf"}
    shown = words.get(number, ".nan" if math.isnan(number) else shown)
    return representer.represent_scalar("tag:yaml.org,2002:float", shown)


def model_card(
    source: Source, recipe: Recipe, plan: Plan, records: Records, name: str, auto: str
) -> str:
    """The README.md of an output, which class `auto` of transformers loads, made from `name`."""
    known = any(record.get("weighted_error") is not None for record in records.values())
    error = "weighted_error" if known else "error"
    types = dict.fromkeys(record["type"] for record in records.values())
    means = by_type(records.values(), error)
    front = card_front(source.folder, name, (*TAGS, recipe.method), source.library.name)
    dense, now = plan.dense_parameters, plan.structured_parameters
    fewer = f"compression factor {plan.cf:.3f} of those layers ({dense:,} parameters became {now:,})"
    return front + TEMPLATE.format(
        name=name,
        what=what_became((planned.spec for planned in plan.layers), "linear layers "),
        size=f"{dense:,} weights" if now >= dense else fewer,
        bits=plan.bits,
        kept=f" and {len(plan.kept)} left dense on purpose" if plan.kept else "",
        cache="".join(CACHE.format(note=note) for note in cache_notes(plan, {}, 0)),
        loading=LOADING[source.library].format(auto=auto),
        loss=MARK,
        of="weights" if error == "error" else "outputs, on the calibration's text",
        rows="\n".join(_row(kind, plan, means) for kind in types),
        version=__version__,
    )


def _row(kind: str, plan: Plan, means: Mapping[str, float]) -> str:
    chosen = [p for p in plan.layers if p.layer.type == kind]
    shapes = dict.fromkeys(f"{p.spec.structure} {p.spec.describe()}" for p in chosen)
    mean = f"{means[kind]:.4f}" if kind in means else "–"
    return f"| {kind} | {len(chosen)} | {', '.join(shapes)} | {mean} |"
