"""The public interface: what the commands of `blr` do, as functions. The command line calls these.

All raise `blr.compressor.base.errors.BlrError`, of a kind for each exit code, with one line that says
what was found, what was expected and what to do. Folders are written whole or not at all: a run that is
stopped goes on from ``OUTPUT.blr-partial`` when it is called again. Where torchrun or accelerate has
started several processes, all of them call; the first one writes, and it alone is given a summary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blr.compressor.base import process_environment as environment
from blr.compressor.base.errors import UsageError
from blr.compressor.base.progress import Progress
from blr.compressor.checkpoint.regular import read_start
from blr.compressor.loading.resolve import default_output, resolve_model
from blr.compressor.recipe.chosen import asked_recipe
from blr.compressor.recipe.option import check_limits
from blr.compressor.recipe.schema import Recipe
from blr.compressor.text.reading import OWN, check_text
from blr.compressor.workspace.manifest import computing_digest
from blr.compressor.workspace.ownership import check_kept, check_output

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from blr.compressor.commands.compress import Summary
    from blr.compressor.exporting.job import ExportSummary
    from blr.compressor.healing.summary import HealSummary


def compress(
    model: str | Path,
    output: str | Path | None = None,
    recipe: Recipe | str | Path | None = None,
    *,
    effort: str | None = None,
    calibration: str | Path | None = None,
    heal: float | None = None,
    stream: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> Summary | None:
    """Write a checkpoint whose linear layers are structured, or stored in fewer bits.

    Args:
        model: a checkpoint folder, hub id or short name. output: None: ``./NAME-METHOD-cfCF``.
        recipe: a `Recipe`, the name of a shipped one or a YAML file.
        effort: "quick", "normal" or "best", of a calibration.
        calibration: a text file, data set or "self", the model's own text, to fit to.
        heal: minutes of training behind it. stream: leave the weights of a hub id there.
        progress: is told what is being done; None tells warnings and notes alone.
        settings: fields of `Recipe`, which win over it and over the effort, and of `CompressSettings`.
    """
    from blr.compressor.commands.compress import Settings
    from blr.compressor.commands.compress import compress as compress_folder
    from blr.compressor.recipe.settings import MINUTES, checked_minutes

    asked = {name: settings.pop(name) for name in [*settings] if name in Recipe.model_fields}
    text, progress = None if calibration is None else str(calibration), progress or Progress(quiet=True)
    own = text == OWN
    drafts = bool(settings.get("for_draft"))
    apart = ("gpu",) if drafts else ()
    resolved = asked_recipe(recipe, asked, text is not None, effort, own, apart=apart)
    heal = MINUTES if heal is None and drafts else heal
    options = Settings(str(model), calibration=text, heal=checked_minutes(heal), **settings)
    check_limits(options)
    if text is not None:
        check_text(text, options.offline)
    progress.output = default_output(str(model), resolved) if output is None else Path(output)
    if environment.is_first():
        check_output(progress.output, options.overwrite, (str(model),))
    whole = bool(options.heal or asked.get("mix") or own or options.allow_pickle)
    if stream and whole:
        said = "--stream with --heal, --mix, --text self or --allow-pickle: these take the whole model"
        raise UsageError(f"{said}; leave it out, and set HF_HOME to a disk with room")
    streamed = stream or (False if whole else None)
    found = resolve_model(
        str(model), revision=options.revision, offline=options.offline, stream=streamed
    )
    options = options.named(found.name, found.revision)
    return compress_folder(found.folder, resolved, progress.output, options, progress)


def heal(
    checkpoint: str | Path,
    output: str | Path,
    teacher: str | Path | None = None,
    *,
    data: str | Path | Sequence[str | Path] | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> HealSummary | None:
    """Train a compressed checkpoint to answer as the dense model does, and write it to `output`.

    Args:
        checkpoint: a folder that `compress` wrote, or a hub id.
        teacher: the dense model; None takes the one that the checkpoint's manifest names.
        data: text files or data sets; "self", and None, the teacher's own text.
        settings: fields of `recipe.settings.HealOptions` (minutes, steps, lora, …), by name.
    """
    from blr.compressor.base.threads import use_threads
    from blr.compressor.healing.teacher import named_teacher
    from blr.compressor.healing.tracking import check_installed
    from blr.compressor.recipe.settings import HealOptions, check_options

    name, progress = str(checkpoint), progress or Progress(quiet=True)
    options = check_options(HealOptions(name, data=tuple(map(str, _several(data))), **settings))
    use_threads(options.threads, environment.local_count())
    check_installed(options.track or "")
    for text in options.files:
        check_text(text, options.offline)
    progress.output = Path(output)
    if environment.is_first():
        check_output(progress.output, options.overwrite, [name, *([str(teacher)] if teacher else [])])
    found = resolve_model(name, revision=options.revision, offline=options.offline)
    if teacher is None:
        dense = named_teacher(found.folder, options.offline)
        progress.notes([f"teacher: {dense.folder}, as the manifest says"])
    else:
        dense = resolve_model(str(teacher), offline=options.offline)
    progress.loading()
    from blr.compressor.commands.heal import heal as heal_folder

    options = replace(options.named(found.name, found.revision), teacher_name=dense.name)
    return heal_folder(found.folder, dense.folder, progress.output, options, progress)


def export(
    checkpoint: str | Path, output: str | Path, *, progress: Progress | None = None, **settings: Any
) -> ExportSummary:
    """Write a checkpoint in the layout of the kernels, with the decoding runtime, or in another form.

    Args:
        checkpoint: a dense or compressed checkpoint folder, or a hub id.
        settings: fields of `exporting.options.ExportOptions` (kind, gpu, batch, quantize, …), by name.
    """
    from blr.compressor.base.threads import use_threads
    from blr.compressor.exporting.options import ExportOptions, check_options

    name, progress = str(checkpoint), progress or Progress(quiet=True)
    options = ExportOptions(name, **settings)
    check_options(options)
    use_threads(options.threads)
    progress.output = Path(output)
    check_output(progress.output, options.overwrite, [name, *filter(None, [options.small])])
    found = resolve_model(name, revision=options.revision, offline=options.offline)
    options = options.named(found.name, found.revision)
    if options.small is not None:
        draft = resolve_model(options.small, offline=options.offline).folder
        options = replace(options, draft=str(draft))
    _check_files(options.text)
    from blr.compressor.exporting.job import export as export_folder

    return export_folder(found.folder, progress.output, options, progress)


def load(
    checkpoint: str | Path,
    task: str | None = None,
    *,
    dtype: str = "float32",
    device: str = "auto",
    trust_remote_code: bool = False,
    verify: bool = True,
    offline: bool = False,
) -> PreTrainedModel:
    """Load the model of a checkpoint, dense or of blr, in evaluation mode, with every tensor finite.

    Args:
        checkpoint: a folder or hub id. device: "auto" or a torch device.
        task: the Auto class; None: "AutoModelForCausalLM" if it continues text, else "AutoModel".
        dtype: "float32", "bfloat16" or "float16", to compute in.
        trust_remote_code: run code of the folder, which outputs of blr do not need.
        verify: compare what is read of an output of blr with its manifest.
    """
    from blr.compressor.checkpoint.source import open_source
    from blr.compressor.loading.load import EMBEDS, GENERATES, load_model
    from blr.compressor.loading.native import continues_text

    folder = resolve_model(str(checkpoint), offline=offline).folder
    task = task or (GENERATES if continues_text(open_source(folder)) else EMBEDS)
    return load_model(folder, task, dtype=dtype, device=device, trust=trust_remote_code, verify=verify)


def evaluate(
    checkpoint: str | Path,
    text: str | Path | Sequence[str | Path] | None = None,
    *,
    progress: Progress | None = None,
    **settings: Any,
) -> dict[str, object]:
    """Measure a decoder's perplexity on texts and its scores in tasks, or an encoder's rank correlation.

    Args:
        checkpoint: a folder or hub id. text: text files or .jsonl.
        settings: fields of `recipe.settings.EvalSettings` (sts, tasks, against, …), by name.

    Returns JSON-ready `checkpoint`, and `perplexity` with `tokens` (or a list `texts` of them), `tasks`
    with a score for each metric, or `spearman` in percent. With `against` each has the distance from the
    dense model beside it (`against`, and `tasks_against`), and `dense` names that.
    """
    from blr.compressor.base.threads import use_threads
    from blr.compressor.integrations import lm_eval
    from blr.compressor.recipe.settings import EvalSettings, check_eval

    names = [name for name in ("sts", "tasks_path", "keep_dense") if settings.get(name) is not None]
    settings |= {name: Path(settings[name]) for name in names}
    asked = EvalSettings(text=tuple(map(Path, _several(text))), **settings)
    progress = progress or Progress(quiet=True)
    check_eval(asked)
    if asked.tasks:
        lm_eval.check_installed()
    use_threads(asked.threads)
    found = resolve_model(str(checkpoint), offline=asked.offline)
    _check_files(*asked.text, asked.sts)
    dense = resolve_model(asked.against, offline=asked.offline) if asked.against else None
    if asked.keep_dense:
        check_kept(asked.keep_dense, [at.folder for at in (found, dense) if at])
    progress.loading()
    from blr.compressor.commands.evaluate import evaluate_folder

    judged = {"name": found.name, "digest": computing_digest(found.folder)}  # for `blr push`
    told = {"checkpoint": judged, **({"dense": dense.name} if dense else {})}
    return told | evaluate_folder(found.folder, asked, progress, dense.folder if dense else None)


def _check_files(*paths: Path | None) -> None:
    """Raise InputError for a file that cannot be read, before torch is imported, which takes seconds."""
    for path in filter(None, paths):
        read_start(path)


def _several(names: str | Path | Sequence[str | Path] | None) -> Sequence[str | Path]:
    return [names] if isinstance(names, str | Path) else names or ()
