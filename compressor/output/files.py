"""The small files of an output, and the checks it must pass before it is committed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import transformers
from ruamel.yaml import YAML

from blr.compressor.base.errors import InputError, OutputError
from blr.compressor.checkpoint.extras import CARD, LAYERS, carried, inert
from blr.compressor.checkpoint.source import Source
from blr.compressor.loading.loader_names import load_empty, misfit
from blr.compressor.loading.native import decoded, native_class, native_errors
from blr.compressor.loading.sidecar_files import keep_tokenizer
from blr.compressor.modeling.modeling_blr import FORMAT, GUARD, PREFIX, guard
from blr.compressor.modeling.models import model_class
from blr.compressor.modeling.registry import auto_map, auto_name, declared_keys, register
from blr.compressor.output.card import model_card
from blr.compressor.output.report import report_files, thin_curve
from blr.compressor.planning.plan import Plan
from blr.compressor.recipe.schema import PACED, Recipe
from blr.compressor.workspace.manifest import MANIFEST

SOURCE_CARD = "README.source.md"


def small_files(
    source: Source,
    recipe: Recipe,
    plan: Plan,
    records: dict[str, Any],
    facts: dict[str, Any],
    config: dict[str, Any],
    code: dict[str, bytes],
) -> dict[str, bytes | Path]:
    """Everything of an output but weights and manifest: name to contents, or file to carry over.

    `config` is its config.json and `code` are the Python files that travel, both by `Door`.
    `facts` is the manifest's account of the run; it may hold the `calibration` and the sensitivity
    `curves` of modules, too.
    """
    name = facts["source"]["name"]
    curves = facts.get("curves") or {}
    drawn = {m: {**r, "curve": thin_curve(curves[m])} if m in curves else r for m, r in records.items()}
    run, text = facts["run"], " --text TEXT" if facts.get("calibration") else ""
    about = {"name": name, "method": recipe.method, "cf": plan.cf, "versions": run["versions"]}
    about["machine"] = {n: run[n] for n in ("device", "threads") if run.get(n) is not None}
    about["command"] = f"blr compress {name} --recipe recipe.yaml{text}"
    return {
        **carried_files(source),
        "config.json": json_file(config),
        LAYERS: json_file(records),
        "recipe.yaml": _yaml(_written(recipe)),
        CARD: model_card(source, recipe, plan, records, name, auto_name(config)).encode(),
        **report_files(plan, drawn, {**about, "calibration": facts.get("calibration")}),
        **code,
    }


def _written(recipe: Recipe) -> dict[str, Any]:
    """What a file of a recipe says: all but sizes that nobody gave and that sized nothing, some of which
    would be refused when it is read."""
    said = recipe.model_dump(exclude_none=True)
    idle = set[str]() if recipe.sized_by_cf else {"cf"}
    idle |= set(PACED) if recipe.tokens_per_second is not None else set()
    return {n: value for n, value in said.items() if n in recipe.model_fields_set or n not in idle}


def carried_files(source: Source) -> dict[str, bytes | Path]:
    """What an output takes along; a dense checkpoint's card, which ours takes the place of, renamed."""
    files = {name: carried(path) for name, path in source.extra_files().items()}
    card = files.pop(CARD, None)
    if card is None or os.path.lexists(source.folder / MANIFEST):
        return files
    return {SOURCE_CARD: card, **files}


def structured_config(config: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """The native configuration turned into ours: own model type, classes and layer table."""
    native, named = config["model_type"], config["architectures"]
    classes = auto_map(native, named)
    config = inert(config, declared_keys(native))
    if "XLNetLMHeadModel" in named:  # pipelines know it by that name, and any model by this entry
        config = {
            **config,
            "prefix": config.get("prefix") or transformers.TextGenerationPipeline.XL_PREFIX,
        }
    return {
        **config,
        "model_type": f"blr_{native}",
        "architectures": [PREFIX + name for name in named],
        "auto_map": classes,
        GUARD: guard(native),
        "blr": {
            "format": FORMAT,
            "layers": {p.layer.module: p.spec.to_dict() for p in plan.layers},
            **({"kv_cache": plan.kv_cache} if plan.kv_cache else {}),
        },
    }


def check_fits(source: Source, plan: Plan) -> None:
    """Check, before any work, that the output will load: its tensors as planned, without data.

    Raises InputError when the source's tensors are not those of the architecture it names.
    """
    native_class(source)
    with native_errors(source):
        register(source.config["model_type"])
        config = structured_config(source.config, plan)
        cls = model_class(config["architectures"][0])
    shapes = {name: entry.shape for name, entry in source.entries.items()}
    for planned in plan.layers:
        del shapes[planned.layer.entry.name]
        stored = planned.spec.stored().items()
        shapes |= {f"{planned.layer.module}.{suffix}": shape for suffix, (shape, _) in stored}
    check_fills(source, cls, config, shapes)


def check_fills(
    source: Source, cls: Any, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise InputError when tensors of `shapes` do not fill a model of class `cls` with `config`, or
    transformers cannot build it."""
    with native_errors(source):
        made = cls.config_class.from_dict(decoded(config))
        tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        found = misfits(cls, None, config=made, state_dict=tensors)
    if found:
        remedy = "take config.json and weights from the same model"
        raise InputError(f"{source.folder}: {found} for {cls.__name__}; {remedy}")


def check_reload(source: Source, folder: Path) -> dict[str, tuple[int, str]]:
    """`check_loads` of a compressed checkpoint."""
    config = json.loads((folder / "config.json").read_bytes())
    register(source.config["model_type"])
    return check_loads(source, model_class(config["architectures"][0]), folder)


def check_loads(source: Source, cls: Any, folder: Path) -> dict[str, tuple[int, str]]:
    """Check that a model of class `cls` loads from `folder` with no key missing or left over, and the
    tokenizer of `source` as well.

    Returns files rewritten to make it so (size, SHA-256): tokenizer_config.json, when the model type of
    our own would otherwise select another tokenizer class.

    Raises OutputError: it would not load as it should (a bug, or a family we misread).
    """
    if found := misfits(cls, folder):
        raise OutputError(f"{folder}: {found} when reloaded; this is a bug in blr, keep the checkpoint")
    return keep_tokenizer(source.folder, folder)


def misfits(cls: Any, folder: Path | None, **options: Any) -> str:
    """What transformers finds missing, left over or of another shape; empty if nothing."""
    _, info = load_empty(cls, folder, **options)
    return misfit(info, "missing", "unexpected", "mismatched")


def json_file(value: Any) -> bytes:
    """What a JSON file of an output holds."""
    return json.dumps(value, indent=2).encode() + b"\n"


def _yaml(value: dict[str, Any]) -> bytes:
    out = StringIO()
    YAML(typ="safe").dump(value, out)
    return out.getvalue().encode()
