"""What an evaluation is asked for, checked before anything is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from blr.compressor.base.dtypes import COMPUTED
from blr.compressor.base.errors import UsageError
from blr.compressor.recipe.option import Option, check_limits
from blr.compressor.recipe.run_settings import DEVICE, OFFLINE, THREADS

USUAL_WINDOW = 512  # tokens of a window that texts are judged in, where the model has so many positions
WINDOW = Option("Tokens a window of the texts.", f"{USUAL_WINDOW}, or the model's most", least=2)
VERIFY = Option("Hash what is read of an output of blr, against its manifest.")
TRUST = Option("Run modeling code found in the checkpoint.")


@dataclass(frozen=True)
class EvalSettings:
    """Texts, pairs or tasks, and how a model is judged by them. Each field's `Option` says more."""

    text: Annotated[
        tuple[Path, ...],
        Option("Text file or .jsonl: perplexity of a decoder on it; repeatable."),
    ] = ()
    sts: Annotated[
        Path | None, Option("CSV of sentence pairs and scores: Spearman of an encoder on it.")
    ] = None
    tasks: Annotated[
        str | None, Option("Tasks of lm-evaluation-harness, as hellaswag,arc_easy (extra eval).")
    ] = None
    tasks_path: Annotated[Path | None, Option("Folder of more task files (YAML).")] = None
    shots: Annotated[
        int | None, Option("Examples in a task's prompt.", "as the task says", least=0, most=1024)
    ] = None
    limit: Annotated[int | None, Option("Documents a task at most.", least=1)] = None
    window: Annotated[int | None, WINDOW] = None
    stride: Annotated[int | None, Option("Tokens between windows.", "the window", least=1)] = None
    max_tokens: Annotated[int | None, Option("Only the first tokens.", least=2)] = None
    skip_tokens: Annotated[int | None, Option("Not the first tokens.", "read them all", least=0)] = None
    batch: Annotated[int, Option("Windows or sentences at once.", least=1)] = 8
    dtype: Annotated[str, Option("Dtype to compute in.")] = "float32"
    device: Annotated[str, DEVICE] = "auto"
    threads: Annotated[int | None, THREADS] = None
    trust_remote_code: Annotated[bool, TRUST] = False
    verify: Annotated[bool, VERIFY] = True
    offline: Annotated[bool, OFFLINE] = False

    @property
    def task_names(self) -> list[str]:
        """Those of `tasks`."""
        return [name.strip() for name in (self.tasks or "").split(",") if name.strip()]


def check_eval(settings: EvalSettings) -> None:
    """Raise UsageError for nothing to do, or settings that nothing would use."""
    check_limits(settings)
    if settings.dtype not in COMPUTED:
        raise UsageError(f"dtype {settings.dtype!r}: expected one of {', '.join(COMPUTED)}")
    text, sts, tasks = settings.text, settings.sts, settings.tasks
    if not (text or tasks or sts):
        raise UsageError("eval needs --text FILE or --tasks NAMES (decoders), or --sts FILE (encoders)")
    if sts and (text or tasks):
        other = "--text" if text else "--tasks"
        raise UsageError(f"--sts is of encoders, {other} of decoders; leave one of them out")
    most = settings.window or USUAL_WINDOW
    _refuse_unused("--tasks", settings, ("tasks_path", "shots", "limit"), bool(tasks))
    if settings.stride is not None and settings.stride > most:
        raise UsageError(
            f"--stride {settings.stride} would pass tokens by; give at most --window {most}"
        )
    _refuse_unused("--text", settings, ("stride", "max_tokens", "skip_tokens"), bool(text))


def _refuse_unused(owner: str, settings: EvalSettings, names: tuple[str, ...], given: bool) -> None:
    """Raise UsageError for one of those settings where the one that they belong to is not given."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not given:
            raise UsageError(f"--{name.replace('_', '-')} {value} belongs to {owner}; leave it out")
