"""What a healing run is asked to do, checked before any work."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from blr.compressor.base.errors import CapabilityError, UsageError
from blr.compressor.base.progress import CHECKING, HEALING, OWN, WRITING
from blr.compressor.export.origin import Checkpoint
from blr.compressor.recipe.option import Option, check_limits
from blr.compressor.recipe.run_settings import DEVICE, RunSettings

SELF = "self"
KINDS = ("factors", "norms", "biases", "dense", "embeddings", "head")
LOSSES = ("kl", "lm")
CHUNK = 1 << 26  # logits made at once
LONGEST = 1e5  # minutes
MINUTES = 3.0  # when no budget is given
MIX = 2 / 3  # of own text beside the user's
HIDDEN = 4.0  # weight of the distance between the blocks' outputs, beside the divergence of logits
VARY = 0.2  # of the tokens where a text is read for the fourth time and on
NOT_IN_FINGERPRINT = (
    *("source_name", "revision", "teacher_name", "save_minutes", "overwrite", "restart", "check"),
    *("force", "fsdp", "micro", "track", "threads"),
)


@dataclass(frozen=True)
class HealOptions(RunSettings):
    """What `blr heal` is asked for. Fields with an `Option` say by it what they are; beside that:

    Attributes:
        teacher_name: of the dense model; recorded in the output.
        minutes, epochs, steps: exactly one is set once checked; epochs are of the user's text, or of the
            own text where that is all.
        micro: windows that a process takes a pass; None what fits.
    """

    teacher_name: str = ""
    data: Annotated[
        tuple[str, ...],
        Option(
            "Text, .jsonl or data set, repeatable; self: the teacher's own text.",
            SELF,
            ("--text", "--data"),
        ),
    ] = ()
    mix: Annotated[
        float | None, Option("Share of the teacher's own text beside yours.", f"{MIX:.2f}")
    ] = None
    own_tokens: Annotated[
        int | None,
        Option(
            "Tokens of own text to write.",
            "by the budget, at most 16777216 on a GPU, 65536 on a CPU",
            least=1,
        ),
    ] = None
    vary: Annotated[
        float | None,
        Option(
            "Share of tokens replaced where a text is read for the fourth time and on, lest it be "
            "learnt by heart.",
            f"{VARY:g}; 0 for --loss lm and encoders",
        ),
    ] = None
    minutes: Annotated[float | None, Option("Minutes of training.", f"{MINUTES:g}")] = None
    epochs: Annotated[float | None, Option("Passes over the text instead.")] = None
    steps: Annotated[int | None, Option("Steps instead.")] = None
    rate: Annotated[
        float,
        Option("Rate a step, relative to the root mean square of each tensor.", names=("--lr",)),
    ] = 0.003
    batch: Annotated[
        int | None,
        Option("Tokens a step, of all processes.", "64 windows on a GPU, 8 on a CPU", least=1),
    ] = None
    window: Annotated[int, Option("Tokens a window.", least=8)] = 512
    loss: Annotated[str, Option("kl: distance from the teacher's answers; lm: loss on the text.")] = "kl"
    top_k: Annotated[
        int | None, Option("Compare only the teacher's K likeliest tokens.", "all", least=1)
    ] = None
    hidden: Annotated[
        float | None,
        Option(
            "Weight of the distance between the blocks' outputs.",
            f"{HIDDEN:g}; 1 for encoders, 0 with --loss lm",
            least=0.0,
        ),
    ] = None
    train: Annotated[
        tuple[str, ...], Option(f"Some of {', '.join(KINDS)}.", typed=",".join(KINDS[:3]))
    ] = KINDS[:3]
    lora: Annotated[
        int | None,
        Option(
            "Train additions of this rank to every layer, merged in the end, not factors.",
            "factors",
            least=1,
        ),
    ] = None
    warmup: Annotated[
        float, Option("Share of the run in which the rate rises.", least=0.0, most=0.9)
    ] = 0.05
    clip: Annotated[float, Option("Largest norm of the gradient.")] = 1.0
    patience: Annotated[
        int | None, Option("Stop after so many tenths of the run without a new best.", least=1)
    ] = None
    checkpointing: Annotated[
        bool | None,
        Option("Less memory: keep only the inputs of the blocks.", "where it would not fit a GPU"),
    ] = None
    compile: Annotated[bool, Option("torch.compile blocks and loss.")] = False
    fsdp: Annotated[
        bool | None,
        Option(
            "Share both models out over the processes (FSDP2), so that none holds all.",
            "where they would not fit a GPU",
        ),
    ] = None
    micro: int | None = None
    track: Annotated[
        str | None, Option("Also log to tensorboard, wandb or another of accelerate's.", "none")
    ] = None
    save_minutes: Annotated[float, Option("Minutes between saved states.", least=0.0)] = 5.0
    seed: Annotated[int, Option("Seed of own text and of the order of windows.")] = 0
    device: Annotated[str, DEVICE] = "auto"
    force: Annotated[
        bool,
        Option("Go on with a teacher that does not fit, and write a result that loses over one nat."),
    ] = False

    @property
    def files(self) -> list[str]:
        """The user's texts."""
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

    def fingerprint(self) -> dict[str, Any]:
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


def check_takes_additions(student: Checkpoint, rank: int) -> None:
    """Raise CapabilityError for layers in few bits, which hold no sum with an addition, and UsageError
    for a `rank` that no layer has."""
    sizes = [min(spec.in_features, spec.out_features) for spec in student.specs.values()]
    if rank > max(sizes, default=rank):
        raise UsageError(
            f"--lora {rank}: expected at most {max(sizes)}, the largest rank of a layer; lower it"
        )
    if packed := sum(spec.quantized for spec in student.specs.values()):
        raise CapabilityError(
            f"{student.source.folder}: {packed} layers are stored in few bits, expected factors as they "
            "are for --lora; heal without it, which trains what is packed"
        )
