"""Messages about the loss of an output (`loss.py`), and its numbers rounded. No torch."""

from collections.abc import Mapping
from typing import TypedDict

from blr.compressor.checkpoint.source import Source
from blr.compressor.planning.plan import Plan
from blr.compressor.recipe.schema import DENSE, Recipe

MARK = "<!-- loss -->\n"  # in a card: a line in whose place the sentence comes
MOST = 1.0  # nats a token that an output may lose without --force
LARGE = 0.25  # from which on it is warned of
DIGITS = 5  # significant ones that files have: sums differ in more by the threads that made them
HEALED = 8  # minutes that are advised
RANK = 16  # of a correction that is advised
TEXT = "--text TEXT (text of the kind that the model will read)"


class Divergence(TypedDict):
    """Of divergences, in nats: the mean with its standard error, percentiles, and the worst windows."""

    mean: float
    error: float
    tokens: int
    percentiles: dict[str, float]
    worst: list[dict[str, float]]


class LossFacts(TypedDict, total=False):
    """A measured loss in nats a token, or why it is `unmeasured`; empty where there is none. `tokens` in
    windows of `window` were read, the first at place `first`; `read` describes them. `agreement` is a
    share, `kl` as of `loss.divergence`."""

    read: str
    loss: float
    agreement: float
    perplexity: dict[str, float]
    kl: Divergence
    tokens: int
    window: int
    first: int | None
    unmeasured: str


class CheckFacts(LossFacts, total=False):
    """The same beside what was run, and the relative difference of its results."""

    ran: str
    distance: float


def told(facts: LossFacts) -> str:
    """A sentence on a loss, without its full stop; of one that was not measured, why."""
    if "unmeasured" in facts:
        return f"not measured: {facts['unmeasured']}"
    before, after = (number(facts["perplexity"][name]) for name in ("before", "after"))
    windows = "" if facts.get("first") is None else f", in windows of {facts['window']}"
    kl = f", mean KL {facts['kl']['mean']:.3f}" if "kl" in facts else ""  # not of earlier versions
    return (
        f"{before} -> {after} on {facts['read']}{windows}: {facts['loss']:z.3f} nats a token lost{kl}, "
        f"the same top-1 token in {facts['agreement']:.1%} of places"
    )


def number(perplexity: float) -> str:
    """A perplexity with its significant digits."""
    if perplexity < 1000:
        return f"{perplexity:.{2 if perplexity < 100 else 1}f}"
    return f"{perplexity:,.0f}" if perplexity < 1e9 else f"{perplexity:.1e}"


def rounded(value: object) -> object:
    """Facts with their numbers rounded for files."""
    if isinstance(value, Mapping):
        return {name: rounded(item) for name, item in value.items()}
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def better_fit(recipe: Recipe, calibrated: bool, healed: bool) -> str:
    """The advice that loses less than a compression by `recipe`."""
    own = recipe.own()
    stored = own.stored
    if not calibrated and not healed:
        return f"add {TEXT}"
    if own.method == DENSE and stored.bits in (2, 3):
        return (
            f"correct what int{stored.bits} loses: --base int{stored.bits} --method svd --rank {RANK} "
            f"in place of --quantize int{stored.bits}"
        )
    if not healed:
        return f"train it against the dense model (--heal {HEALED}, or blr heal), or {_larger(recipe)}"
    if not calibrated:
        return f"add {TEXT}, which healing reads, too"
    return _larger(recipe)


def _larger(recipe: Recipe) -> str:
    own = recipe.own()
    if own.stored.base:
        return "take a larger --rank or --bpw, or more bits of --base"
    if recipe.sized_by_cf:
        return f"take a smaller --cf than {recipe.cf:g}"
    if own.method != DENSE:
        return f"take a larger --rank than {own.rank}"
    return "take more bits of --quantize" if own.stored.bits else "take a smaller --kv-cf"


def better_export(
    quantize: str | None, head: str | None, fits_know_text: bool, healed: bool = False
) -> str:
    """The advice that loses less than an export in these formats. `fits_know_text`: fits were
    calibrated, or there are none."""
    packed = (("quantize", quantize), ("quantize-head", head))
    lesser = [f"--{name} int8" for name, kind in packed if kind == "int4"]
    coarse = [f"take {' '.join(lesser)}"] if lesser else []
    if not fits_know_text:
        coarse.insert(0, "compress the model with --text TEXT first")
    return ", or ".join([*coarse, f"heal the checkpoint {'longer' if healed else 'first'} (blr heal)"])


def better_healing(texts: bool) -> str:
    """The advice that loses less than a training, with or without `texts` of the user's."""
    more = "train longer (--minutes) unless an early step was the best, or compress the model less"
    return more if texts else f"give --text TEXT of the kind that the model will read, {more}"


def advice(plan: Plan, source: Source, aware: bool) -> str | None:
    """A hint to calibrate, for a decoder that was not; None if it is `aware` of a text."""
    writes = str((source.config.get("architectures") or [""])[0]).endswith(("CausalLM", "LMHeadModel"))
    fewer = any(layer.spec.parameters < layer.spec.dense_parameters for layer in plan.layers)
    if aware or not (writes and fewer):
        return None
    return "fitted without a text; with --text TEXT the loss is several times smaller"
