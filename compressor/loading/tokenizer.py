"""Tries a tokenizer in a process of its own, with limits, before anything relies on it.

tokenizer.json is a small program: regular expressions that backtrack for hours, normalizers that turn a
word into gigabytes, in native code that no exception stops."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blr.compressor.base.errors import CapabilityError, InputError
from blr.compressor.base.quoting import quote
from blr.compressor.checkpoint.regular import inside, read_whole, refuse

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

MAX_BYTES = 64 * 2**20
SECONDS = 10  # of CPU, and one more for each MiB of the file
MEMORY = 768 * 2**20  # address space, and as much again for every `BYTES_PER_BYTE` of the file
BYTES_PER_BYTE = 24
GROWTH = 32  # of a text by normalization; NFKD makes 18 characters of U+FDFA
SAMPLE = 8192  # characters of the user's own text
REMEDY = "take the tokenizer of the model's own repository"
PROBE = (
    "The quick brown fox jumps over 13 lazy dogs; naïve façade — 東京, déjà-vu!\n"
    "\tdef f(x):  return x**2 + 3.14159  # don't\n\n   HTTP/1.1 200 OK 你好 🙂"
)
RUNS = "".join(character * 64 for character in "aexz 0.-!\n")  # what backtracking needs
UNABLE, UNREADABLE = 3, 4
CHILD = f"""
import json, os, resource, sys
path, seconds, memory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
limits = (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory), (resource.RLIMIT_CORE, 0)
for kind, limit in limits:
    hard = resource.getrlimit(kind)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(kind, (limit, limit))
try:
    from tokenizers import Tokenizer
except BaseException as error:
    print(error, file=sys.stderr)
    sys.exit({UNABLE})
try:
    tokenizer = Tokenizer.from_file(path)
except MemoryError:
    raise
except Exception as error:
    print(error, file=sys.stderr)
    sys.exit({UNREADABLE})
text = sys.stdin.buffer.read().decode()
plain = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
print(json.dumps([len(text), len(plain), len(tokenizer.encode(text).ids)]))
"""
_sound: set[tuple[bytes, bytes]] = set()  # SHA-256 of tokenizers that passed, and what they encoded


def check_ids(model: PreTrainedModel, ids: Tensor) -> None:
    """Raise InputError for token ids that `model` has no embeddings for."""
    embeddings = model.get_input_embeddings()
    rows, most = getattr(embeddings, "num_embeddings", None), int(ids.max()) if ids.numel() else 0
    if rows is not None and most >= rows:
        found = f"token {most} of its tokenizer for a model with {rows} embeddings"
        refuse(Path(str(model.name_or_path)), found, f"tokens below {rows}", REMEDY)


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, text: str, model: PreTrainedModel
) -> dict[str, Any]:
    """Token ids and mask [1, w] of `text` on the device of `model`, without an end token."""
    found = tokenizer(text, return_token_type_ids=False, return_tensors="pt", verbose=False)
    return taken_by(model, found.to(model.device))


def taken_by(model: PreTrainedModel, inputs: Mapping[str, object]) -> dict[str, object]:
    known = inspect.signature(model.forward).parameters
    return {name: value for name, value in inputs.items() if name in known}


def encode_padded(tokenizer: PreTrainedTokenizerBase, texts: list[str], longest: int) -> BatchEncoding:
    """Token ids and mask [m, w] of `texts`, cut at `longest` tokens and padded. Raises InputError."""
    if tokenizer.pad_token is None:
        raise InputError(
            f"{tokenizer.name_or_path}: the tokenizer has no padding token, expected one to read texts "
            "of different lengths with; name one as pad_token in tokenizer_config.json"
        )
    return tokenizer(texts, padding=True, truncation=True, max_length=longest, return_tensors="pt")


def check_tokenizer(folder: Path, text: str = "") -> None:
    """Try tokenizer.json, if there is one, on a probing text and the start of `text`, once a process.
    Raises InputError if it cannot be read, crashes, or takes too much time, memory or tokens;
    CapabilityError if no process can be started."""
    if not os.path.lexists(folder / "tokenizer.json"):
        return
    path = inside(folder, "tokenizer.json")
    data = read_whole(path, MAX_BYTES)
    probe = (PROBE + RUNS + text[:SAMPLE]).encode("utf-8", "replace")
    known = hashlib.sha256(data).digest(), probe
    if known in _sound:
        return
    done = _run(path, len(data), probe)
    if done.returncode == UNREADABLE and _brings_code(folder):
        return  # it is read by code of its own, which nobody runs here
    if done.returncode:
        refuse(path, f"a tokenizer that {_reason(done)}", "one that encodes a short text", REMEDY)
    characters, normalized, tokens = json.loads(done.stdout)
    if max(normalized, tokens / 4) > GROWTH * (characters + 8):
        found = f"a tokenizer that makes {normalized} characters and {tokens} tokens of {characters}"
        refuse(path, found, f"at most {GROWTH} times as many", REMEDY)
    _sound.add(known)


def _run(path: Path, size: int, probe: bytes) -> subprocess.CompletedProcess[bytes]:
    limits = [str(SECONDS + size // 2**20), str(MEMORY + BYTES_PER_BYTE * size)]
    # -P: a module in the current folder is not the library; one thread: each reserves memory
    command = [sys.executable, "-P", "-c", CHILD, str(path), *limits]
    single = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}
    environment = {**os.environ, **single, "MALLOC_ARENA_MAX": "1"}
    try:
        done = subprocess.run(command, input=probe, capture_output=True, env=environment)
    except (OSError, MemoryError) as error:
        raise CapabilityError(f"no process can be started here ({error}); free some memory") from error
    if done.returncode == UNABLE:
        raise CapabilityError(f"the library tokenizers does not load ({_said(done)}); free some memory")
    return done


def _brings_code(folder: Path) -> bool:
    path = folder / "tokenizer_config.json"
    return os.path.isfile(path) and b'"auto_map"' in path.read_bytes()


def _reason(done: subprocess.CompletedProcess[bytes]) -> str:
    if done.returncode == UNREADABLE:
        return f"the library does not read ({_said(done)})"
    if done.returncode in (-9, -24):  # SIGKILL, SIGXCPU: the limit on time
        return f"takes over {SECONDS} s of CPU for a short text"
    return f"fails on a short text ({_said(done)})"


def _said(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = [line for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("note:", "stack backtrace"))]
    return quote(lines[-1] if lines else f"signal {-done.returncode}", 120)[1:-1]
