"""What a healing run is asked to do, checked before any work."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Annotated

from blr.compressor.base.errors import UsageError
from blr.compressor.base.progress import CHECKING, HEALING, OWN, WRITING
from blr.compressor.recipe.option import Limits, check_limits
from blr.compressor.recipe.run_settings import RunSettings

SELF = "self"
KINDS = ("factors", "norms", "biases", "dense", "embeddings", "head")
LOSSES = ("kl", "lm")
LONGEST = 1e5  # minutes
MINUTES = 3.0  # when no budget is given
MIX = 2 / 3  # of own text beside the user's
HIDDEN = 4.0  # weight of the distance between the blocks' outputs, beside the divergence of logits
VARY = 0.2  # of the tokens where a text is read for the fourth time and on
NOT_IN_FINGERPRINT = (
    *("source_name", "revision", "teacher_name", "save_minutes", "overwrite", "restart", "check"),
    *("force", "fsdp", "micro", "track", "threads"),
)


Count = Annotated[int, Limits(1)]


@dataclass(frozen=True)
class HealOptions(RunSettings):
    """What `blr heal` is asked for.

    Attributes:
        teacher_name: of the dense model; recorded in the output.
        minutes, epochs, steps: exactly one is set once checked; epochs are of the user's text, or of the
            own text where that is all.
        micro: windows that a process takes a pass; None what fits.

    Options:
        data (--text, --data): Text, .jsonl or data set, repeatable; self: the teacher's own text. [self]
        mix: Share of the teacher's own text beside yours. [0.67]
        own_tokens: Tokens of own text to write.
            [by the budget, at most 16777216 on a GPU, 65536 on a CPU]
        vary: Share of tokens replaced where a text is read for the fourth time and on, lest it be learnt
            by heart. [0.2; 0 for --loss lm and encoders]
        minutes: Minutes of training. [3]
        epochs: Passes over the text instead.
        steps: Steps instead.
        rate (--lr): Rate a step, relative to the root mean square of each tensor.
        batch: Tokens a step, of all processes. [64 windows on a GPU, 8 on a CPU]
        window: Tokens a window.
        loss: kl: distance from the teacher's answers; lm: loss on the text.
        top_k: Compare only the teacher's K likeliest tokens. [all]
        hidden: Weight of the distance between the blocks' outputs.
            [4; 1 for encoders, 0 with --loss lm]
        train: Some of factors, norms, biases, dense, embeddings, head.
        lora: Train additions of this rank to every layer, merged in the end, not factors. [factors]
        warmup: Share of the run in which the rate rises.
        clip: Largest norm of the gradient.
        patience: Stop after so many tenths of the run without a new best.
        checkpointing: Less memory: keep only the inputs of the blocks. [where it would not fit a GPU]
        compile: torch.compile blocks and loss.
        fsdp: Share both models out over the processes (FSDP2), so that none holds all.
            [where they would not fit a GPU]
        track: Also log to tensorboard, wandb or another of accelerate's. [none]
        save_minutes: Minutes between saved states.
        seed: Seed of own text and of the order of windows.
        device: auto, cpu, cuda or cuda:N.
        force: Go on with a teacher that does not fit, and write a result that loses over one nat.
    """

    teacher_name: str = ""
    data: tuple[str, ...] = ()
    mix: float | None = None
    own_tokens: Count | None = None
    vary: float | None = None
    minutes: float | None = None
    epochs: float | None = None
    steps: int | None = None
    rate: float = 0.003
    batch: Count | None = None
    window: Annotated[int, Limits(8)] = 512
    loss: str = "kl"
    top_k: Count | None = None
    hidden: Annotated[float, Limits(0)] | None = None
    train: tuple[str, ...] = KINDS[:3]
    lora: Count | None = None
    warmup: Annotated[float, Limits(0, 0.9)] = 0.05
    clip: float = 1.0
    patience: Count | None = None
    checkpointing: bool | None = None
    compile: bool = False
    fsdp: bool | None = None
    micro: int | None = None
    track: str | None = None
    save_minutes: Annotated[float, Limits(0)] = 5.0
    seed: int = 0
    device: str = "auto"

    @property
    def files(self) -> list[str]:
        return [name for name in self.data if name != SELF]

    @property
    def varied(self) -> float:
        """The share of tokens that are others where a decoder's text is read again and again."""
        return (VARY if self.loss == "kl" else 0.0) if self.vary is None else self.vary

    @property
    def matches_states(self) -> bool:
        """Whether the blocks' outputs count."""
        return self.loss == "kl" if self.hidden is None else self.hidden > 0

    def trained(self, kinds: list[str]) -> list[str]:
        """What is trained, in words, where that is parameters of these `kinds` beside additions."""
        return [*([f"additions of rank {self.lora}"] if self.lora else []), *kinds]

    def fingerprint(self) -> dict[str, object]:
        """What a resumed run must agree on."""
        kept = {k: v for k, v in asdict(self).items() if k not in NOT_IN_FINGERPRINT}
        return {**kept, "data": self.data.count(SELF)}  # the texts by their contents, elsewhere


