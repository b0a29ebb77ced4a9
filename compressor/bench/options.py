"""What each command of `blr bench` is asked, and how the command line says it. No torch.

Settings and options are one list: `cli/bench.py` makes an option of every field, with the help, the
default and the limits that stand here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

from blr.compressor.base.errors import UsageError

MOST = 2**31 - 1
_COUNT = re.compile(r"[0-9]{1,10}")


def words(text: str) -> tuple[str, ...]:
    """Comma-separated words, each once. Raises UsageError when there is none."""
    if found := tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip())):
        return found
    raise UsageError(f"{text!r}: expected names separated by commas")


def counts(text: str, option: str, most: int | None = None) -> tuple[int, ...]:
    """Comma-separated integers from 1 to `most`. Raises UsageError."""
    found = [word.strip() for word in text.split(",")]
    if not all(_COUNT.fullmatch(w) and 0 < int(w) <= (most or MOST) for w in found):
        limit = "" if most is None else f" up to {most}"
        raise UsageError(f"{option} is {text!r}: expected positive integers{limit} such as 1,2,4")
    return tuple(dict.fromkeys(map(int, found)))


def shares(text: str, option: str) -> tuple[float, ...]:
    """Comma-separated numbers between 0 and 1. Raises UsageError."""
    try:
        found = tuple(float(word) for word in words(text))
    except ValueError:
        found = ()
    if not found or not all(0 < share < 1 for share in found):
        raise UsageError(f"{option} is {text!r}: expected shares between 0 and 1 such as 0.5,0.75")
    return found


def pairs(text: str, option: str) -> tuple[tuple[int, ...], ...]:
    """Comma-separated batch x length. Raises UsageError."""
    found = [word.split("x") for word in words(text)]
    if any(len(sizes) != 2 for sizes in found):
        raise UsageError(f"{option} is {text!r}: expected batch x length such as 4x1024,1x16384")
    return tuple((*counts(a, option), *counts(b, option)) for a, b in found)


@dataclass(frozen=True)
class OptionText:
    """What the command line says of a field. `shown`: the default in words; limits are of integers."""

    help: str
    shown: str | None = None
    least: int = 1
    most: int | None = None


def option(default: Any, help: str, shown: str | None = None, **limits: int) -> Any:
    """A field with its option."""
    return field(default=default, metadata={"told": OptionText(help, shown, **limits)})


def of_text(options: type, given: Mapping[str, Any]) -> Any:
    """`options` of what was typed: lists by commas. Raises UsageError."""
    found, hints = dict(given), get_type_hints(options)
    for each in fields(options):
        text, name = found.get(each.name), f"--{each.name}"
        if not isinstance(text, str) or not each.metadata:
            continue
        if hints[each.name] == Sequence[str]:
            found[each.name] = words(text)
        elif hints[each.name] == Sequence[int]:
            found[each.name] = counts(text, name, each.metadata["told"].most)
        elif hints[each.name] == Sequence[float]:
            found[each.name] = shares(text, name)
        elif hints[each.name] == Sequence[tuple[int, int]]:
            found[each.name] = pairs(text, name)
    return options(**found)


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What all commands take. `seconds`: after which no case is started."""

    device: str = "auto"
    seconds: float | None = option(None, "Start no further case after this many seconds.")


@dataclass(frozen=True, kw_only=True)
class LayerOptions(BenchOptions):
    """`blr bench layers`."""

    models: Sequence[str] = option(
        (), "Comma-separated, of configs/bench-shapes.yaml.", shown="llama-7b; gpt2-s on a CPU"
    )
    structures: Sequence[str] = option(
        ("svd", "monarch", "blast", "ks"), "Some of svd,pivoted,monarch,blast,ks."
    )
    n: Sequence[int] = option((), "Tokens, comma-separated.", shown="1,1024,4096; 1,64 on a CPU")
    dtype: str = option("bfloat16", "float32, tf32, float16 or bfloat16.")
    cf: float | None = option(None, "Compression factor.", shown="the model's published one")
    blocks: Sequence[int] = option(
        (), "Blocks of Monarch and BLAST.", shown="published; BLAST also 4,8,16"
    )
    repeats: int = option(10, "Samples of each arm.")
    compiling: bool | None = option(
        None, "torch.compile arms, at the smallest and the largest n.", shown="compile on a GPU"
    )


@dataclass(frozen=True, kw_only=True)
class ModelOptions(BenchOptions):
    """What commands of whole models take."""

    dtype: str = option("bfloat16", "float32, float16 or bfloat16.")
    rounds: int = option(5, "Measurements of each arm.")


