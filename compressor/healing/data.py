"""Mixes the training text from several token streams, each with a fixed share of every batch."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain, count, islice
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from blr.compressor.base.errors import InputError, UsageError
from blr.compressor.base.quoting import printable
from blr.compressor.checkpoint.context import context_of, of_text
from blr.compressor.checkpoint.source import Source
from blr.compressor.exporting.origin import Checkpoint
from blr.compressor.healing.objective import PADDING
from blr.compressor.healing.student_and_teacher import EMBEDS, task_of
from blr.compressor.loading.load import load_tokenizer
from blr.compressor.loading.sentences import Sentences, read_sentences
from blr.compressor.output.loss import Text, healing_text
from blr.compressor.recipe.settings import MINUTES, SELF, HealOptions
from blr.compressor.text.own import ROOM
from blr.compressor.text.reading import (
    Beginning,
    beginning_of,
    calibration_digest,
    is_dataset,
    read_documents,
)
from blr.compressor.text.windows import (
    LEAST_WINDOWS,
    Stream,
    check_known,
    digest,
    interleaved,
    text_stream,
    tokenize,
)
from blr.compressor.workspace.journal import canonical_json

CPU_BATCH, GPU_BATCH = 8, 64  # windows a step
SHORTER = 4  # a batch has this many times as many sentences as windows
CPU_OWN, GPU_OWN, MOST_OWN = 1 << 16, 1 << 22, 1 << 24  # tokens written by default, and at most
READS = 4  # how often training may read them, if more than GPU_OWN are written
SET_TOKENS, SET_SENTENCES = 1 << 24, 1 << 18  # read of a data set, which may have no end
LEAST = 20  # different sentences that a text must have
BRIEF = 100 * LEAST  # sentences of a data set that are read to see whether it has as many
PACE = 3e13  # parameters times tokens a second that a GPU trains on
MOST_PACE = 5e5  # tokens a second


@dataclass(frozen=True)
class TextPart:
    """The stream called `name` ("self" or a text), which gives `windows` of every batch."""

    name: str
    stream: Stream
    windows: int


@dataclass(frozen=True)
class Data:
    """The training text: `parts` make up every batch; an epoch reads the first one's windows."""

    parts: list[TextPart]
    digest: str

    @property
    def batch(self) -> int:
        """Windows of a step."""
        return sum(part.windows for part in self.parts)

    @property
    def tokens(self) -> int:
        """Tokens of a batch without padding; the mean where sentences differ in length."""
        return round(sum(p.windows * p.stream.row_tokens for p in self.parts))

    @property
    def window(self) -> int:
        """Tokens of a window."""
        return self.parts[0].stream.window

    def steps(self, epochs: float) -> int:
        """Steps in so many epochs of the first part."""
        first = self.parts[0]
        return max(1, round(epochs * len(first.stream) / first.windows))

    def take(self, step: int) -> Tensor:
        """The windows [batch, window] of a step, ordered so that every slice has some of each part."""
        rows = [p.stream.take(step * p.windows, p.windows) for p in self.parts]
        return interleaved(rows)