def check_options(options: HealOptions) -> HealOptions:
    """`options` with one budget and the share of own text filled in. Raises UsageError."""
    check_limits(options)
    budgets = [options.minutes, options.epochs, options.steps]
    if sum(budget is not None for budget in budgets) > 1:
        raise UsageError("give one of --minutes, --epochs and --steps, not several")
    for name, low, high in (
        ("minutes", 0, LONGEST), ("epochs", 0, 1e6), ("steps", 0, 1e9), ("rate", 0, 1), ("clip", 0, 1e9)
    ):  # fmt: skip
        value = getattr(options, name)
        if value is not None and not low < value <= high:
            option = "lr" if name == "rate" else name
            raise UsageError(f"--{option} {value:g}: expected a number over {low}, at most {high:g}")
    for name, values, known in (("loss", [options.loss], LOSSES), ("train", options.train, KINDS)):
        if unknown := [value for value in values if value not in known]:
            raise UsageError(f"--{name} {unknown[0]}: expected {', '.join(known)}")
    if not options.train:
        raise UsageError(f"--train: nothing to train; name some of {', '.join(KINDS)}")
    if options.mix is not None and not 0 <= options.mix <= 1:
        raise UsageError(f"--mix {options.mix:g}: expected a share from 0 to 1")
    if options.vary is not None and not 0 <= options.vary < 1:
        raise UsageError(f"--vary {options.vary:g}: expected a share from 0 to below 1")
    if options.mix and not options.files and options.mix < 1:
        raise UsageError(f"--mix {options.mix:g}: a mixture needs a text of yours; add --data FILE")
    _refuse_idle(options)
    if all(budget is None for budget in budgets):
        options = replace(options, minutes=MINUTES)
    return replace(options, mix=_own_share(options))


def _refuse_idle(options: HealOptions) -> None:
    """Raise UsageError for what another option leaves no use for."""
    if options.mix == 1 and options.files:
        raise UsageError("--mix 1 reads nothing of --data; lower it, or leave out --data")
    if options.own_tokens is not None and options.mix == 0:
        raise UsageError(f"--own-tokens {options.own_tokens}: --mix 0 takes none; leave one of them out")
    if options.vary and options.loss != "kl":
        raise UsageError(f"--vary {options.vary:g} is of --loss kl; leave it out")
    if options.top_k is not None and options.loss != "kl":
        raise UsageError(f"--top-k {options.top_k} is of --loss kl; leave it out")


def healing_steps(options: HealOptions) -> list[str]:
    """The steps of a healing, by what their bars say."""
    return [*[OWN] * bool(options.mix), HEALING, WRITING, CHECKING]


def checked_minutes(minutes: float | None) -> float | None:
    """`minutes` of healing as an option of another command gives them. Raises UsageError."""
    if minutes is not None and not 0 < minutes <= LONGEST:
        raise UsageError(f"--heal {minutes:g}: expected minutes over 0, at most {LONGEST:g}")
    return minutes


def _own_share(options: HealOptions) -> float:
    """Own text alone where no text is named, else the share asked for, else the mixture."""
    if not options.files:
        return 1.0
    return MIX if options.mix is None else options.mix
