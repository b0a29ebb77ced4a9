"""The files of an output: the small ones are made here, all are written, checked and listed here."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import transformers
from ruamel.yaml import YAML

from blr.compressor.base.disk import Bytes, fsync_folder, pieces, write_stream
from blr.compressor.base.errors import InputError, OutputError
from blr.compressor.base.progress import CHECKING, WRITING, Progress
from blr.compressor.checkpoint.extras import CARD, LAYERS, carried, inert
from blr.compressor.checkpoint.header import TensorEntry
from blr.compressor.checkpoint.source import Source
from blr.compressor.loading.loader import load_empty, misfit
from blr.compressor.loading.native import decoded, native_class, native_errors
from blr.compressor.loading.sidecar_files import TOKENIZER, keep_tokenizer
from blr.compressor.modeling.modeling_blr import FORMAT, GUARD, PREFIX, guard
from blr.compressor.modeling.models import model_class
from blr.compressor.modeling.registry import auto_map, auto_name, declared_keys, register
from blr.compressor.output.card import model_card
from blr.compressor.output.folder_run import FolderRun
from blr.compressor.output.report import LayerRecord, Records, report_files, thin_curve
from blr.compressor.planning.plan import Plan
from blr.compressor.recipe.schema import PACED, Recipe
from blr.compressor.workspace.manifest import MANIFEST, build_manifest
from blr.compressor.workspace.shards import Slot, index_name, write_shards

SOURCE_CARD = "README.source.md"


def small_files(
    source: Source,
    recipe: Recipe,
    plan: Plan,
    records: Records,
    facts: dict[str, Any],
    config: dict[str, object],
    code: dict[str, bytes],
) -> dict[str, bytes | Path]:
    """All files of an output but weights and manifest: name to contents, or a file to carry over.

    `config` and `code` come from a `Door`. `facts` is the manifest's account of the run, with
    `calibration` and the sensitivity `curves` where there are any.
    """
    name = facts["source"]["name"]
    curves = facts.get("curves") or {}
    drawn: dict[str, LayerRecord] = {**records}
    drawn |= {m: {**drawn[m], "curve": thin_curve(curves[m])} for m in curves if m in drawn}
    run, text = facts["run"], " --text TEXT" if facts.get("calibration") else ""
    about = {"name": name, "method": recipe.method, "cf": plan.cf, "versions": run["versions"]}
    about["machine"] = {n: run[n] for n in ("device", "threads") if run.get(n) is not None}
    about["command"] = f"blr compress {name} --recipe recipe.yaml{text}"
    out = StringIO()
    YAML(typ="safe").dump(_written(recipe), out)
    return {
        **carried_files(source),
        "config.json": json_file(config),
        LAYERS: json_file(records),
        "recipe.yaml": out.getvalue().encode(),
        CARD: model_card(source, recipe, plan, records, name, auto_name(config)).encode(),
        **report_files(plan, drawn, {**about, "calibration": facts.get("calibration")}),
        **code,
    }


def _written(recipe: Recipe) -> dict[str, object]:
    """The recipe without unused sizes by default: reading some of these would be refused."""
    said = recipe.model_dump(exclude_none=True)
    idle = set[str]() if recipe.sized_by_cf else {"cf"}
    idle |= set(PACED) if recipe.tokens_per_second is not None else set()
    return {n: value for n, value in said.items() if n in recipe.model_fields_set or n not in idle}


def carried_files(source: Source) -> dict[str, bytes | Path]:
    """The files that an output takes along; a dense card is renamed, as ours replaces it."""
    files = {name: carried(path) for name, path in source.extras.carried.items()}
    card = files.pop(CARD, None)
    if card is None or os.path.lexists(source.folder / MANIFEST):
        return files
    return {SOURCE_CARD: card, **files}


def structured_config(config: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """The native config.json with blr's model type, classes and table of layers."""
    native, named = config["model_type"], config["architectures"]
    classes = auto_map(native, named)
    config = inert(config, declared_keys(native))
    if "XLNetLMHeadModel" in named:  # pipelines know it by that name, and any model by this entry
        prefix = config.get("prefix") or transformers.TextGenerationPipeline.XL_PREFIX
        config = {**config, "prefix": prefix}
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
    """Raise InputError, before any work, if the planned tensors would not fill the model."""
    native_class(source)
    shapes = {name: entry.shape for name, entry in source.entries.items()}
    for planned in plan.layers:
        shapes.pop(planned.layer.entry.name, None)  # experts may share a tensor
        stored = planned.spec.stored().items()
        shapes |= {f"{planned.layer.module}.{suffix}": shape for suffix, (shape, _) in stored}
    with native_errors(source):
        config = structured_config(source.config, plan)
    filled_class(source, config, shapes)


