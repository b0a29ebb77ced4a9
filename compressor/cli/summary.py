"""What compress, heal and export say at their end: labelled lines, aligned, in colour on a terminal."""

import sys
from collections.abc import Iterable, Mapping
from shlex import quote
from typing import Any

from blr.compressor.base.device import installed_card
from blr.compressor.base.tables import size_text
from blr.compressor.output.loss_messages import number

Line = tuple[str, str]
PROMPT = '"A prompt"'


def laid_out(lines: Iterable[Line]) -> str:
    """Join labelled lines, with the labels in one column. Lines without a text are left out."""
    shown = [(label, text) for label, text in lines if text]
    width = 2 + max(len(label) for label, _ in shown)
    cells = [(f"{label}:".ljust(width), text) for label, text in shown]
    if sys.stdout.isatty():
        cells = [(f"\x1b[36m{label}\x1b[0m", text) for label, text in cells]
    return "\n".join(label + text for label, text in cells)


def size_line(summary: Mapping[str, Any]) -> Line:
    """The line with the size of all weights before and after."""
    before, after = summary["bytes_before"], summary["bytes_after"]
    factor, word = (before / after, "smaller") if before >= after else (after / before, "larger")
    change = f"the whole model {factor:.3f} times {word}"
    return "size", f"{size_text(before)} -> {size_text(after)}, {change}"


def check_lines(found: Mapping[str, object] | None) -> list[Line]:
    """The lines on perplexity, loss and check of an output; `found` is of `output/check.py`."""
    if found is None:
        return [("check", "not run, perplexity not measured")]
    ran = f"loaded and run on {found['ran']}, {found['distance']:.4f} relative difference of its outputs"
    if "unmeasured" in found:
        return [("perplexity", f"not measured: {found['unmeasured']}"), ("check", ran)]
    return [*_loss_lines(found), ("check", ran)] if "loss" in found else [("check", ran)]


def _loss_lines(found: Mapping[str, Any]) -> list[Line]:
    before, after = (number(found["perplexity"][name]) for name in ("before", "after"))
    lost = f"{found['loss']:z.3f} nats a token, mean KL {found['kl']['mean']:.3f} and the same top-1 "
    lost += f"token in {found['agreement']:.1%}, on the perplexity's tokens"
    return [("perplexity", f"{before} -> {after} on {found['read']}"), ("loss", lost)]


def healed_lines(summary: Mapping[str, Any]) -> list[Line]:
    """The lines on a training (`healing/summary.py`); none where nothing was trained.

    The figures that chose the best step are of other tokens than the loss of the output.
    """
    if not summary.get("steps"):
        return []
    speed = summary["tokens"] / max(summary["trained_seconds"], 1e-9)
    best = f"best after step {summary['best_step']:,}"
    if summary["best_step"] == 0:
        best = "nothing was better than the start, which is written"
    trained = f"{summary['parameters']:,} parameters, {summary['steps']:,} steps, {summary['tokens']:,} "
    trained += f"tokens, {speed:,.0f} a second; {best}"
    lines = [("trained", trained)]
    for name, before in summary["before"].items():
        text = "own text" if name == "self" else name
        lines.append(("best step", f"on windows of {text}: {_change(before, summary['after'][name])}"))
    return lines


def _change(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """The figures of one text before and after training."""
    names = {"distance": "1 - cosine of embeddings", "states": "error of hidden states"}
    if "distance" not in before:
        names = {"kl": "KL", "student": "cross entropy"}
    if "variation" in before:
        names |= {"variation": "drafts rejected"}
    said = ", ".join(f"{what} {before[n]:.4f} -> {after[n]:.4f}" for n, what in names.items())
    return said if "distance" in before else f"{said} (dense {before['teacher']:.4f})"


def time_line(summary: Mapping[str, Any]) -> Line:
    """The line with the seconds of the run and of its parts; parts under a second are left out."""
    spent = summary.get("spent", {})
    told = ", ".join(f"{what} {seconds:.0f}" for what, seconds in spent.items() if seconds >= 1)
    return "time", f"{summary['seconds']:.1f} s" + (f" ({told})" if told else "")


def use_lines(output: str, check: Mapping[str, object] | None) -> list[Line]:
    """What to do with a finished checkpoint: export it for the GPU of this machine, or try it; a server
    takes it as it is."""
    exported = next_line("export", output, "-o", quote(f"{output}-fast"))
    if not generates(check):
        return [exported if installed_card() else next_line("inspect", output)]
    served = f"vllm serve {quote(output)}, with blr beside vLLM; not an export"
    tried = next_line("generate", output, PROMPT)
    return [exported if installed_card() else tried, ("server", served)]


def generates(check: Mapping[str, object] | None) -> bool:
    """Whether a checked output continues text; one that was not checked may."""
    return check is None or not {"perplexity", "unmeasured"}.isdisjoint(check)


def next_line(command: str, output: str, *rest: str) -> Line:
    """The command to type next, on the folder that was written."""
    return "next", " ".join(("blr", command, quote(output), *rest))
