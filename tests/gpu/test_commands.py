"""`blr generate` of an exported folder, and what the commands refuse."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from bundled import CONTEXT, FOREIGN, NEW, POSITIONS, compressed, expected, exported, gpu_here
from fresh import LIMIT, MAIN, Done, as_user, blr_process

from blr.compressor.checkpoint.config import read_config

pytestmark = pytest.mark.gpu

WHOLE = re.compile(
    r"([\d.]+) tokens/s, ([\d,]+) bytes a token, ([\d.]+)% of the measured copy bandwidth"
)
STAGE = re.compile(r"^(\S+) +([\d.]+) us +([\d,]+) bytes$", re.M)
PIECES = 4  # in which a streamed text comes at least


@pytest.mark.parametrize(
    ("length", "why"),
    [("short", ""), ("long", f"exported for a context of {CONTEXT}")],
)
def test_text_streams(length: str, why: str, device: str, work: Path) -> None:
    """It arrives in pieces as it is generated, that of the reference; a message where it is not by
    the runtime."""
    passage = getattr(expected(work, "blast"), length)
    folder = exported(work, "blast", gpu_here())
    options = ("--max-new-tokens", NEW, "--dtype", "float32", "--device", device)
    done, pieces = streamed("generate", *options, "--", folder, passage.text)
    assert done.code == 0, done.last_line
    assert pieces >= PIECES
    assert done.out.strip() == passage.whole.strip()
    why = why if device == "cuda" else "not on a GPU"
    said = [line for line in done.messages if FOREIGN not in line]
    assert len(said) == bool(why) and all(why in line for line in said), said


def streamed(*arguments: object) -> tuple[Done, int]:
    """The command, and in how many pieces its output came."""
    command, pieces = [sys.executable, "-c", MAIN, *map(str, arguments)], []
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "bufsize": 0, "env": as_user()}
    with subprocess.Popen(command, **pipes) as process:
        while piece := process.stdout.read(1 << 16):
            pieces.append(piece)
        err = process.stderr.read().decode()
        code = process.wait(LIMIT)
    return Done(code, b"".join(pieces).decode(), err), len(pieces)


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


def profiled(folder: Path, device: str, *arguments: object) -> Done:
    """`blr generate --profile` of an export."""
    return blr_process("generate", "--profile", "--device", device, *arguments[:-1], "--", folder,
                       arguments[-1])  # fmt: skip


def test_profile_agrees_with_itself(alone: None, on_cuda: str, work: Path) -> None:
    folder = exported(work, "blast", gpu_here())
    done = profiled(folder, on_cuda, "--max-new-tokens", 32, "The protocol")
    found = parse_profile(done.err)
    microseconds, size = found.of_token(read_config(folder)["num_hidden_layers"])
    names = [name for name, _, _ in found.stages]
    assert 0 <= found.fraction <= 1.1
    assert names[0] == "embed" and "layer.*.attention" in names and "choose" in names
    assert 0.5 <= microseconds * found.tokens_per_second / 1e6 <= 2, "stages add up to a token"
    assert size == found.bytes


def refused(done: Done, code: int, fragment: str) -> None:
    """One line that says why, with its exit code."""
    errors = [line for line in done.messages if line.startswith("blr: error: ")]
    assert done.code == code, done.last_line
    assert len(errors) == 1 and fragment in errors[0] and "bug in blr" not in done.err, done.err


def test_profile_without_room_is_refused(on_cuda: str, work: Path) -> None:
    text = expected(work, "blast").long.text
    longer = text + "\n" + text[: len(text) // 4]
    done = profiled(exported(work, "blast", gpu_here()), on_cuda, "--max-new-tokens", 8, longer)
    refused(done, 9, "")


def test_profile_without_a_gpu_is_refused(work: Path) -> None:
    refused(profiled(exported(work, "blast", gpu_here()), "cpu", "The protocol"), 9, "")


@pytest.mark.parametrize(
    ("option", "value", "fragment"), [("--context", 5000, "positions"), ("--batch", 17, "1 to 16")]
)
def test_exports_out_of_range_are_refused(option: str, value: int, fragment: str, work: Path) -> None:
    output = work / f"refused{option}"
    source = compressed(work, "svd")
    done = blr_process("export", source, "-o", output, option, value, "--quiet")
    refused(done, 9, fragment)
    assert not done.out and not output.exists()


REFUSALS: dict[str, tuple[dict[str, Any], int, int, str]] = {
    "beyond the positions": ({}, POSITIONS, 9, "exceed"),
    "without triton": (
        *({"hidden": ["triton"], "environment": {"BLR_KERNELS": "triton"}}, NEW, 9, "no triton"),
    ),
    "BLR_KERNELS": (
        *({"environment": {"BLR_KERNELS": "fast"}}, NEW, 2, "expected one of auto, torch, triton"),
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_generate_is_refused(name: str, device: str, work: Path) -> None:
    given, new, code, fragment = REFUSALS[name]
    folder = exported(work, "svd", gpu_here())
    options = ("--device", device, "--max-new-tokens", new)
    done = blr_process("generate", folder, "The protocol", *options, **given)
    refused(done, code, fragment)
    assert not done.out
