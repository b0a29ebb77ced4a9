"""Reads calibration text into batches of tokens.

A window that stands for a text begins with the tokens that a tokenizer puts before every text, its
*beginning*. It is not part of the text: no loss counts a prediction of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from blr.compressor.base.errors import HubError, InputError
from blr.compressor.base.exhaustion import check_packages, is_missing
from blr.compressor.base.quoting import first_line, is_text, quote
from blr.compressor.checkpoint.regular import (
    absence,
    digest_of,
    read_lines,
    read_start,
    read_text,
    refuse,
)
from blr.compressor.loading.tokenizer import PROBE, encode_padded
from blr.compressor.planning.training_sizes import BATCH

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

Beginning: TypeAlias = tuple[int, ...]  # token ids
DATASET, WORD = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}"), re.compile(r"[\w-]{1,96}")
PACKAGE, EXTRA = "datasets", "eval"  # what reads data sets of the hub, and our extra that installs it
NETWORK_OFF, YES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"), ("1", "ON", "YES", "TRUE")
MAX_BYTES = 2 * 2**30  # of a file; no more of it is read than the windows need
MAX_LINE = 2**25  # characters
MAX_LIST = 2**28  # bytes of a file that is one JSON list, which is parsed as a whole
HELD_SHARE = 0.05  # of a text that is held back for evaluation
HELD_TOKENS = 4096  # of a calibration's text that are held back
LEAST_WINDOWS = 3  # of a text that is both trained on and evaluated
PAGES = 1 << 15  # characters that `read_first_text` reads
OWN = "self"  # in place of a name: text that the model writes (own.py)
PIECE, PIECES = 1 << 20, 4096  # most characters, and documents of a calibration, tokenized together


def beginning_of(tokenizer: PreTrainedTokenizerBase) -> Beginning:
    """The ids that the tokenizer puts before a text. It is asked, for neither `bos_token` nor
    `add_bos_token` always tells."""
    plain = tokenizer(PROBE, add_special_tokens=False, verbose=False)["input_ids"]
    whole = tokenizer(PROBE, verbose=False)["input_ids"]
    starts = range(len(whole) - len(plain) + 1)
    return tuple(whole[: next((n for n in starts if whole[n : n + len(plain)] == plain), 0)])


def begun(rows: Tensor, beginning: Beginning) -> Tensor:
    """Rows of token ids [m, w] with the beginning before each: [m, p + w]."""
    import torch

    return torch.cat([rows.new_tensor(beginning).expand(len(rows), -1), rows], 1)


def room_in(window: int, beginning: Beginning) -> int:
    """The tokens of text that fit in a window. Raises InputError if there are none."""
    room = window - len(beginning)
    if room < 1:
        raise InputError(
            f"a window of {window} tokens, and the tokenizer begins every text with {len(beginning)}; "
            "expected room for text behind them; take longer windows"
        )
    return room


def idle_predictions(beginning: Beginning) -> int:
    """The positions at a window's start that predict a token of the beginning, which no loss counts.
    The beginning's last token predicts the first of the text."""
    return max(len(beginning) - 1, 0)


