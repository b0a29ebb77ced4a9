"""The compression of one checkpoint: plan, factorize layer by layer, write, check, commit."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from blr.compressor import __version__
from blr.compressor.checkpoint.disk import (
    check_space,
    fsync_folder,
    read_chunks,
    storage_errors,
    write_stream,
)
from blr.compressor.checkpoint.header import TensorEntry, quote, read_header, refuse
from blr.compressor.checkpoint.journal import canonical_json
from blr.compressor.checkpoint.manifest import MANIFEST, build_manifest
from blr.compressor.checkpoint.shapes import check_against_config, check_depth
from blr.compressor.checkpoint.shards import Slot, assign_shards, write_shards
from blr.compressor.checkpoint.source import Source, open_source
from blr.compressor.checkpoint.workspace import Workspace
from blr.compressor.errors import InputError
from blr.compressor.families import find_family
from blr.compressor.plan import Plan, make_plan
from blr.compressor.progress import Progress
from blr.compressor.recipe import Recipe

DEFAULT_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Settings:
    """What is not part of the recipe: where and how to run.

    `source_name` and `revision` are recorded in the output; `device` is a torch device name or
    "auto"; `max_shard_size` is in bytes; `calibration` names a text file or data set; the rest is
    as on the command line.
    """

    source_name: str
    revision: str | None = None
    device: str = "auto"
    max_shard_size: int = DEFAULT_SHARD_BYTES
    overwrite: bool = False
    restart: bool = False
    allow_pickle: bool = False
    calibration: str | None = None
    offline: bool = False


@dataclass
class Summary:
    """What a compression achieved. Sizes in bytes; `errors` maps layer type to the mean relative
    error of its weights; `seconds` is the wall time of this run."""

    output: str
    method: str
    cf: float
    parameters_before: int
    parameters_after: int
    bytes_before: int
    bytes_after: int
    layers: int
    errors: dict[str, float]
    seconds: float
    notes: list[str] = field(default_factory=list)


def compress(
    folder: Path, recipe: Recipe, output: Path, settings: Settings, progress: Progress
) -> Summary:
    """Write the compressed checkpoint of `folder` to `output`, resuming what an earlier run left.

    Everything that can be checked from headers is checked before torch is imported. `output` is
    absent until it is complete.

    Raises:
        BlrError: any of its kinds; the work done so far stays in ``<output>.blr-partial``.
    """
    started = monotonic()
    with Workspace(output, overwrite=settings.overwrite, restart=settings.restart) as workspace:
        source = open_checked(folder, settings.allow_pickle, workspace.pickled)
        plan = make_plan(source, recipe)
        progress.notes(plan.notes)
        needed = estimate_bytes(source, plan, recipe)
        with storage_errors(workspace.output.parent, needed, workspace.output):
            check_space(workspace.output.parent, needed - workspace.used_bytes())
            plan, records = _run(source, recipe, plan, workspace, settings, progress)
    return _summarize(source, recipe, plan, records, workspace, monotonic() - started)


def open_checked(folder: Path, allow_pickle: bool = False, scratch: Path | None = None) -> Source:
    """`open_source`, and what its config.json implies for its tensors.

    Raises InputError, also for a checkpoint that is an output of ours already.
    """
    source = open_source(folder, allow_pickle=allow_pickle, scratch=scratch)
    if source.model_type.startswith("blr_"):
        raise InputError(
            f"{folder}: model type {source.model_type!r} is already compressed by blr; "
            "compress the dense checkpoint it came from"
        )
    check_unquantized(source)
    family = find_family(source.model_type)
    if family is None:
        check_depth(source)
    check_against_config(source, family.shapes if family else None)
    return source


def check_unquantized(source: Source) -> None:
    """Raise InputError for a checkpoint whose config says that its weights are quantized.

    Its loader would quantize the structured layers as well, and packed weights are no matrices.
    """
    settings = source.config.get("quantization_config")
    if settings:
        method = settings.get("quant_method") if isinstance(settings, dict) else settings
        found = f"quantization_config of method {quote(method, 40)}"
        remedy = "dequantize the checkpoint, or take the one it was made from"
        refuse(source.folder / "config.json", found, "a dense checkpoint", remedy)


def estimate_bytes(source: Source, plan: Plan, recipe: Recipe) -> int:
    """Upper estimate of the disk a run needs: the output, the journal of factors and small files."""
    replaced = {planned.layer.entry.name for planned in plan.layers}
    kept = sum(e.nbytes for name, e in source.entries.items() if name not in replaced)
    factors = sum(
        planned.spec.parameters * _item_bytes(planned.layer.entry, recipe) for planned in plan.layers
    )
    extra = sum((source.folder / path).stat().st_size for path in source.extra_files())
    return kept + 2 * factors + extra + (4 << 20)


def _item_bytes(entry: TensorEntry, recipe: Recipe) -> int:
    if recipe.dtype is not None:
        return 4 if recipe.dtype == "float32" else 2
    return entry.nbytes // max(entry.parameters, 1)


def _fingerprint(source: Source, recipe: Recipe, settings: Settings) -> dict[str, Any]:
    """What a resumed run must agree on. Weights are not in it: each layer's key covers its own."""
    import hashlib
    from importlib.metadata import version

    headers = [[e.name, e.dtype, e.shape, e.file.name] for e in source.entries.values()]
    digest = hashlib.sha256(canonical_json([source.config, headers])).hexdigest()
    return {
        "source": digest,
        "revision": settings.revision,
        "recipe": recipe.model_dump(),
        "max_shard_size": settings.max_shard_size,
        "device": settings.device,
        "calibration": _calibration(settings),
        "versions": {
            "blr": __version__,
            "torch": version("torch"),
            "transformers": version("transformers"),
            "python": platform.python_version(),
        },
    }


