"""The settings of runs, healings and evaluations, which are checked before any work."""

from dataclasses import KW_ONLY, asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import Field

from blr.compressor.base.device import Computed
from blr.compressor.base.errors import UsageError
from blr.compressor.base.progress import CHECKING, HEALING, OWN, WRITING
from blr.compressor.recipe.fields import Share
from blr.compressor.recipe.option import check_limits, check_value
from blr.compressor.workspace.shards import DEFAULT_SHARD_BYTES

SELF = "self"
Kind = Literal["factors", "norms", "biases", "dense", "embeddings", "head"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MINUTES = 3.0  # default budget
MIX = 2 / 3  # default share of own text beside the user's
USUAL_WINDOW = 512  # tokens of an evaluation's window by default, if the model has so many positions
HIDDEN = 4.0  # default weight of the distance between the blocks' outputs, beside --loss kl
VARY = 0.2  # default share of the tokens that are replaced from the fourth epoch on
NOT_IN_FINGERPRINT = (
    *("source_name", "revision", "teacher_name", "save_minutes", "overwrite", "restart", "check"),
    *("force", "fsdp", "micro", "track", "threads"),
)
Count = Annotated[int, Field(ge=1)]
Minutes = Annotated[float, Field(gt=0, le=1e5)]


@dataclass(frozen=True)
class RunSettings:
    """How a run reads and writes. The output records `source_name` and `revision`; `max_shard_size` is
    in bytes.

    Options:
        threads: Compute with this many CPU threads. [OMP_NUM_THREADS, or all free cores]
        max_shard_size: Largest file of weights, as 500MB or 5GB.
        revision: Branch, tag or commit on the hub. [main]
        overwrite: Replace an output folder that blr wrote.
        restart: Discard the work of an interrupted run, and start again.
        allow_pickle: Read weights from pytorch_model.bin, too.
        check: Run the output and measure its loss before it appears.
        force: Write the output even if it loses over 1 nat a token.
        offline: Read nothing from the network.
    """

    source_name: str
    _: KW_ONLY
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    max_shard_size: int = DEFAULT_SHARD_BYTES
    revision: str | None = None
    overwrite: bool = False
    restart: bool = False
    allow_pickle: bool = False
    check: bool = True
    force: bool = False
    offline: bool = False

    def named(self, name: str, revision: str | None) -> Self:
        """The same settings for a model that was found under another name."""
        return replace(self, source_name=name, revision=revision)


@dataclass(frozen=True)
class CompressSettings(RunSettings):
    """How a compression runs. `calibration` names a text file or data set; `heal` is how many minutes
    training takes after the fits.

    Options:
        device: Compute on auto, cpu, cuda or cuda:N.
        for_draft: Choose the form that makes the best draft of the model on --gpu, and heal it for that.
    """

    for_draft: bool = False
    calibration: str | None = None
    heal: float | None = None
    device: str = "auto"


@dataclass(frozen=True)
class HealOptions(RunSettings):
    """What `blr heal` is asked for.

    Attributes:
        teacher_name: the dense model's name, which the output records.
        minutes, epochs, steps: one of them is set by `check_options`; an epoch reads the user's text, or
            the teacher's if there is no other.
        micro: windows that a process takes in a pass; None: as many as fit.

    Options:
        data (--text, --data): Train on this text file, .jsonl or data set; repeatable; self is text that
            the teacher writes. [self]
        mix: Share of text that the teacher writes, beside yours. [0.67]
        own_tokens: Tokens that the teacher writes.
            [by the budget, at most 16777216 on a GPU, 65536 on a CPU]
        vary: From the fourth epoch on, replace this share of the tokens at random, against overfitting.
            [0.2; 0 for --loss lm and encoders]
        minutes: Train for this many minutes. [3]
        epochs: Read the text this many times, in place of --minutes.
        steps: Take this many optimizer steps, in place of --minutes.
        rate (--lr): Learning rate, relative to the root mean square of each tensor.
        batch: Tokens of a step, over all processes. [64 windows on a GPU, 8 on a CPU]
        window: Tokens of a window.
        loss: Minimize kl, the divergence from the teacher; lm, the loss on the text; or variation, the
            share of tokens that a draft proposes in vain.
        top_k: Compare only the K tokens that the teacher finds likeliest. [all]
        hidden: Weight of the distance between outputs of blocks, beside --loss.
            [4; 1 for encoders, 0 with --loss lm]
        train: Parameters to train: some of factors, norms, biases, dense, embeddings, head.
        lora: Train low-rank additions of this rank, merged at the end, in place of factors. [factors]
        warmup: Share of the run in which the learning rate rises.
        clip: Largest norm of the gradient.
        patience: Stop after this many tenths of the run without a better result.
        checkpointing: Save memory: keep only the inputs of the blocks. [where it would not fit a GPU]
        compile: Compile blocks and loss with torch.compile.
        fsdp: Divide both models over the processes (FSDP2), so that none holds all.
            [where they would not fit a GPU]
        track: Also log to tensorboard, wandb or another tracker of accelerate. [none]
        save_minutes: Save the state every so many minutes.
        seed: Seed of the teacher's text and of the order of windows.
        device: Compute on auto, cpu, cuda or cuda:N.
        force: Take a teacher that does not fit, and write a result that loses over 1 nat a token.
    """

    teacher_name: str = ""
    data: tuple[str, ...] = ()
    mix: Share | None = None
    own_tokens: Count | None = None
    vary: Annotated[float, Field(ge=0, lt=1)] | None = None
    minutes: Minutes | None = None
    epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    steps: Annotated[int, Field(gt=0, le=1e9)] | None = None
    rate: Annotated[float, Field(gt=0, le=1)] = 0.003
    batch: Count | None = None
    window: Annotated[int, Field(ge=8)] = 512
    loss: Literal["kl", "lm", "variation"] = "kl"
    top_k: Count | None = None
    hidden: Annotated[float, Field(ge=0)] | None = None
    train: tuple[Kind, ...] = KINDS[:3]
    lora: Count | None = None
    warmup: Annotated[float, Field(ge=0, le=0.9)] = 0.05
    clip: Annotated[float, Field(gt=0, le=1e9)] = 1.0
    patience: Count | None = None
    checkpointing: bool | None = None
    compile: bool = False
    fsdp: bool | None = None
    micro: int | None = None
    track: str | None = None
    save_minutes: Annotated[float, Field(ge=0)] = 5.0
    seed: int = 0
    device: str = "auto"

    @property
    def files(self) -> list[str]:
        return [name for name in self.data if name != SELF]

    @property
    def varied(self) -> float:
        """The share of tokens that are replaced when a decoder's text is read again and again."""
        return (VARY if self.loss != "lm" else 0.0) if self.vary is None else self.vary

    @property
    def matches_states(self) -> bool:
        """Whether the distance between the blocks' outputs counts."""
        return self.loss != "lm" if self.hidden is None else self.hidden > 0

    def trained(self, kinds: list[str]) -> list[str]:
        """What is trained, in words: additions, and parameters of these `kinds`."""
        return [*([f"additions of rank {self.lora}"] if self.lora else []), *kinds]

    def fingerprint(self) -> dict[str, object]:
        """The settings that a resumed run must have in common."""
        kept = {k: v for k, v in asdict(self).items() if k not in NOT_IN_FINGERPRINT}
        return {**kept, "data": self.data.count(SELF)}  # the texts by their contents, elsewhere


def check_options(options: HealOptions) -> HealOptions:
    """`options` with one budget and the share of own text filled in. Raises UsageError."""
    check_limits(options)
    budgets = [options.minutes, options.epochs, options.steps]
    if sum(budget is not None for budget in budgets) > 1:
        raise UsageError("give one of --minutes, --epochs and --steps, not several")
    if not options.train:
        raise UsageError(f"--train: nothing to train; name some of {', '.join(KINDS)}")
    if options.mix and not options.files and options.mix < 1:
        raise UsageError(f"--mix {options.mix:g}: a mixture needs a text of yours; add --text FILE")
    _refuse_idle(options)
    if all(budget is None for budget in budgets):
        options = replace(options, minutes=MINUTES)
    mix = MIX if options.mix is None else options.mix
    return replace(options, mix=mix if options.files else 1.0)


def _refuse_idle(options: HealOptions) -> None:
    """Raise UsageError for options that have no use beside others."""
    if options.mix == 1 and options.files:
        raise UsageError("--mix 1 reads nothing of --text; lower it, or leave out --text")
    if options.own_tokens is not None and options.mix == 0:
        raise UsageError(f"--own-tokens {options.own_tokens}: --mix 0 takes none; leave one of them out")
    if options.vary and options.loss == "lm":
        raise UsageError(f"--vary {options.vary:g} is not of --loss lm; leave it out")
    if options.top_k is not None and options.loss != "kl":
        raise UsageError(f"--top-k {options.top_k} is of --loss kl; leave it out")


def healing_steps(options: HealOptions) -> list[str]:
    """The steps of a healing, by the names of their progress bars."""
    return [*[OWN] * bool(options.mix), HEALING, WRITING, CHECKING]


def checked_minutes(minutes: float | None) -> float | None:
    """`minutes` of healing, as an option of another command. Raises UsageError if out of range."""
    check_value("--heal", minutes, Minutes | None)
    return minutes


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """How a model is loaded and run.

    Options:
        dtype: Compute in this dtype.
        device: Compute on auto, cpu, cuda or cuda:N.
        threads: Compute with this many CPU threads. [OMP_NUM_THREADS, or all free cores]
        trust_remote_code: Run modeling code found in the checkpoint.
        verify: Compare files written by blr with their manifest while they are read.
        offline: Read nothing from the network.
    """

    dtype: Computed | None = "float32"
    device: str = "auto"
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    trust_remote_code: bool = False
    verify: bool = True
    offline: bool = False


@dataclass(frozen=True, kw_only=True)
class GenerateSettings(ModelSettings):
    """How a prompt is continued; temperature 0 is greedy decoding.

    Options:
        max_new_tokens: Tokens to generate.
        temperature: Sample at this temperature; 0 takes the likeliest token.
        top_k: Sample among the K likeliest tokens.
        top_p: Sample among the likeliest tokens of this total probability.
        seed: Seed of sampling.
        profile: Time the stages of the fused runtime, on standard error.
        dtype: Dtype to compute in. [float32; of exports on a GPU: as stored]
    """

    max_new_tokens: Count = 64
    temperature: Annotated[float, Field(ge=0)] = 0.0
    top_k: Count | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: int = 0
    profile: bool = False
    dtype: Computed | None = None


def check_generate(settings: GenerateSettings) -> None:
    """Raise UsageError for settings that do not fit, or that nothing would use."""
    check_limits(settings)
    if settings.temperature == 0 and (settings.top_k, settings.top_p) != (None, None):
        raise UsageError("--top-k and --top-p belong to sampling; give --temperature, as 0.8, too")


@dataclass(frozen=True, kw_only=True)
class EvalSettings(ModelSettings):
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
    """

    text: tuple[Path, ...] = ()
    sts: Path | None = None
    against: str | None = None
    keep_dense: Path | None = None
    tasks: str | None = None
    tasks_path: Path | None = None
    shots: Annotated[int, Field(ge=0, le=1024)] | None = None
    limit: Count | None = None
    window: Annotated[int, Field(ge=2)] | None = None
    stride: Count | None = None
    max_tokens: Annotated[int, Field(ge=2)] | None = None
    skip_tokens: Annotated[int, Field(ge=0)] | None = None
    batch: Count = 8
    dtype: Computed = "float32"

    @property
    def task_names(self) -> list[str]:
        """The names in `tasks`."""
        return [name.strip() for name in (self.tasks or "").split(",") if name.strip()]


def check_eval(settings: EvalSettings) -> None:
    """Raise UsageError if there is nothing to do, or for settings that nothing would use."""
    check_limits(settings)
    text, sts, tasks = settings.text, settings.sts, settings.tasks
    if not (text or tasks or sts):
        raise UsageError("eval needs --text FILE or --tasks NAMES (decoders), or --sts FILE (encoders)")
    if sts and (text or tasks):
        other = "--text" if text else "--tasks"
        raise UsageError(f"--sts is of encoders, {other} of decoders; leave one of them out")
    for owner, given, names in (
        ("--tasks", tasks, ("tasks_path", "shots", "limit")),
        ("--against", settings.against, ("keep_dense",)),
        ("--text", text, ("keep_dense", "stride", "max_tokens", "skip_tokens")),
    ):
        unused = [name for name in names if getattr(settings, name) is not None and not given]
        for name in unused:
            found = f"--{name.replace('_', '-')} {getattr(settings, name)}"
            raise UsageError(f"{found} belongs to {owner}; leave it out")
    most = settings.window or USUAL_WINDOW
    if (settings.stride or 0) > most:
        found = f"--stride {settings.stride} would pass tokens by"
        raise UsageError(f"{found}; give at most --window {most}")
