"""What a checkpoint's folder holds besides config and weights, and what of it an output takes along.
Left behind are weights in other formats, adapters and whatever can be executed; links out of the
folder and FIFOs; JSON that does not parse and files of over 64 MiB."""

import json
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from blr.compressor.base.errors import InputError
from blr.compressor.base.quoting import quote
from blr.compressor.checkpoint.header import read_header
from blr.compressor.checkpoint.regular import (
    check_size,
    depth,
    inside,
    open_regular,
    read_exactly,
    read_whole,
    refuse,
)

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
CARD, LAYERS, REPORT, METRICS = "README.md", "blr_layers.json", "report.json", "metrics.jsonl"
MAX_BYTES = 64 * 2**20
MAX_FILES, MAX_DEPTH = 1000, 4
SHOWN = 6  # names of what is left behind
ADAPTER = "adapter_config.json"  # by which peft takes a folder for an adapter
UNAPPLIED = f"{ADAPTER}: the model beside it is taken as it is stored, no adapter is applied to it"
MODULES, MODULE_WEIGHTS = "modules.json", "model.safetensors"
PICKLED = "pytorch_model.bin"
# What tokenizers and pipelines read: of these a damaged one is an error, not left behind.
KNOWN = (
    *("tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json"),
    *("generation_config.json", "chat_template*", "additional_chat_templates/*"),
    *("preprocessor_config.json", "*.model", MODULES, "sentence_bert_config.json"),
    *("config_sentence_transformers.json", "1_Pooling/config.json"),
)
KNOWN_FOLDERS = {pattern.partition("/")[0] for pattern in KNOWN if "/" in pattern}
KNOWN_SUFFIXES = re.compile(r".*\.(json|txt|jinja|model|tiktoken|bpe|model\.v\d+)")
# Written by whoever writes an output, for what is in it.
OURS = re.compile(
    r"config\.json|(model|pytorch_model|diffusion_pytorch_model)\.(safetensors|bin)\.index\.json|blr_\w+\.json"
    r"|recipe\.yaml|report\.(json|html)|metrics\.jsonl|\w+_blr\.py"
)
WEIGHTS = re.compile(
    r".*\.(safetensors|bin|pte?|pt2|pth|ckpt|h5|keras|msgpack|onnx(_data|\.data)?|gguf|ggml|ot|tflite"
    r"|ml(model|package)|pb|np[yz]|pkl|pickle|joblib|engine|param|params|nemo|distcp)|.*\.index\.json"
)
CODE = re.compile(
    r".*\.(py[cdiw]?|ipynb|so(\.\d+)*|dll|dylib|exe|com|bat|cmd|ps1|(ba|z|c|fi)?sh|m?js|jar|whl|pl|rb"
    r"|php|lua|wasm|o|a|egg|app|msi|deb|rpm|desktop|command)"
)
PICKLES = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
MAGIC = (b"#!", b"\x7fELF", b"MZ", b"\xca\xfe\xba\xbe", *PICKLES)


def inert(value: object, known: Collection[str] | None = None) -> Any:
    """Parsed JSON without its hints of code, at any depth. `known` are keys that the reader's class
    declares; None drops only what is always code."""
    if isinstance(value, list):
        return [inert(item, known) for item in value]
    if not isinstance(value, dict) or is_number(value):
        return value
    kept = {key: held for key, held in value.items() if not _is_hint(key, held, known)}
    return {key: held if key in _LABELS else inert(held, known) for key, held in kept.items()}


def is_number(value: object) -> bool:
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
    """Whether a file can be parsed and rewritten. Raises InputError if it is over 16 MiB."""
    try:
        return depth(json.loads(read_whole(path, MAX_JSON_BYTES))) <= MAX_JSON_DEPTH
    except (ValueError, RecursionError):
        return False


def _check_small_json(path: Path, name: str) -> None:
    """Raise InputError for a small JSON file that a loader would choke on, before any work."""
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


def _is_hint(key: str, value: object, known: Collection[str] | None) -> bool:
    if len(key) > LONGEST_KEY or _CODE.fullmatch(key):
        return True
    if known is None or key in known or not _SOUNDS_LIKE_CODE.fullmatch(key):
        return False
    return _holds_text(value)


def _holds_text(value: object) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, str) or any(_holds_text(item) for item in inner)