def _run(
    source: Source,
    recipe: Recipe,
    plan: Plan,
    workspace: Workspace,
    settings: Settings,
    progress: Progress,
) -> tuple[Plan, dict[str, dict[str, Any]]]:
    """Produce the output; returns the plan that was followed and every layer's record by name."""
    workspace.open(_fingerprint(source, recipe, settings))
    from blr.compressor.finish import check_fits, check_reload, small_files
    from blr.compressor.scan import scan_source

    check_fits(source, plan)
    read = scan_source(source, plan, progress)
    if workspace.finished(read):
        return plan, read_records(workspace.output)
    plan, results, measured = _factorize(source, recipe, plan, workspace, settings, progress)
    records = {module: record for module, (_, record) in results.items()}
    progress.stage("writing")
    shards = assign_shards(_slots(source, plan, results), settings.max_shard_size)
    written = write_shards(workspace.partial, shards, _reader(source, workspace))
    facts = _facts(recipe, records, workspace.fingerprint, settings)
    about = {**facts, "calibration": measured.pop("calibration", None)}
    for name, data in small_files(source, recipe, plan, records, measured, about).items():
        written[name] = write_stream(workspace.partial / name, pieces(data))
    progress.stage("checking")
    written.update(check_reload(source, workspace.partial))
    fsync_folder(workspace.partial)  # the files before the manifest that lists them
    manifest = build_manifest(written, input_sha256=read, **facts)
    write_stream(workspace.partial / MANIFEST, [manifest])
    workspace.commit()
    return plan, records


def _calibration(settings: Settings) -> str | None:
    if settings.calibration is None:
        return None
    from blr.compressor.calibration.text import calibration_digest

    return calibration_digest(settings.calibration)


def _factorize(
    source: Source,
    recipe: Recipe,
    plan: Plan,
    workspace: Workspace,
    settings: Settings,
    progress: Progress,
) -> tuple[Plan, dict[str, Any], dict[str, Any]]:
    """The plan that was followed, factors and record by module, and what was measured: facts of the
    `calibration`, and the sensitivity curve of each module under `curves`."""
    if settings.calibration is None:
        from blr.compressor.factorize import factorize_layers

        results = factorize_layers(source, recipe, plan, workspace.journal, settings.device, progress)
        return plan, results, {}
    from blr.compressor.calibration.engine import compress_calibrated

    outcome = compress_calibrated(
        source,
        recipe,
        lambda curves: make_plan(source, recipe, curves, calibrated=True),
        settings.calibration,
        workspace.journal,
        settings.device,
        settings.offline,
        progress,
    )
    return outcome.plan, outcome.results, {"calibration": outcome.facts, "curves": outcome.curves}


def _slots(source: Source, plan: Plan, results: dict[str, Any]) -> list[Slot]:
    """The output's tensors in the source's order, factors in the place of their weight."""
    replaced = {planned.layer.entry.name: planned.layer.module for planned in plan.layers}
    slots = []
    for entry in source.entries.values():
        module = replaced.get(entry.name)
        if module is None:
            slots.append(Slot(entry.name, entry))
        else:
            factors, _ = results[module]
            slots += [Slot(f"{module}.{suffix}", factor) for suffix, factor in factors.items()]
    return slots


def _reader(source: Source, workspace: Workspace) -> Any:
    def read(entry: TensorEntry) -> Iterator[bytes]:
        if entry.file in source.shards:
            return source.read_bytes(entry)
        return workspace.journal.read_bytes(entry)

    return read


def pieces(data: bytes | Path) -> Iterator[bytes]:
    return read_chunks(data) if isinstance(data, Path) else iter([data])


def _facts(
    recipe: Recipe, records: dict[str, Any], fingerprint: dict[str, Any], settings: Settings
) -> dict[str, Any]:
    """The manifest's account of where the output came from."""
    import hashlib

    return {
        "source": {"name": settings.source_name, "revision": settings.revision},
        "recipe_sha256": hashlib.sha256(canonical_json(recipe.model_dump())).hexdigest(),
        "fallbacks": [f"{name}: {note}" for name in records for note in records[name]["notes"]],
        "run": fingerprint,
    }


def read_records(folder: Path) -> dict[str, dict[str, Any]]:
    """What compression recorded for every layer of an output: spec, type and relative error."""
    config = json.loads((folder / "config.json").read_bytes())
    return json.loads((folder / "blr_layers.json").read_bytes()) if "blr" in config else {}


def tensor_bytes(path: Path) -> int:
    """Bytes of tensor data in one shard."""
    return sum(entry.nbytes for entry in read_header(path).entries.values())


def _summarize(
    source: Source,
    recipe: Recipe,
    plan: Plan,
    records: dict[str, dict[str, Any]],
    workspace: Workspace,
    seconds: float,
) -> Summary:
    before = sum(entry.parameters for entry in source.entries.values())
    by_type: dict[str, list[float]] = {}
    for record in records.values():
        by_type.setdefault(record["type"], []).append(record["error"])
    return Summary(
        output=str(workspace.output),
        method=recipe.method,
        cf=plan.cf,
        parameters_before=before,
        parameters_after=before - plan.dense_parameters + plan.structured_parameters,
        bytes_before=sum(entry.nbytes for entry in source.entries.values()),
        bytes_after=sum(tensor_bytes(path) for path in workspace.output.glob("*.safetensors")),
        layers=len(plan.layers),
        errors={kind: sum(values) / len(values) for kind, values in by_type.items()},
        seconds=seconds,
        notes=plan.notes,
    )