@dataclass(frozen=True, kw_only=True)
class StructuredOptions(ModelOptions):
    """Of structured models."""

    cf: float = option(2.0, "Compression factor of structured layers.")
    blocks: int = option(16, "Blocks of BLAST and Monarch.", least=2)


@dataclass(frozen=True, kw_only=True)
class DecodeOptions(StructuredOptions):
    """`blr bench decode`."""

    models: Sequence[str] = option(
        ("7b", "8b"), "Comma-separated: 7b, 8b, 1b, pico (random weights) or checkpoint folders."
    )
    arms: Sequence[str] = option(
        (),
        "Comma-separated: hf- or ours- with dense, lowrank or, for a checkpoint, own; ours- "
        "also with pivoted, blast, monarch or, in few bits, corrected. Ours may go on with -int8, "
        "-int4, -int3 or -int2, then -head8 or -head4 for the output head, -kv8 for keys and values "
        "in int8, then -graph or -eager.",
        shown="all usual ones",
    )
    contexts: Sequence[int] = option((128, 1024, 3072, 6144), "Tokens of the prompt.")
    batches: Sequence[int] = option((1,), "Sequences at once, at most 16.", most=16)
    steps: int = option(64, "Tokens of a measurement.")
    rounds: int = option(3, "Measurements of each arm.")
    rank: int = option(16, "Rank of corrections, in int4.")
    ops: str = option("auto", "Ours: auto, triton or torch (references).")
    mode: str = option("auto", "Ours, where the arm names none: auto, graph or eager.")
    compiling: bool | None = option(None, "torch.compile transformers' step.", shown="compile on a GPU")


@dataclass(frozen=True, kw_only=True)
class PrefillOptions(StructuredOptions):
    """`blr bench prefill`."""

    models: Sequence[str] = option(
        ("8b",), "Comma-separated: 7b, 8b, 1b, pico (random weights) or checkpoint folders."
    )
    arms: Sequence[str] = option(
        (),
        "Comma-separated: dense, lowrank, monarch, blast, each also with -fp8, pivoted; for a "
        "checkpoint, own.",
        shown="all",
    )
    tokens: Sequence[int] = option((128, 512, 2048, 8192, 16384), "Tokens of the prompt.")
    batch: int = option(1, "Sequences at once.")
    compiling: bool | None = option(
        None, "Arms with decoder layers compiled, too.", shown="compile on a GPU"
    )
    graphs: bool = option(False, "Compiled arms as CUDA graphs of fixed lengths, too.")
    runtime: bool = option(False, "Every arm as an export takes prompts, too.")


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(ModelOptions):
    """`blr bench memory`."""

    models: Sequence[str] = option(
        ("bert-base",), "Some of bert-base, roberta-base, llama-7b, llama-3.1-8b, pico-bert, pico-llama."
    )
    arms: Sequence[str] = option(
        ("dense", "naive", "whole", "ours"),
        "Some of dense, naive (low rank by plain torch), whole (ours without a bound), ours, "
        "and ours-N for a bound of N MiB.",
    )
    keep: Sequence[float] = option((0.5, 0.75), "Shares of the parameters of the replaced layers.")
    batches: Sequence[int] = option((1, 16, 32, 64), "Sequences at once.")
    lengths: Sequence[int] = option((128, 256, 512, 1024), "Tokens of a sequence.")
    pairs: Sequence[tuple[int, int]] = option(
        (), "These cases in place of batches and lengths: 4x1024,1x16384.", shown="none"
    )
    graphs: bool = option(False, "Time passes as CUDA graphs: without the host.")

    def cases(self) -> list[tuple[int, int]]:
        """Batch and length of every case."""
        return list(self.pairs) or [(b, n) for b in self.batches for n in self.lengths]


@dataclass(frozen=True, kw_only=True)
class TuneOptions(BenchOptions):
    """`blr tune`."""

    shapes: Sequence[str] = option(
        ("llama-7b",), "Models of configs/bench-shapes.yaml, comma-separated."
    )
    structures: Sequence[str] = option(
        ("svd", "monarch", "blast", "ks", "fp8"),
        "Some of svd,monarch,blast,ks, and fp8: layers in float8.",
    )
    dtype: Sequence[str] = option(("bfloat16",), "Some of bfloat16,float16,float32.")
    quick: bool = option(False, "Four numbers of tokens in place of fourteen, fewer samples.")
    seconds: float | None = option(None, "Measure nothing new after this many seconds.")
    gpu_name: str | None = option(None, "Name to keep the table under.", shown="the GPU's own")