@dataclass(frozen=True)
class Calibration:
    """Batches of token ids [m, w] with `masks` of real tokens. The first `idle` positions of a row
    predict no text. `held` are a decoder's tokens [n] right behind the rows, which judge the fit;
    `first` is the number of their first token in the text."""

    ids: list[Tensor]
    masks: list[Tensor]
    idle: int = 0
    held: Tensor | None = None
    first: int = 0

    @property
    def tokens(self) -> int:
        """The number of real tokens in all batches."""
        return sum(int(mask.sum()) for mask in self.masks)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of tokens and masks."""
        digest = hashlib.sha256()
        for batch, mask in zip(self.ids, self.masks, strict=True):
            digest.update(batch.numpy().tobytes() + mask.numpy().tobytes())
        return digest.hexdigest()


def read_calibration(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    samples: int,
    seq_len: int,
    packed: bool,
    offline: bool = False,
) -> Calibration:
    """Tokenize at most `samples` windows or documents of a file or data set. Decoders (`packed`) get
    windows of one long text, whose last twentieth is held back; encoders get one line at a time. Raises
    InputError or HubError."""
    documents = read_documents(name, offline)
    if not packed:
        return Calibration(*_sentences(documents, tokenizer, samples, seq_len, name))
    beginning = beginning_of(tokenizer)
    text, held = _windows(documents, tokenizer, samples, room_in(seq_len, beginning), name)
    found = packed_calibration(begun(text, beginning), beginning)
    return replace(found, held=held, first=text.numel())


def packed_calibration(rows: Tensor, beginning: Beginning) -> Calibration:
    """The calibration whose windows [n, w] of token ids start with the `beginning`."""
    ids = list(rows.split(BATCH))
    masks = [part.new_ones(part.shape) for part in ids]
    return Calibration(ids, masks, idle_predictions(beginning))


def calibration_digest(name: str) -> str:
    """SHA-256 of a file, or the name of a data set. Raises InputError if it is neither."""
    path = None if is_own(name) else _file(name)
    return name if path is None else digest_of(path, MAX_BYTES)


def is_own(name: str) -> bool:
    """Whether `name` asks for text that the model writes: it is "self", and no file has that name."""
    return name == OWN and not os.path.exists(name)


def check_text(name: str, offline: bool = False) -> None:
    """Check by its name whether a text can be read. Raises InputError, CapabilityError without the
    package `datasets`, HubError if `offline`."""
    if not is_own(name) and _file(name, offline) is None:
        _check_hub(name, offline)


def _file(name: str, offline: bool = False) -> Path | None:
    """The path of a file that exists; None for a data set. Raises InputError for anything else."""
    path = Path(name)
    if name and os.path.exists(path):
        return path
    if path.suffix or not DATASET.fullmatch(name):
        shown = quote(name, 160)[1:-1] or "an empty name"
        lack = _lack(offline) if WORD.fullmatch(name) else ""
        expected = "expected a text file, .jsonl or OWNER/NAME, a hub data set"
        hint = f" ({lack})" if lack else ""
        raise InputError(f"{shown}: {absence(path, 'file')}; {expected}{hint}")
    return None


def _lack(offline: bool) -> str:
    """What is missing to read a data set of the hub, and the remedy; empty if nothing is."""
    if offline:
        return "not with --offline"
    if is_missing(PACKAGE):
        return f"which needs {PACKAGE}: pip install 'blr-compress[{EXTRA}]'"
    off = next((n for n in NETWORK_OFF if os.environ.get(n, "").upper() in YES), None)
    return f"{off} keeps the network off: unset it" if off else ""


def _check_hub(name: str, offline: bool) -> None:
    if offline:
        raise HubError(f"{name}: a data set needs the hub; give a local file with --offline")
    check_packages(f"{name}: a hub data set", PACKAGE, extra=EXTRA)


def is_dataset(name: str) -> bool:
    """Whether a text is a data set of the hub, which may have no end. Raises InputError for a missing
    file."""
    return _file(name) is None


def read_documents(name: str, offline: bool = False) -> Iterator[str]:
    """The documents of a file (its lines, or those of its JSON) or of a data set."""
    path = _file(name)
    if path is None:
        return _dataset(name, offline)
    if _holds_json(path):
        return _json_documents(path, MAX_BYTES)
    return _written(name, read_lines(path, MAX_BYTES, MAX_LINE))


def read_whole_text(path: Path, limit: int) -> str:
    """A file as one text, with all documents of its JSON. Raises InputError, also for more than `limit`
    bytes."""
    return "".join(_json_documents(path, limit)) if _holds_json(path) else read_text(path, limit)


def read_first_text(path: Path) -> str:
    """The first pages of what `read_whole_text` gives. Raises InputError."""
    if not _holds_json(path):
        return read_start(path, strict=True)
    start = ""
    for document in _json_documents(path, MAX_BYTES):
        start += document
        if len(start) >= PAGES:
            break
    return start


def _holds_json(path: Path) -> bool:
    return path.suffix.lower() in (".json", ".jsonl")


def _written(name: str, lines: Iterator[str]) -> Iterator[str]:
    """Pass `lines` on, and raise InputError at the end if all were blank."""
    empty = True
    for line in lines:
        empty = empty and not line.strip()
        yield line
    if empty:
        raise InputError(f"{name}: empty; expected text; give a file that holds some")


def _json_documents(path: Path, limit: int) -> Iterator[str]:
    """The documents of JSON lines, or of a list if a .json file starts like one; `datasets` writes
    either."""
    if path.suffix.lower() == ".json" and read_start(path).lstrip("\ufeff \r\n\t").startswith("["):
        return _json_list(path, min(limit, MAX_LIST))
    return _json_lines(path, limit)


def _json_lines(path: Path, limit: int) -> Iterator[str]:
    expected = "a JSON object with a string field 'text'"
    if path.suffix.lower() == ".json":
        expected += " on every line, as in a .jsonl, or one list of them"
    for number, line in enumerate(read_lines(path, limit, MAX_LINE), 1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError, RecursionError):
            document = None
        if not isinstance(document, str) or not is_text(document):
            raise InputError(f"{path}:{number}: expected {expected}; repair the line")
        yield document + "\n"


def _json_list(path: Path, limit: int) -> Iterator[str]:
    try:
        items = json.loads(read_text(path, limit))
    except (ValueError, RecursionError) as error:
        reason = first_line(error, 160)
        refuse(path, f"no JSON ({reason})", "a list of texts", "repair it, or save it as .jsonl")
    for number, item in enumerate(items, 1):
        document = item.get("text") if isinstance(item, dict) else item
        if not isinstance(document, str) or not is_text(document):
            expected = "a string, or a JSON object with a string field 'text'"
            raise InputError(f"{path}: item {number} of the list: expected {expected}; write it so")
        yield document + "\n"


def _dataset(name: str, offline: bool) -> Iterator[str]:
    _check_hub(name, offline)
    try:
        from datasets import load_dataset

        for row in load_dataset(name, split="train", streaming=True):
            yield str(row["text"]) + "\n"
    except Exception as error:  # the client raises its own, the network's and the system's errors
        reason, remedy = first_line(error, 200), _lack(offline) or "check the name and the network"
        raise HubError(
            f"{name}: {type(error).__name__}: {reason}; {remedy}, or give a local file"
        ) from error


def _windows(
    documents: Iterator[str], tokenizer: PreTrainedTokenizerBase, samples: int, room: int, name: str
) -> tuple[Tensor, Tensor]:
    """At most `samples` consecutive pieces [n, room] of the documents, and the tokens behind them."""
    import torch

    ids: list[int] = []
    for some in tokenized(documents, tokenizer, PIECES):
        ids += some
        if len(ids) >= samples * room + HELD_TOKENS:
            break
    count = len(ids) // room
    if count >= LEAST_WINDOWS:  # of a whole text the rest is held back
        count -= max(min(round(HELD_SHARE * count), HELD_TOKENS // room), 1)
    count = min(samples, count)
    if count < 1:
        raise InputError(
            f"{name}: {len(ids)} tokens, expected at least one window of {room}; "
            "give more text or lower --seq-len"
        )
    end = count * room
    return torch.tensor(ids[:end]).view(count, room), torch.tensor(ids[end : end + HELD_TOKENS])


def tokenized(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, count: float = float("inf")
) -> Iterator[list[int]]:
    """The tokens of `documents`, in pieces of about PIECE characters and at most `count` documents."""
    piece, size = list[str](), 0
    for document in documents:
        piece.append(document)
        size += len(document)
        if size > PIECE or len(piece) >= count:
            yield tokenizer("".join(piece), add_special_tokens=False, verbose=False)["input_ids"]
            piece, size = [], 0
    yield tokenizer("".join(piece), add_special_tokens=False, verbose=False)["input_ids"]


def _sentences(
    documents: Iterator[str], tokenizer: PreTrainedTokenizerBase, samples: int, seq_len: int, name: str
) -> tuple[list[Tensor], list[Tensor]]:
    """Batches of documents of similar length, padded to the longest of each, and their masks."""
    texts = sorted(islice(filter(None, map(str.strip, documents)), samples), key=len)
    if not texts:
        raise InputError(f"{name}: no text; expected one document or sentence a line")
    ids, masks = [], []
    for n in range(0, len(texts), 4 * BATCH):
        batch = encode_padded(tokenizer, texts[n : n + 4 * BATCH], seq_len)
        ids.append(batch["input_ids"])
        masks.append(batch["attention_mask"])
    return ids, masks