def filled_class(
    source: Source, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> type:
    """The class of ours that `config` names. Raises InputError when tensors of `shapes` do not fill it,
    or when transformers cannot build it."""
    with native_errors(source):
        register(config["model_type"].removeprefix("blr_"))
        cls = model_class(config["architectures"][0])
    check_fills(source, cls, config, shapes)
    return cls


def check_fills(
    source: Source, cls: Any, config: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise InputError if tensors of `shapes` do not fill a model of class `cls` with `config`."""
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


def check_loads(source: Source, cls: object, folder: Path) -> dict[str, tuple[int, str]]:
    """Check that class `cls` loads `folder` with no key missing or left over, and the tokenizer as well.

    Returns tokenizer_config.json if it was rewritten for that. Raises OutputError, which is a bug.
    """
    if found := misfits(cls, folder):
        raise OutputError(f"{folder}: {found} when reloaded; this is a bug in blr, keep the checkpoint")
    return keep_tokenizer(source.folder, folder)


def misfits(cls: object, folder: Path | None, **options: object) -> str:
    """The keys that transformers finds missing, left over or of another shape; empty if none."""
    _, info = load_empty(cls, folder, **options)
    return misfit(info, "missing", "unexpected", "mismatched")


def json_file(value: object) -> bytes:
    """`value` as a JSON file of an output."""
    return json.dumps(value, indent=2).encode() + b"\n"


Fitted = tuple[Mapping[str, TensorEntry], object]  # stored factors by suffix, and a record
Written = dict[str, tuple[int, str]]  # file to its size and SHA-256


@dataclass(frozen=True)
class FolderContents:
    """What a folder is to hold: `shards` by file, `read` for the bytes of a tensor, `small` files or
    paths of files to carry over, names of files that the check may add `later`, and tensors in files
    `beside` the shards, which no index lists; `headers` of files that are no safetensors."""

    shards: Mapping[str, list[Slot]]
    read: Callable[[TensorEntry], Iterable[Bytes]]
    small: Mapping[str, bytes | Path]
    later: tuple[str, ...] = ()
    beside: Mapping[str, list[Slot]] = field(default_factory=dict)
    headers: Mapping[str, bytes] = field(default_factory=dict)


def write_whole(
    run: FolderRun, folder: Path, contents: FolderContents, check: Callable[[Path], Written], read: str
) -> None:
    """Write `contents` to `folder`, in the partial one of a run, check them and list them in a manifest.
    `check` loads what was written as a user would, and returns the files that it wrote itself; `read` is
    the digest of the input. Raises as `check`; there is no manifest then."""
    workspace, progress = run.workspace, run.progress
    index = [index_name(contents.shards)] if contents.shards else []
    names = {*contents.shards, *contents.beside, *contents.small, *contents.later, *index}
    names |= {TOKENIZER, MANIFEST}
    workspace.claim((folder / name).relative_to(workspace.partial).as_posix() for name in names)
    folder.mkdir(exist_ok=True)
    with progress.timed("writing"):
        written = _write_shards(folder, contents, progress)
    for name, data in contents.small.items():
        written[name] = write_stream(folder / name, pieces(data))
    progress.stage(CHECKING)
    with progress.timed("check"):
        written.update(check(folder))
    fsync_folder(folder)  # the files before the manifest that lists them
    write_stream(folder / MANIFEST, [build_manifest(folder, written, **run.facts(read))])


def _write_shards(folder: Path, contents: FolderContents, progress: Progress) -> Written:
    groups = [contents.shards, *({name: slots} for name, slots in contents.beside.items())]
    with progress.layers(sum(len(s) for each in groups for s in each.values()), WRITING) as advance:

        def read(entry: TensorEntry) -> Iterable[Bytes]:
            advance(entry.name)
            return contents.read(entry)

        written = [write_shards(folder, each, read, contents.headers) for each in groups]
    return {name: found for each in written for name, found in each.items()}


def slots_of(
    source: Source, plan: Plan, results: Mapping[str, Fitted], norms: Mapping[str, TensorEntry]
) -> list[Slot]:
    """The output's tensors in the source's order, the factors in `results` in the place of their weight,
    refitted `norms` by name."""
    replaced: dict[str, list[str]] = {}
    for planned in plan.layers:
        replaced.setdefault(planned.layer.entry.name, []).append(planned.layer.module)
    slots = []
    for entry in source.entries.values():
        if entry.name not in replaced:
            slots.append(Slot(entry.name, norms.get(entry.name, entry)))
        for module in replaced.get(entry.name, ()):
            factors, _ = results[module]
            slots += [Slot(f"{module}.{suffix}", factor) for suffix, factor in factors.items()]
    return slots