@dataclass(frozen=True)
class Reading:
    """How a model with so many tokens in its `vocabulary` reads text: in windows of at most `window`
    tokens that start with the `beginning`, or, if `sentences` is given, one sentence a line."""

    tokenizer: PreTrainedTokenizerBase
    window: int
    context: int
    sentences: Sentences | None = None
    vocabulary: int | None = None
    beginning: Beginning = ()
    kept: dict[str, Stream] = field(default_factory=dict, compare=False, repr=False)  # texts read whole

    def texts(self, options: HealOptions, briefly: bool = False) -> dict[str, Stream]:
        """The user's texts by their labels. `briefly`: of a data set only as much is read as shows that
        it will do. Raises InputError or HubError for one that will not."""
        found: dict[str, Stream] = {}
        for name in options.files:
            stream = self.kept.get(name) or self._stream(name, options, briefly)
            found[_label(name, found)] = stream
            check_known((stream.rows, stream.held), self.vocabulary, name)
            if not (briefly and is_dataset(name)):
                self.kept[name] = stream
        return found

    def held(self, options: HealOptions, source: Source) -> Text | None:
        """The ends of the user's texts, which no training reads; None without a text."""
        return healing_text(self.texts(options), source, self.beginning)

    def _stream(self, name: str, options: HealOptions, briefly: bool) -> Stream:
        documents, long = read_documents(name, options.offline), is_dataset(name)
        if self.sentences is None:
            most = (LEAST_WINDOWS * self.window if briefly else SET_TOKENS) if long else None
            tokens = tokenize(documents, self.tokenizer, most)
            how = options.seed, name, options.varied, self.beginning
            return text_stream(tokens, self.window, *how)
        lines, most = filter(str.strip, documents), BRIEF if briefly else SET_SENTENCES
        return self.sentence_stream(islice(lines, most if long else None), options.seed, name)

    def sentence_stream(self, lines: Iterable[str], seed: int, name: str) -> Stream:
        """A text's distinct sentences as rows of at most `window` tokens. Raises InputError for few."""
        texts = [line.strip() for line in lines if line.strip()]
        if self.sentences is not None and self.sentences.lower:
            texts = [text.lower() for text in texts]
        texts = list(dict.fromkeys(texts))  # one that is held back is nowhere else
        if len(texts) < LEAST:
            raise InputError(
                f"{name}: {len(texts)} different sentences, expected at least {LEAST}, one a line; "
                "give more text"
            )
        how = {"truncation": True, "max_length": self.window, "return_attention_mask": False}
        found = self.tokenizer(texts, **how)
        rows = torch.full((len(texts), self.window), PADDING, dtype=torch.int32)
        for row, ids in zip(rows, found["input_ids"], strict=True):
            row[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
        return Stream(rows, self.window, seed)

    def shortened(self, options: HealOptions) -> list[str]:
        """Notes on texts that are not read to their end."""
        most = f"{SET_TOKENS:,} tokens" if self.sentences is None else f"{SET_SENTENCES:,} lines"
        return [f"{n}: its first {most} at most" for n in options.files if is_dataset(n)]


def reading_of(checkpoint: Checkpoint, options: HealOptions) -> Reading:
    """How the model in `checkpoint` reads text. Raises CapabilityError for a model that cannot be
    healed, UsageError for options that encoders do not have."""
    source = checkpoint.source
    encodes = task_of(checkpoint) == EMBEDS
    if encodes:
        _check_encoder(options)
    tokenizer = load_tokenizer(source.folder)
    context, vocabulary = context_of(source.config), of_text(source.config).get("vocab_size")
    if not encodes:
        window, beginning = min(options.window, context), beginning_of(tokenizer)
        return Reading(tokenizer, window, context, None, vocabulary, beginning)
    sentences = read_sentences(source.folder)
    context = min(context, sentences.length or context)
    return Reading(tokenizer, min(options.window, context), context, sentences, vocabulary)


def _check_encoder(options: HealOptions) -> None:
    if not options.files:
        raise UsageError("an encoder writes no text of its own; add --text FILE, a sentence a line")
    if options.loss != "kl" or options.top_k is not None:
        raise UsageError(
            "--loss and --top-k are for decoders; an encoder's embeddings are compared: leave them out"
        )
    for option, given, why in (
        ("--own-tokens", options.own_tokens, "an encoder writes no text of its own"),
        ("--vary", options.vary, "an encoder's sentences stay as they are"),
    ):
        if given is not None:
            raise UsageError(f"{option} is for decoders; {why}: leave it out")


Write = Callable[[int, int], Tensor]  # gives so many tokens in samples of a length


def make_data(reading: Reading, options: HealOptions, parameters: int, gpu: bool, write: Write) -> Data:
    """Read the user's texts, let the teacher of so many `parameters` write its text, and mix them.
    Raises BlrError."""
    streams = reading.texts(options)
    share = _own_share(options, reading)
    batch = batch_windows(options, reading, gpu)
    if share > 0:
        length = min(options.window + ROOM, reading.context)
        rows = write(own_tokens(options, reading, parameters, gpu), length)
        text, beginning = rows[:, len(reading.beginning) :], reading.beginning
        streams[SELF] = Stream(text, reading.window, options.seed, options.varied, beginning)
    counts = _shares(streams, share, batch)
    parts = [TextPart(n, s, c) for (n, s), c in zip(streams.items(), counts, strict=True)]
    begins = [list(reading.beginning)] if reading.beginning else []
    found = [[part.name == SELF, digest(part.stream.rows), part.windows, *begins] for part in parts]
    return Data(parts, hashlib.sha256(canonical_json(found)).hexdigest())


def own_tokens(options: HealOptions, reading: Reading, parameters: int, gpu: bool) -> int:
    """Tokens of own text that a teacher of so many `parameters` writes; 0 if it has no share."""
    if not _own_share(options, reading):
        return 0
    length = min(options.window + ROOM, reading.context)
    step = batch_windows(options, reading, gpu) * length
    return max(_wanted_tokens(options, step, parameters, gpu), LEAST_WINDOWS * length)


def _wanted_tokens(options: HealOptions, step: int, parameters: int, gpu: bool) -> int:
    """The number of tokens to write: as asked for, else as many as training reads, up to a limit. The
    limit is the usual number; on a GPU a quarter of what training reads, if that is more. Text that is
    read more often is overfitted (SmolLM2, 12 times: divergence .09 on that text, .23 on other text).
    On a CPU writing takes as long as training, so the number falls with the minutes below the
    default."""
    if options.own_tokens is not None:
        return options.own_tokens
    usual = GPU_OWN if gpu else CPU_OWN
    if options.minutes is not None and not gpu:
        return round(usual * min(options.minutes / MINUTES, 1.0))
    if options.minutes is not None:
        read = 60 * options.minutes * min(PACE / parameters, MOST_PACE)
    elif options.steps is not None:
        read = options.steps * step
    else:
        return usual
    read *= options.mix or 1.0
    most = min(max(usual, read / READS), MOST_OWN) if gpu else usual
    return round(min(read, most))


def _label(name: str, taken: dict[str, Stream]) -> str:
    """A text's label in the output: its name without a folder, unlike the others."""
    known = printable(Path(name).name)
    labels = chain([known], (f"{known} {number}" for number in count(2)))
    return next(label for label in labels if label not in taken and label != SELF)


def batch_windows(options: HealOptions, reading: Reading, gpu: bool, processes: int = 1) -> int:
    """Windows of a step. Raises UsageError for less than one of each text, or one for each process."""
    window, texts = reading.window, len(options.files)
    batch = (GPU_BATCH if gpu else CPU_BATCH) * (1 if reading.sentences is None else SHORTER)
    batch = batch if options.batch is None else options.batch // window
    share = _own_share(options, reading)
    if batch < 1:
        raise UsageError(
            f"--batch {options.batch}: less than a window of {window} tokens; raise it or lower --window"
        )
    if batch - _own_windows(share, batch) < texts:
        enough = next(b for b in count(batch) if b - _own_windows(share, b) >= texts)
        own = " and the teacher's own" if share else ""
        raise UsageError(
            f"a batch of {batch} windows has no room for {texts} of --text{own}; "
            f"give --batch {enough * window} or more, or fewer texts"
        )
    if batch < processes:
        raise UsageError(f"a batch of {batch} windows for {processes} processes; raise --batch")
    return batch


def text_digests(names: list[str]) -> list[str]:
    """SHA-256 of every text, as `calibration_digest` makes it. Raises InputError for a missing text,
    UsageError for one that is given twice, even under two names: it would count as two texts."""
    known: dict[str, str] = {}
    for name in names:
        digest = calibration_digest(name)
        if digest in known:
            same = "given twice" if name == known[digest] else f"the same text as {known[digest]}"
            raise UsageError(f"--text {name}: {same}; give every text once")
        known[digest] = name
    return list(known)


def _own_share(options: HealOptions, reading: Reading) -> float:
    """The share of own text in a batch; 0 for encoders, which write none."""
    return (options.mix or 0.0) if reading.sentences is None else 0.0


def _own_windows(share: float, batch: int) -> int:
    """The windows of own text in a batch: at least one if it has a share."""
    return min(max(round(share * batch), 1), batch) if share > 0 else 0


def _shares(streams: dict[str, Stream], own: float, batch: int) -> list[int]:
    """The windows of every stream in a batch: the share `own` is own text, sizes divide the rest."""
    texts = {name: len(stream) for name, stream in streams.items() if name != SELF}
    mine = 0 if SELF not in streams else _own_windows(own, batch) if texts else batch
    left, total = batch - mine, sum(texts.values())
    given, waiting = {}, len(texts)
    for name, size in texts.items():
        waiting -= 1
        given[name] = min(max(round(left * size / total), 1), left - waiting)
        left, total = left - given[name], total - size
    return [mine if name == SELF else given[name] for name in streams]
