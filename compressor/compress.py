"""The compression of one checkpoint: plan, factorize layer by layer, write, check, commit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from blr.compressor.checkpoint.destination import check_apart
from blr.compressor.checkpoint.disk import Bytes, check_space
from blr.compressor.checkpoint.fingerprint import headers_digest, versions
from blr.compressor.checkpoint.header import TensorEntry, read_header
from blr.compressor.checkpoint.journal import canonical_json
from blr.compressor.checkpoint.remedies import storage_errors
from blr.compressor.checkpoint.shards import Slot, assign_shards
from blr.compressor.checkpoint.source import Source
from blr.compressor.checkpoint.workspace import Workspace
from blr.compressor.loading.checked import open_checked
from blr.compressor.machine.threads import use_threads
from blr.compressor.planning.plan import Plan, make_plan
from blr.compressor.progress import Progress
from blr.compressor.recipe.schema import Recipe

DEFAULT_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Settings:
    """What is not part of the recipe: where and how to run.

    `source_name` and `revision` are recorded in the output; `device` is a torch device name or
    "auto"; `threads` are those of the CPU, None as `use_threads` takes it; `max_shard_size` is in
    bytes; `calibration` names a text file or data set; the rest is as on the command line.
    """

    source_name: str
    revision: str | None = None
    device: str = "auto"
    threads: int | None = None
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
    check_apart(output, folder)
    settings = replace(settings, threads=use_threads(settings.threads))
    with Workspace(output, overwrite=settings.overwrite, restart=settings.restart) as workspace:
        if settings.allow_pickle:
            workspace.claim()
        source = open_checked(folder, settings.allow_pickle, workspace.pickled)
        plan = make_plan(source, recipe)
        progress.notes(plan.notes)
        needed = estimate_bytes(source, plan, recipe)
        with storage_errors(workspace.output.parent, needed, workspace.output):
            check_space(workspace.output.parent, needed - workspace.used_bytes())
            plan, records = _run(source, recipe, plan, workspace, settings, progress)
    return _summarize(source, recipe, plan, records, workspace, monotonic() - started)


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
    return {
        "source": headers_digest(source),
        "revision": settings.revision,
        "recipe": recipe.model_dump(),
        "max_shard_size": settings.max_shard_size,
        "device": settings.device,
        "threads": settings.threads,
        "calibration": _calibration(settings),
        "versions": versions(),
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
    from blr.compressor.checkpoint.scan import scan_source
    from blr.compressor.loading.carry import check_carried
    from blr.compressor.output.files import check_fits, check_reload, small_files, structured_config
    from blr.compressor.output.produce import Contents, produce

    check_fits(source, plan)
    check_carried(source, structured_config(source.config, plan))
    replaced = {planned.layer.entry.name for planned in plan.layers}
    read = scan_source(source, replaced, "repair the checkpoint or --exclude the layer", progress).digest
    if workspace.finished(read):
        return plan, read_records(workspace.output)
    plan, results, measured = _factorize(source, recipe, plan, workspace, settings, progress)
    records = {module: record for module, (_, record) in results.items()}
    facts = _facts(recipe, records, workspace.fingerprint, settings)
    about = {**facts, "calibration": measured.pop("calibration", None)}
    contents = Contents(
        assign_shards(_slots(source, plan, results), settings.max_shard_size),
        _reader(source, workspace),
        small_files(source, recipe, plan, records, measured, about),
    )
    facts["input_sha256"] = read
    produce(workspace, contents, partial(check_reload, source), lambda: facts, progress)
    return plan, records


def _calibration(settings: Settings) -> str | None:
    if settings.calibration is None:
        return None
    from blr.compressor.text.reading import calibration_digest

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
        from blr.compressor.fitting.factorize import factorize_layers

        results = factorize_layers(source, recipe, plan, workspace.journal, settings.device, progress)
        return plan, results, {}
    from blr.compressor.fitting.engine import compress_calibrated

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
    def read(entry: TensorEntry) -> Iterator[Bytes]:
        if entry.file in source.shards:
            return source.read_bytes(entry)
        return workspace.journal.read_bytes(entry)

    return read


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
