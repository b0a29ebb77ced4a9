"""The settings of an evaluation, which are checked before anything is read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from blr.compressor.base.device import COMPUTED
from blr.compressor.base.errors import UsageError
from blr.compressor.recipe.option import Limits, check_limits

USUAL_WINDOW = 512  # tokens of a window by default, if the model has so many positions
Count = Annotated[int, Limits(1)]


@dataclass(frozen=True)
class EvalSettings:
    """Texts, pairs or tasks, and how a model is judged by them.

    Options:
        text: Measure the perplexity of a decoder on this text file or .jsonl; repeatable.
        sts: Measure the Spearman correlation of an encoder on this CSV of sentence pairs and scores.
        against: Compare the output with this dense checkpoint or hub id, token by token. [none]
        keep_dense: Keep the dense model's states in this folder for further outputs. [nowhere]
        tasks: Run these tasks of lm-evaluation-harness, as hellaswag,arc_easy (extra eval).
        tasks_path: Folder of more task files (YAML).
        shots: Examples in the prompt of a task. [as the task says]
        limit: Documents of a task at most.
        window: Tokens of a window of text. [512, or the model's most]
        stride: Tokens from one window to the next. [the window]
        max_tokens: Read only this many tokens of a text.
        skip_tokens: Leave out the first tokens of a text. [read them all]
        batch: Windows or sentences computed at once.
        dtype: Compute in this dtype.
        device: Compute on auto, cpu, cuda or cuda:N.
        threads: Compute with this many CPU threads. [OMP_NUM_THREADS, or all free cores]
        trust_remote_code: Run modeling code found in the checkpoint.
        verify: Compare files written by blr with their manifest while they are read.
        offline: Read nothing from the network.
    """

    text: tuple[Path, ...] = ()
    sts: Path | None = None
    against: str | None = None
    keep_dense: Path | None = None
    tasks: str | None = None
    tasks_path: Path | None = None
    shots: Annotated[int, Limits(0, 1024)] | None = None
    limit: Count | None = None
    window: Annotated[int, Limits(2)] | None = None
    stride: Count | None = None
    max_tokens: Annotated[int, Limits(2)] | None = None
    skip_tokens: Annotated[int, Limits(0)] | None = None
    batch: Count = 8
    dtype: str = "float32"
    device: str = "auto"
    threads: Annotated[int, Limits(1, 1024)] | None = None
    trust_remote_code: bool = False
    verify: bool = True
    offline: bool = False

    @property
    def task_names(self) -> list[str]:
        """The names in `tasks`."""
        return [name.strip() for name in (self.tasks or "").split(",") if name.strip()]


def check_eval(settings: EvalSettings) -> None:
    """Raise UsageError if there is nothing to do, or for settings that nothing would use."""
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
    _refuse_unused("--against", settings, ("keep_dense",), bool(settings.against))
    _refuse_unused("--text", settings, ("keep_dense", "stride", "max_tokens", "skip_tokens"), bool(text))


def _refuse_unused(owner: str, settings: EvalSettings, names: tuple[str, ...], given: bool) -> None:
    """Raise UsageError if one of the settings `names` is given without the `owner` that they belong
    to."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not given:
            raise UsageError(f"--{name.replace('_', '-')} {value} belongs to {owner}; leave it out")
