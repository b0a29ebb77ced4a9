"""What each command of `blr bench` is asked, and `blr tune`. No torch.

Settings and options are one list: the command line has an option for every field, as docstrings say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

from pydantic import Field

from blr.compressor.base.errors import UsageError
from blr.compressor.recipe.option import options_of

MOST = 2**31 - 1
MOST_ROWS = 16  # that a decoder takes at once
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


def of_text(options: type, given: Mapping[str, object]) -> Any:
    """`options` of what was typed: lists by commas. Raises UsageError."""
    found, hints = {k: v for k, v in given.items() if v is not None}, get_type_hints(options)
    for name, text in found.items():
        if not isinstance(text, str):
            continue
        option = options_of(options)[name].names[0]
        if hints[name] == Sequence[str]:
            found[name] = words(text)
        elif hints[name] == Sequence[int]:
            found[name] = counts(text, option, MOST_ROWS if name == "batches" else None)
        elif hints[name] == Sequence[float]:
            found[name] = shares(text, option)
        elif hints[name] == Sequence[tuple[int, int]]:
            found[name] = pairs(text, option)
    return options(**found)


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What all commands take.

    Options:
        device: auto, cpu, cuda or cuda:N.
        seconds: Start no further case after this many seconds.
    """

    device: str = "auto"
    seconds: Annotated[float, Field(ge=0)] | None = None


@dataclass(frozen=True, kw_only=True)
class LayerOptions(BenchOptions):
    """Layers of published models: dense, plain torch, torch.compile and ours, interleaved.

    Options:
        models: Comma-separated, of configs/bench-shapes.yaml. [llama-7b; gpt2-s on a CPU]
        structures: Some of svd,monarch,blast,ks. [all; none beside --bits]
        bits: Dense weights in 8, 4, 3 or 2 bits, alone and corrected; Humming beside them if installed.
        rank: Of their corrections.
        n: Tokens, comma-separated. [1,1024,4096; 1,64 on a CPU]
        dtype: float32, tf32, float16 or bfloat16.
        cf: Compression factor. [the model's published one]
        blocks: Blocks of Monarch and BLAST. [published; BLAST also 4,8,16]
        repeats: Samples of each arm.
        compiling (--compile): torch.compile arms, at the smallest and the largest n. [compile on a GPU]
    """

    models: Sequence[str] = ()
    structures: Sequence[str] = ()
    bits: Sequence[int] = ()
    rank: Annotated[int, Field(ge=1)] = 16
    n: Sequence[int] = ()
    dtype: str = "bfloat16"
    cf: float | None = None
    blocks: Sequence[int] = ()
    repeats: Annotated[int, Field(ge=1)] = 10
    compiling: bool | None = None


@dataclass(frozen=True, kw_only=True)
class ModelOptions(BenchOptions):
    """What commands of whole models take.

    Options:
        dtype: float32, float16 or bfloat16.
        rounds: Measurements of each arm.
    """

    dtype: str = "bfloat16"
    rounds: Annotated[int, Field(ge=1)] = 5


@dataclass(frozen=True, kw_only=True)
class StructuredOptions(ModelOptions):
    """Of structured models.

    Options:
        cf: Compression factor of structured layers.
        blocks: Blocks of BLAST and Monarch.
    """

    cf: float = 2.0
    blocks: Annotated[int, Field(ge=2)] = 16