@dataclass(frozen=True)
class Extras:
    """Files to take along by relative name, names `left` behind, and `pickled` weights of
    sentence-transformers modules, without which an output would not load."""

    carried: dict[str, Path] = field(default_factory=dict)
    left: tuple[str, ...] = ()
    pickled: tuple[str, ...] = ()

    def notes(self) -> list[str]:
        """A line on what is left behind, if anything is."""
        if not self.left:
            return []
        more = f" and {len(self.left) - SHOWN} more" if len(self.left) > SHOWN else ""
        names = ", ".join(quote(name)[1:-1] for name in self.left[:SHOWN])
        kinds = "adapters, other weights, programs, damaged or huge files"
        return [f"left behind, as {kinds}: {names}{more}"]


def find_extras(folder: Path, weights: set[str]) -> Extras:
    """What lies beside the files `weights` and config.json. Raises InputError for a folder that cannot
    be listed, or a known file that is no plain file, too large or malformed."""
    named = [row.get("path") for row in read_modules(folder)]
    modules = {name for name in named if type(name) is str and re.fullmatch(r"\w[\w.-]*", name)}
    carried: dict[str, Path] = {}
    left: list[str] = []
    for name in _names(folder, modules, left):
        if name in weights or ("/" not in name and OURS.fullmatch(name)):
            continue
        if path := _taken(folder, name, modules):
            carried[name] = path
        else:
            left.append(name)
    pickled = [f"{module}/{PICKLED}" for module in sorted(modules)]
    pickled = [n for n in pickled if n in left and n.replace(PICKLED, MODULE_WEIGHTS) not in carried]
    return Extras(dict(sorted(carried.items())), tuple(sorted(left)), tuple(pickled))


def read_modules(folder: Path) -> list[dict[str, object]]:
    """The rows of modules.json; [] without one. Raises InputError for a malformed one."""
    path = folder / MODULES
    if not os.path.lexists(path):
        return []
    _check_small_json(inside(folder, MODULES), MODULES)
    table = json.loads(path.read_bytes())
    return [row for row in table if type(row) is dict] if type(table) is list else []


def _names(folder: Path, modules: set[str], left: list[str]) -> Iterator[str]:
    """Files below `folder`, hidden ones apart; a folder with other weights goes to `left` as one."""
    count = 0
    for parent, folders, names in os.walk(folder, onerror=_raise):
        within = os.path.relpath(parent, folder)
        prefix = "" if within == "." else f"{within}/"
        links = {name for name in folders if os.path.islink(os.path.join(parent, name))}
        for name in links & {*modules, *KNOWN_FOLDERS}:
            inside(folder, name)
        left += [prefix + name for name in links]
        folders[:] = sorted(n for n in folders if n not in links and not n.startswith("."))
        foreign = prefix and within not in modules and any(map(WEIGHTS.fullmatch, names))
        if foreign or prefix.count("/") > MAX_DEPTH or count > MAX_FILES:
            left.append(prefix)
            folders.clear()
            continue
        misnamed = [name for name in folders if _is_known(prefix + name)]  # refused: no files
        folders[:] = [name for name in folders if name not in misnamed]
        shown = [prefix + name for name in sorted([*names, *misnamed]) if not name.startswith(".")]
        count += len(shown)
        yield from shown


def _raise(error: OSError) -> None:
    found = f"no readable folder ({error.strerror})"
    refuse(error.filename, found, "one", "check its permissions")


def _is_known(name: str) -> bool:
    plain = re.fullmatch(r"[\w./-]+", name, re.ASCII) is not None
    known = any(fnmatchcase(name, pattern) for pattern in KNOWN)
    return plain and known and KNOWN_SUFFIXES.fullmatch(name) is not None


def _taken(folder: Path, name: str, modules: set[str]) -> Path | None:
    """Where a file to take along lies, None if it is left behind. Raises InputError for a known one that
    is no plain file, too large or malformed."""
    known, (parent, _, plain) = _is_known(name), name.rpartition("/")
    strange = not name.isprintable() or "\\" in name or CODE.fullmatch(name.lower())
    if not known and (plain == ADAPTER or strange):
        return None
    try:
        path = inside(folder, name)
        if parent in modules and plain == MODULE_WEIGHTS:
            read_header(path)
            return path
        if not known and WEIGHTS.fullmatch(name.lower()):
            return None
        with open_regular(path) as file:
            size = check_size(path, file, MAX_BYTES)
            start = bytes(read_exactly(file, path, 0, min(size, 4)))
        if known:
            _check_small_json(path, name)
        elif start.startswith(MAGIC) or (name.endswith(".json") and not is_small_json(path)):
            return None
    except InputError:
        if known:
            raise
        return None
    return path
