"""What a configuration says about code: hints that must not travel into a folder of ours.

Our outputs are loaded with `trust_remote_code=True` by whoever trusts *us*. A source's `auto_map`,
an attention kernel named by a hub repository, the key that tomorrow's loader takes as a file to
import: none of it may come along. What the native configuration class declares is kept; of the
rest a number cannot name code, and text is dropped where its key sounds like code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from blr.compressor.base.quoting import quote
from blr.compressor.checkpoint.config import depth
from blr.compressor.checkpoint.regular import inside, read_whole, refuse

MAX_JSON_BYTES = 16 * 2**20
MAX_JSON_DEPTH = 64
LONGEST_KEY = 200  # characters; a longer one is there to keep a regular expression busy
REMEDY = "take the file of the model's own repository, or remove it"
# Small files that loaders parse before they do anything else. The large ones, tokenizer.json and
# vocabularies, are tried by `loading/tokenizer.py`.
PARSED = re.compile(
    r"(tokenizer_config|generation_config|special_tokens_map|added_tokens|preprocessor_config|modules"
    r"|sentence_bert_config|config_sentence_transformers|1_Pooling/config|chat_template)\.json"
)
_KEYS_ARE_TOKENS = re.compile(r"tokenizer|vocab.*")  # whose keys are anything
_CODE = re.compile(
    r"auto_map|auto_class|code_revision|trust_remote_code|custom_(pipelines?|generate|code|object\w*)"
    r"|\w*implementation(_internal|_autoset)?"
)
_SOUNDS_LIKE_CODE = re.compile(
    r"_\w*|(\w+_)?(files?|modules?|code|script|path|url|imports?|plugins?|hooks?|kernels?|exec\w*|entry\w*)"
)
_LABELS = {"id2label", "label2id"}  # their keys are names of classes


_FLOATS = ("Infinity", "-Infinity", "NaN")


def inert(value: Any, known: Collection[str] | None = None) -> Any:
    """Parsed JSON without its hints of code, at any depth.

    Args:
        known: keys that are what the reader's own class declares. None: only what is always code
            is dropped.
    """
    if isinstance(value, list):
        return [inert(item, known) for item in value]
    if not isinstance(value, dict) or is_number(value):
        return value
    kept = {key: held for key, held in value.items() if not _is_hint(key, held, known)}
    return {key: held if key in _LABELS else inert(held, known) for key, held in kept.items()}


def is_number(value: Any) -> bool:
    """Whether it is what transformers writes for a float that JSON has no word for."""
    return isinstance(value, dict) and value.keys() == {"__float__"} and value["__float__"] in _FLOATS


def carried(path: Path) -> bytes | Path:
    """A file to carry over, byte for byte unless it holds a hint of code. It is checked already."""
    if path.suffix != ".json" or _KEYS_ARE_TOKENS.fullmatch(path.stem):
        return path
    try:
        table = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return path  # no loader gets anything from it
    clean = inert(table)
    return path if clean == table else json.dumps(clean, indent=2).encode() + b"\n"


def is_small_json(path: Path) -> bool:
    """Whether a file can be parsed and rewritten without its hints of code.

    Raises InputError for one that cannot be read, or of over 16 MiB.
    """
    try:
        return depth(json.loads(read_whole(path, MAX_JSON_BYTES))) <= MAX_JSON_DEPTH
    except (ValueError, RecursionError):
        return False


def check_small_json(folder: Path, name: str) -> None:
    """Refuse a small JSON file that a loader would choke on, now rather than after the work.

    Raises InputError: no UTF-8, no JSON, nested deeply, or neither an object nor (modules.json) a
    list.
    """
    path = inside(folder, name)
    if not PARSED.fullmatch(name):
        return
    data = read_whole(path, MAX_JSON_BYTES)
    try:
        table = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        reason = quote(error, 120)[1:-1] if isinstance(error, ValueError) else "nested too deeply"
        refuse(path, f"invalid JSON ({reason})", "a JSON object in UTF-8", REMEDY)
    if depth(table) > MAX_JSON_DEPTH:
        refuse(path, f"over {MAX_JSON_DEPTH} nested levels", "a few levels", REMEDY)
    if type(table) is not dict and (type(table) is not list or name != "modules.json"):
        refuse(path, f"JSON of type {type(table).__name__}", "an object", REMEDY)


def _is_hint(key: str, value: Any, known: Collection[str] | None) -> bool:
    if len(key) > LONGEST_KEY or _CODE.fullmatch(key):
        return True
    if known is None or key in known or not _SOUNDS_LIKE_CODE.fullmatch(key):
        return False
    return _holds_text(value)


def _holds_text(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, str) or any(_holds_text(item) for item in inner)