@dataclass(frozen=True, kw_only=True)
class DecodeOptions(StructuredOptions):
    """Decoding of whole models: transformers compiled, ours dense, structured and quantized.

    Options:
        models: Comma-separated: 7b, 8b, 1b, pico (random weights) or checkpoint folders.
        arms: Comma-separated: hf- or ours- with dense or, for a checkpoint, own; ours- also with
            lowrank, blast, monarch or, in few bits, corrected. Ours may go on with -int8, -int4, -int3
            or -int2, then -head8 or -head4 for the output head, -kv8 for keys and values in int8,
            -token for all layers in one kernel.
            ours-speculative has a draft: a folder's own, low rank (-int2: corrected), a model (-1b) or
            the text so far (-ngram), of which -90 says how many percent count as right. [all usual ones]
        contexts: Tokens of the prompt.
        batches: Sequences at once, at most 16.
        steps: Tokens of a measurement.
        rank: Rank of corrections, in int4.
        compiling (--compile): torch.compile transformers' step. [compile on a GPU]
    """

    models: Sequence[str] = ("7b", "8b")
    arms: Sequence[str] = ()
    contexts: Sequence[int] = (128, 1024, 3072, 6144)
    batches: Sequence[int] = (1,)
    steps: Annotated[int, Field(ge=1)] = 64
    rounds: Annotated[int, Field(ge=1)] = 3
    rank: Annotated[int, Field(ge=1)] = 16
    compiling: bool | None = None


@dataclass(frozen=True, kw_only=True)
class PrefillOptions(StructuredOptions):
    """Prompts through whole models in transformers: dense and structured, bf16 and float8.

    Options:
        models: Comma-separated: 7b, 8b, 1b, pico (random weights) or checkpoint folders.
        arms: Comma-separated: dense, lowrank, monarch, blast, each also with -fp8, -int8, -int4, -int3
            or -int2; corrected with bits; for a checkpoint, own. [dense and structured, bf16 and fp8]
        tokens: Tokens of the prompt.
        batch: Sequences at once.
        compiling (--compile): Arms with decoder layers compiled, too. [compile on a GPU]
        graphs: Compiled arms as CUDA graphs of fixed lengths, too.
        runtime: Every arm as an export takes prompts, too.
    """

    models: Sequence[str] = ("8b",)
    arms: Sequence[str] = ()
    tokens: Sequence[int] = (128, 512, 2048, 8192, 16384)
    batch: Annotated[int, Field(ge=1)] = 1
    compiling: bool | None = None
    graphs: bool = False
    runtime: bool = False


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(ModelOptions):
    """Memory and time of a forward pass: dense, low rank as it is, and ours within a bound.

    Options:
        models: Some of bert-base, roberta-base, llama-7b, llama-3.1-8b, pico-bert, pico-llama.
        arms: Some of dense, naive (low rank by plain torch), whole (ours without a bound), ours, and
            ours-N for a bound of N MiB.
        keep: Shares of the parameters of the replaced layers.
        sequences (--batches): Sequences at once.
        lengths: Tokens of a sequence.
        pairs: These cases in place of batches and lengths: 4x1024,1x16384. [none]
        graphs: Time passes as CUDA graphs: without the host.
    """

    models: Sequence[str] = ("bert-base",)
    arms: Sequence[str] = ("dense", "naive", "whole", "ours")
    keep: Sequence[float] = (0.5, 0.75)
    sequences: Sequence[int] = (1, 16, 32, 64)
    lengths: Sequence[int] = (128, 256, 512, 1024)
    pairs: Sequence[tuple[int, int]] = ()
    graphs: bool = False

    def cases(self) -> list[tuple[int, int]]:
        """Batch and length of every case."""
        return list(self.pairs) or [(b, n) for b in self.sequences for n in self.lengths]


@dataclass(frozen=True, kw_only=True)
class TuneOptions(BenchOptions):
    """`blr tune`.

    Options:
        shapes: Models of configs/bench-shapes.yaml, comma-separated.
        structures: Some of svd,monarch,blast,ks.
        dtype: Some of bfloat16,float16,float32.
        quick: Four numbers of tokens in place of fourteen, fewer samples.
        seconds: Measure nothing new after this many seconds.
        gpu_name: Name to keep the table under. [the GPU's own]
    """

    shapes: Sequence[str] = ("llama-7b",)
    structures: Sequence[str] = ("svd", "monarch", "blast", "ks")
    dtype: Sequence[str] = ("bfloat16",)
    quick: bool = False
    seconds: Annotated[float, Field(ge=0)] | None = None
    gpu_name: str | None = None
