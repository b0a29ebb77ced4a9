"""A source checkpoint, fully checked when opened and then read one tensor at a time.

`open_source` looks at config, index and headers only: no torch, no tensor data, no code from the
folder. Reads use plain file reads, not mmap, so that resident memory stays one tensor's.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blr.compressor.checkpoint.config import check_counts, read_config
from blr.compressor.checkpoint.header import TensorEntry, check_name, read_header
from blr.compressor.checkpoint.hints import check_small_json
from blr.compressor.checkpoint.regular import (
    check_size,
    inside,
    open_regular,
    parse_json,
    read_exactly,
    read_whole,
    refuse,
)
from blr.compressor.quoting import quote

if TYPE_CHECKING:
    from torch import Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
MAX_INDEX_BYTES = 25_000_000  # of JSON this takes a second and half a gigabyte to parse
MAX_EXTRA_BYTES = 64 * 2**20
CHUNK = 8 * 2**20
# Tokenizer and pipeline files carried over byte for byte: data only, never code or weights.
EXTRA_NAMES = (
    *("tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json"),
    *("generation_config.json", "chat_template*", "additional_chat_templates/*"),
    *("preprocessor_config.json", "*.model", "modules.json", "sentence_bert_config.json"),
    *("config_sentence_transformers.json", "1_Pooling/config.json"),
)
EXTRA_SUFFIXES = re.compile(r".*\.(json|txt|jinja|model|tiktoken|bpe|model\.v\d+)")
# safetensors dtype -> name in torch; F4 and F6 have no byte of their own and are only copied
TORCH_NAMES = {
    **{"BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16"},
    **{"U32": "uint32", "I32": "int32", "U64": "uint64", "I64": "int64", "C64": "complex64"},
    **{"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"},
    **{"F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"},
}


@dataclass(frozen=True)
class Source:
    """A checked checkpoint. `entries`: every tensor by name, shard after shard in byte order.

    `config` is config.json as parsed; `shards` are the weight files in order.
    """

    folder: Path
    config: dict[str, Any]
    entries: dict[str, TensorEntry]
    shards: tuple[Path, ...]
    _extra: tuple[Path, ...] = ()
    _stamps: dict[Path, tuple[int, int, int]] = field(default_factory=dict, repr=False)

    @property
    def model_type(self) -> str:
        """`model_type` of the config: lower-case letters, digits and `_.-` only."""
        return self.config["model_type"]

    def extra_files(self) -> list[Path]:
        """Small files to carry over byte for byte, sorted, relative to `folder`."""
        return list(self._extra)

    def read_bytes(self, entry: TensorEntry, chunk: int = CHUNK) -> Iterator[bytearray]:
        """Yields the stored bytes of `entry` in pieces of at most `chunk` bytes.

        Raises:
            InputError: the shard cannot be read or has changed since it was checked.
        """
        with open_regular(entry.file) as file:
            self._check_unchanged(entry.file, os.fstat(file.fileno()))
            for start in range(entry.start, entry.end, chunk):
                yield read_exactly(file, entry.file, start, min(chunk, entry.end - start))

    def sha256(self, entry: TensorEntry) -> str:
        """Hexadecimal SHA-256 of the stored bytes of `entry`. Raises as `read_bytes`."""
        digest = hashlib.sha256()
        for piece in self.read_bytes(entry):
            digest.update(piece)
        return digest.hexdigest()

    def load_tensor(self, entry: TensorEntry) -> Tensor:
        """The tensor in its stored dtype and shape, in memory of its own.

        Raises:
            InputError: as `read_bytes`, or a dtype that torch has no bytes for (F4, F6).
        """
        import torch

        if entry.dtype not in TORCH_NAMES:
            found = f"dtype {entry.dtype} of tensor {quote(entry.name)}"
            refuse(entry.file, found, "a dtype that torch can hold", "exclude it or cast it before")
        dtype = getattr(torch, TORCH_NAMES[entry.dtype])
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=dtype)
        data = next(self.read_bytes(entry, entry.nbytes))
        return torch.frombuffer(data, dtype=dtype).reshape(entry.shape)

    def _check_unchanged(self, file: Path, status: os.stat_result) -> None:
        if self._stamps.get(file) != _stamp(status):
            remedy = "run again when nothing writes to the folder"
            refuse(file, "a file changed since it was checked", "the same file", remedy)


def open_source(folder: Path, *, allow_pickle: bool = False, scratch: Path | None = None) -> Source:
    """Opens and checks the checkpoint in `folder` without reading tensor data.

    `allow_pickle` lets pytorch_model.bin be converted into `scratch`, a folder of the caller's
    that must outlive the `Source`; this is the only path that imports torch.

    Raises:
        InputError: no checkpoint there, or any part of it malformed, missing or unsafe.
    """
    folder = Path(folder)
    if not os.path.isdir(folder):
        refuse(folder, "no such folder", "a checkpoint folder", "check the path")
    if not os.path.lexists(folder / "config.json"):
        _refuse_folder(folder, "no config.json")
    config = read_config(folder)
    extra = _find_extra(folder)
    if not (os.path.lexists(folder / SINGLE) or os.path.lexists(folder / INDEX)):
        weights = _unpickle(folder, allow_pickle, scratch)
    else:
        weights = folder
    shards, weight_map = find_shards(weights, SINGLE, INDEX)
    entries = _read_shards(shards, weight_map, weights / INDEX)
    check_counts(config, folder, len(entries))
    stamps = {file: _stamp(os.stat(file)) for file in shards}
    return Source(folder, config, entries, tuple(shards), extra, stamps)


def find_shards(folder: Path, single: str, index: str) -> tuple[list[Path], dict[str, str]]:
    """The weight files of `folder` in sorted order, and tensor name -> file name if indexed.

    Raises:
        InputError: a malformed index, file names that are not plain, missing files.
    """
    has_single = os.path.lexists(folder / single)
    if not os.path.lexists(folder / index):
        return [inside(folder, single)], {}
    weight_map = _read_index(inside(folder, index), Path(single).suffix)
    names = sorted(set(weight_map.values()))
    if has_single and names != [single]:
        remedy = "remove the one that is not meant"
        refuse(folder, f"both {single} and {index}", "one of them", remedy)
    return [inside(folder, name) for name in names], weight_map


def _read_index(path: Path, suffix: str) -> dict[str, str]:
    """`weight_map` of the index at `path`: safe tensor names to plain file names."""
    index = parse_json(read_whole(path, MAX_INDEX_BYTES), path)
    weight_map = index.get("weight_map")
    if type(weight_map) is not dict or not weight_map:
        refuse(path, "no weight_map object", '{"weight_map": {tensor: file}}')
    for tensor, file in weight_map.items():
        check_name(tensor, path)
        if type(file) is not str or not _is_plain(file, suffix):
            found = f"file {quote(file)} for tensor {quote(tensor)}"
            refuse(path, found, f"the plain name of a {suffix} file in the same folder")
    return weight_map


def _is_plain(file: str, suffix: str) -> bool:
    """Whether `file` is a file name without folders, '..' or characters that do not print."""
    safe = file.isprintable() and ".." not in file and not set("/\\:") & set(file)
    return safe and file.endswith(suffix) and len(file) <= 255 and not file.startswith(".")


def _read_shards(shards: list[Path], weight_map: dict[str, str], index: Path) -> dict[str, TensorEntry]:
    """All entries of `shards`; with a `weight_map`, both must name the same tensors."""
    entries: dict[str, TensorEntry] = {}
    for shard in shards:
        found = read_header(shard).entries
        for name in found:
            if weight_map and weight_map.get(name) != shard.name:
                where = quote(weight_map[name]) if name in weight_map else "no file"
                stray = f"tensor {quote(name)}, which {index.name} puts in {where}"
                refuse(shard, stray, "the tensors that the index lists for this file")
        entries.update(found)
    missing = weight_map.keys() - entries.keys()
    if missing:
        name = min(missing)
        refuse(index, f"tensor {quote(name)}", f"a tensor present in {quote(weight_map[name])}")
    if not entries:
        refuse(shards[0], "no tensors", "a checkpoint with weights")
    return entries


def _unpickle(folder: Path, allow_pickle: bool, scratch: Path | None) -> Path:
    """Converts the pickled weights of `folder` into `scratch`, if there are any and they may."""
    if not any(os.path.lexists(folder / name) for name in (PICKLE, PICKLE_INDEX)):
        _refuse_folder(folder, "no weights")
    if not allow_pickle:
        remedy = "convert them, or pass --allow-pickle if you trust them"
        refuse(folder, "only pickled weights (pytorch_model.bin)", "safetensors", remedy)
    if scratch is None:
        raise ValueError("allow_pickle needs a scratch folder")
    from blr.compressor.checkpoint.pickled import convert_pickle

    return convert_pickle(folder, scratch)


def _find_extra(folder: Path) -> tuple[Path, ...]:
    """Files of `folder` to carry over, relative to it, checked for size and links."""
    subfolders = sorted({pattern.split("/")[0] for pattern in EXTRA_NAMES if "/" in pattern})
    try:
        names = os.listdir(folder)
        for sub in subfolders:
            if os.path.isdir(folder / sub):
                names += [f"{sub}/{name}" for name in os.listdir(inside(folder, sub))]
    except OSError as error:
        refuse(folder, f"no readable folder ({error.strerror})", "one", "check its permissions")
    carried = sorted(name for name in names if _is_extra(name))
    for name in carried:
        path = inside(folder, name)
        with open_regular(path) as file:
            check_size(path, file, MAX_EXTRA_BYTES)
        check_small_json(folder, name)
    return tuple(Path(name) for name in carried)


def _is_extra(name: str) -> bool:
    plain = re.fullmatch(r"[\w./-]+", name, re.ASCII) is not None
    known = any(fnmatch.fnmatchcase(name, pattern) for pattern in EXTRA_NAMES)
    return plain and known and EXTRA_SUFFIXES.fullmatch(name) is not None


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _refuse_folder(folder: Path, found: str) -> None:
    looked = f"config.json with {SINGLE}, {INDEX} or {PICKLE}"
    refuse(folder, found, f"a Hugging Face checkpoint ({looked})", "check the path")
