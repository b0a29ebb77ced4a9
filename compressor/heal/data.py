"""What is trained on: a mixture of token streams, in fixed shares of every batch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from blr.compressor.checkpoint.journal import canonical_json
from blr.compressor.errors import UsageError
from blr.compressor.heal.settings import SELF, HealOptions
from blr.compressor.text.own import ROOM, OwnText
from blr.compressor.text.reading import read_documents
from blr.compressor.text.windows import Stream, digest, interleaved, text_stream, tokenize

CPU_BATCH, GPU_BATCH = 8, 64  # windows a step
CPU_OWN, GPU_OWN = 1 << 16, 1 << 22  # own tokens written

Writer = Callable[[OwnText], Tensor]


@dataclass(frozen=True)
class Part:
    """A stream called `name` ("self" or a text) that gives `windows` of every batch."""

    name: str
    stream: Stream
    windows: int


@dataclass(frozen=True)
class Data:
    """`parts` make up every batch of `batch` windows; the first one's windows count epochs."""

    parts: list[Part]
    digest: str

    @property
    def batch(self) -> int:
        """Windows a step."""
        return sum(part.windows for part in self.parts)

    @property
    def window(self) -> int:
        """Tokens a window."""
        return self.parts[0].stream.window

    def steps(self, epochs: float) -> int:
        """Steps in so many epochs of the first part."""
        first = self.parts[0]
        return max(1, round(epochs * len(first.stream) / first.windows))

    def take(self, step: int) -> Tensor:
        """The windows [batch, window] of a step, the parts interleaved so that any share of the rows
        has some of each."""
        rows = [p.stream.take(step * p.windows, p.windows) for p in self.parts]
        return interleaved(rows)


def make_data(
    options: HealOptions, tokenizer: Any, context: int, gpu: bool, author: str, write: Writer
) -> Data:
    """Read the user's texts, have the own text written, and mix them.

    Args:
        context: tokens at most of a window. author: digest of the teacher's weights.

    Raises:
        InputError, HubError: a text that is missing, malformed or too short.
        UsageError: a batch of less than one window of each.
    """
    window, length = (min(size, context) for size in (options.window, options.window + ROOM))
    streams = read_texts(options, tokenizer, window)
    share = options.mix or 0.0
    if share > 0:
        count = options.own_tokens or (GPU_OWN if gpu else CPU_OWN)
        rows = write(OwnText(max(count, 3 * length), length, options.seed, author))
        streams[SELF] = Stream(rows, window, options.seed)
    batch = _windows(options, window, gpu)
    counts = _shares(streams, share, batch)
    parts = [Part(n, s, c) for (n, s), c in zip(streams.items(), counts, strict=True) if c]
    found = [[part.name == SELF, digest(part.stream.rows), part.windows] for part in parts]
    return Data(parts, hashlib.sha256(canonical_json(found)).hexdigest())


def read_texts(options: HealOptions, tokenizer: Any, window: int) -> dict[str, Stream]:
    """The user's texts by the names that they are called by. Raises as `make_data`."""
    streams: dict[str, Stream] = {}
    for name in options.files:
        tokens = tokenize(read_documents(name, options.offline), tokenizer)
        streams[_label(name, streams)] = text_stream(tokens, window, options.seed, name)
    return streams


def _label(name: str, taken: dict[str, Stream]) -> str:
    """What a text is called in what is written: no folder, and no other's name."""
    label = known = Path(name).name
    number = 1
    while label in taken or label == SELF:
        number += 1
        label = f"{known} {number}"
    return label


def _windows(options: HealOptions, window: int, gpu: bool) -> int:
    if options.batch is None:
        return GPU_BATCH if gpu else CPU_BATCH
    if options.batch < window:
        raise UsageError(
            f"--batch {options.batch}: less than a window of {window} tokens; raise it or lower --window"
        )
    return options.batch // window


def _shares(streams: dict[str, Stream], own: float, batch: int) -> list[int]:
    """Windows of every stream in a batch: `own` of them own text, texts by their size."""
    texts = {name: len(stream) for name, stream in streams.items() if name != SELF}
    mine = 0 if SELF not in streams else batch if not texts else min(max(round(own * batch), 1), batch)
    left, total = batch - mine, sum(texts.values())
    if texts and own < 1 and left < len(texts):
        raise UsageError(
            f"a batch of {batch} windows has no room for {len(streams)} texts; raise --batch"
        )
    given, waiting = {}, len(texts)
    for name, size in texts.items():
        waiting -= 1
        given[name] = min(max(round(left * size / total), 1), left - waiting) if left else 0
        left, total = left - given[name], total - size
    return [mine if name == SELF else given[name] for name in streams]
