"""`blr generate` of an exported folder, and what the commands refuse."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic

from features.exports import CONTEXT, FOREIGN, NEW, POSITIONS, compressed, expected, exported, gpu_here
from features.report import Row, row
from features.work import LIMIT, MAIN, Done, blr_process

from blr.compressor.checkpoint.source import read_config

WHOLE = re.compile(
    r"([\d.]+) tokens/s, ([\d,]+) bytes a token, ([\d.]+)% of the measured copy bandwidth"
)
STAGE = re.compile(r"^(\S+) +([\d.]+) us +([\d,]+) bytes$", re.M)
PIECES = 4  # in which a streamed text comes at least


def check_stream(work: Path, device: str) -> Iterator[Row]:
    """Text arrives in pieces as it is generated, that of the reference; a message where it is not by
    the runtime."""
    given, folder = expected(work, "blast"), exported(work, "blast", gpu_here())
    options = ("--max-new-tokens", NEW, "--dtype", "float32", "--device", device)
    for passage, why in ((given.short, ""), (given.long, f"exported for a context of {CONTEXT}")):
        name = f"blr generate after {len(passage.ids)} tokens"
        done, times = streamed("generate", *options, "--", folder, passage.text)
        later = times[-1] - times[0] if times else 0.0
        took = f"{len(times)} pieces, the last {later:.3f} s after the first"
        yield row(len(times) >= PIECES, f"{name} streams", took)
        same = done.code == 0 and done.out.strip() == passage.whole.strip()
        yield row(same, f"{name}, text of the reference", f"exit code {done.code}")
        why = why if device == "cuda" else "not on a GPU"
        said = [line for line in done.messages if FOREIGN not in line]
        good = len(said) == bool(why) and all(why in line for line in said)
        yield row(good, f"{name}, message", "; ".join(said) or "none")


def streamed(*arguments: object) -> tuple[Done, list[float]]:
    """The command, and when pieces of its output came."""
    command = [sys.executable, "-c", MAIN, *map(str, arguments)]
    pieces, times = [], []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while piece := os.read(process.stdout.fileno(), 1 << 16):
            pieces.append(piece)
            times.append(monotonic())
        err = process.stderr.read().decode()
        code = process.wait(LIMIT)
    return Done(code, b"".join(pieces).decode(), err), times


@dataclass(frozen=True)
class Profile:
    """What `--profile` prints: `stages` are name, microseconds and bytes of one layer's."""

    tokens_per_second: float
    bytes: int
    fraction: float
    stages: list[tuple[str, float, int]]

    def of_token(self, layers: int) -> tuple[float, int]:
        """Microseconds and bytes of the stages of a token of `layers` layers."""
        counts = [layers if "*" in name else 1 for name, _, _ in self.stages]
        pairs = list(zip(counts, self.stages, strict=True))
        return sum(n * us for n, (_, us, _) in pairs), sum(n * size for n, (_, _, size) in pairs)


def parse_profile(text: str) -> Profile:
    """The figures in `text`. Raises ValueError when there are none."""
    whole = WHOLE.search(text)
    if whole is None:
        raise ValueError(f"no profile in {text.strip()[-200:]!r}")
    number = lambda figure: int(figure.replace(",", ""))  # noqa: E731
    stages = [(name, float(us), number(size)) for name, us, size in STAGE.findall(text)]
    return Profile(float(whole[1]), number(whole[2]), float(whole[3]) / 100, stages)


def check_profile(work: Path, device: str) -> Iterator[Row]:
    """Figures of `--profile` that agree with each other; a prompt without room is refused."""
    folder = exported(work, "blast", gpu_here())
    options = ("--max-new-tokens", 32, "--profile", "--device", device)
    done = blr_process("generate", folder, "The protocol", *options)
    if device != "cuda":
        yield row(done.code == 9, "refused: a profile without a GPU", done.last_line)
        return
    yield from sane(parse_profile(done.err), read_config(folder)["num_hidden_layers"])
    text = expected(work, "blast").long.text
    asked = ("--profile", "--max-new-tokens", 8, "--", folder, text + "\n" + text[: len(text) // 4])
    run = partial(blr_process, "generate", *asked)
    yield refused("a profile beyond the exported context", 9, "", run, printed=True)


def sane(found: Profile, layers: int) -> Iterator[Row]:
    """What must hold between the figures of a profile."""
    microseconds, size = found.of_token(layers)
    token = 1e6 / found.tokens_per_second
    fraction, names = found.fraction, [name for name, _, _ in found.stages]
    yield row(0 <= fraction <= 1.1, "profile, fraction of bandwidth", f"{fraction:.1%}")
    whole = names[0] == "embed" and "layer.*.attention" in names and "choose" in names
    yield row(whole, "profile, stages", ", ".join(names))
    near = f"{microseconds:.0f} us, a token {token:.0f} us"
    yield row(0.5 <= microseconds / token <= 2, "profile, stages add up to a token", near)
    yield row(size == found.bytes, "profile, bytes add up", f"{size:,} and {found.bytes:,}")


def refused(name: str, code: int, fragment: str, run: Callable[[], Done], printed: bool = False) -> Row:
    """PASS for one line that says why, this exit code, and nothing on standard output unless
    something may be `printed` before."""
    done = run()
    errors = [line for line in done.messages if line.startswith("blr: error: ")]
    good = done.code == code and len(errors) == 1 and fragment in errors[0]
    good &= "bug in blr" not in done.err and (printed or not done.out)
    return row(good, f"refused: {name}", f"exit code {done.code}: {done.last_line}")


def check_refusals(work: Path, device: str) -> Iterator[Row]:
    """What the commands do not take."""
    source, output = compressed(work, "svd"), work / "refused"
    for option, value, fragment in (("--context", 5000, "positions"), ("--batch", 9, "1 to 8")):
        run = partial(blr_process, "export", source, "-o", output, option, value, "--quiet")
        yield refused(f"blr export {option} {value}", 9, fragment, run)
    yield row(not output.exists(), "refused: an export leaves nothing")
    folder = exported(work, "svd", gpu_here())
    generate = partial(blr_process, "generate", folder, "The protocol", "--device", device)
    long = partial(generate, "--max-new-tokens", POSITIONS)
    yield refused("blr generate beyond the positions", 9, "exceed", long)
    insist = partial(generate, hidden=["triton"], environment={"BLR_KERNELS": "triton"})
    yield refused("BLR_KERNELS=triton without triton", 9, "no triton", insist)
    wrong = partial(generate, environment={"BLR_KERNELS": "fast"})
    yield refused("BLR_KERNELS=fast", 2, "expected one of auto, torch, triton", wrong)
