"""A source checkpoint, fully checked when opened and then read one tensor at a time.

`open_source` looks at config, index and headers only: no torch, no tensor data, no code from the
folder. Reads use plain file reads, not mmap, so that resident memory stays one tensor's.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blr.compressor.base.quoting import quote
from blr.compressor.checkpoint.config import (
    TRANSFORMERS,
    Library,
    check_counts,
    kind_of,
    library_of,
    read_config,
)
from blr.compressor.checkpoint.extras import ADAPTER, MODULE_WEIGHTS, UNAPPLIED, Extras, find_extras
from blr.compressor.checkpoint.header import TensorEntry, check_name, read_header
from blr.compressor.checkpoint.regular import (
    check_is_folder,
    inside,
    open_regular,
    parse_json,
    read_exactly,
    read_whole,
    refuse,
)
from blr.compressor.checkpoint.remote import remote_shard

if TYPE_CHECKING:
    from torch import Tensor

MAX_INDEX_BYTES = 25_000_000  # of JSON this takes a second and half a gigabyte to parse
CHUNK = 8 * 2**20
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

    `config` is config.json as parsed; `shards` are the weight files in order. Read as transformers
    does (`loading/loader_names.py`), `left` are the stored tensors that are none of the model's, and
    `said` what is to be told of them.
    """

    folder: Path
    config: dict[str, Any]
    entries: dict[str, TensorEntry]
    shards: tuple[Path, ...]
    extras: Extras = field(default_factory=Extras)
    left: tuple[TensorEntry, ...] = ()
    said: tuple[str, ...] = ()
    _stamps: dict[Path, tuple[int, int, int]] = field(default_factory=dict, repr=False)

    @property
    def model_type(self) -> str:
        """`model_type` of the config: lower-case letters, digits and `_.-` only; of a model of
        diffusers the name of its class."""
        return kind_of(self.config)

    @property
    def library(self) -> Library:
        """Whose model it is."""
        return library_of(self.config)

    @property
    def stored(self) -> list[TensorEntry]:
        """Every tensor of the shards once, under one of its names, in byte order within a shard."""
        places = {(e.file, e.start, e.end): e for e in (*self.left, *self.entries.values())}
        shards = {shard: number for number, shard in enumerate(self.shards)}
        return sorted(places.values(), key=lambda e: (shards.get(e.file, 0), e.start))

    def notes(self) -> list[str]:
        """Lines on what of the model is read otherwise than its folder says."""
        return [*self.said, *[UNAPPLIED] * (ADAPTER in self.extras.left)]

    def extra_files(self) -> dict[str, Path]:
        """Files to carry over: name in a folder, sorted, to where each lies."""
        return self.extras.carried

    def read_bytes(self, entry: TensorEntry, chunk: int = CHUNK) -> Iterator[bytearray]:
        """Yields the stored bytes of `entry` in pieces of at most `chunk` bytes.

        Raises:
            InputError: the shard cannot be read or has changed since it was checked.
            HubError: it is on the hub, which fails.
        """
        if (shard := remote_shard(entry.file)) is not None:
            yield from shard.read(entry.start, entry.end, chunk, entry.file)
            return
        with open_regular(entry.file) as file:
            self._check_unchanged(entry.file, os.fstat(file.fileno()))
            for start in range(entry.start, entry.end, chunk):
                yield read_exactly(file, entry.file, start, min(chunk, entry.end - start))

    def sha256(self, entry: TensorEntry) -> str:
        """Hexadecimal SHA-256 of the stored bytes of `entry`. Raises as `read_bytes`."""
        if (shard := remote_shard(entry.file)) and (known := shard.digest(entry.start, entry.end)):
            return known
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
        [data] = self.read_bytes(entry, entry.nbytes)
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
    check_is_folder(folder, "a checkpoint folder")
    if not os.path.lexists(folder / "config.json"):
        _refuse_folder(folder, "no config.json")
    config = read_config(folder)
    names = library_of(config)
    if any(os.path.lexists(folder / name) for name in (names.single, names.index)):
        weights = folder
    else:
        weights, names = _unpickle(folder, names, allow_pickle, scratch), TRANSFORMERS
    shards, weight_map = find_shards(weights, names.single, names.index)
    entries = _read_shards(shards, weight_map, weights / names.index)
    check_counts(config, folder, len(entries))
    stamps = {file: _stamp(os.stat(file)) for file in shards}
    used = {shard.name for shard in shards}
    if weights != folder:
        used = {path.name for path in folder.glob("*.bin")}
    extras = find_extras(folder, used)
    if extras.pickled and allow_pickle and scratch is not None:
        extras = _unpickle_modules(folder, extras, scratch)
    return Source(folder, config, entries, tuple(shards), extras, _stamps=stamps)


def find_shards(folder: Path, single: str, index: str) -> tuple[list[Path], dict[str, str]]:
    """The weight files of `folder` in sorted order, and tensor name -> file name if indexed.

    Raises:
        InputError: a malformed index, file names that are not plain, missing files.
    """
    has_single = os.path.lexists(folder / single)
    if not os.path.lexists(folder / index):
        return [inside(folder, single)], {}
    weight_map = read_index(inside(folder, index), Path(single).suffix)
    names = sorted(set(weight_map.values()))
    if has_single and names != [single]:
        remedy = "remove the one that is not meant"
        refuse(folder, f"both {single} and {index}", "one of them", remedy)
    return [inside(folder, name) for name in names], weight_map


def read_index(path: Path, suffix: str) -> dict[str, str]:
    """`weight_map` of the index at `path`: safe tensor names to plain file names.

    Raises InputError for any other.
    """
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


def _unpickle(folder: Path, names: Library, allow_pickle: bool, scratch: Path | None) -> Path:
    """Converts the pickled weights of `folder` into `scratch`, if there are any and they may."""
    if not any(os.path.lexists(folder / name) for name in (names.pickle, names.pickle_index)):
        _refuse_folder(folder, "no weights", names)
    if not allow_pickle:
        remedy = "convert them, or pass --allow-pickle if you trust them"
        refuse(folder, f"only pickled weights ({names.pickle})", "safetensors", remedy)
    if scratch is None:
        raise ValueError("allow_pickle needs a scratch folder")
    from blr.compressor.checkpoint.pickled import convert_pickle

    return convert_pickle(folder, scratch, names)


def _unpickle_modules(folder: Path, extras: Extras, scratch: Path) -> Extras:
    """`extras` with the pickled weights of modules converted into `scratch`."""
    from blr.compressor.checkpoint.pickled import convert_pickle

    made = {}
    for number, name in enumerate(extras.pickled[:10]):
        module = name.partition("/")[0]
        converted = convert_pickle(folder / module, scratch / f"module-{number}")
        files = sorted(converted.glob("*.safetensors"))
        if len(files) != 1:
            refuse(folder / name, f"weights of {len(files)} files", "a small module", "convert them")
        made[f"{module}/{MODULE_WEIGHTS}"] = files[0]
    left = tuple(name for name in extras.left if name not in extras.pickled[:10])
    return Extras(dict(sorted({**extras.carried, **made}.items())), left, extras.pickled[10:])


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _refuse_folder(folder: Path, found: str, names: Library = TRANSFORMERS) -> None:
    looked = f"config.json with {names.single}, {names.index} or {names.pickle}"
    instead, remedy = in_place_of(folder) or ("", "check the path")
    found = f"{found} but {instead}" if instead else found
    refuse(folder, found, f"a Hugging Face checkpoint ({looked})", remedy)


Advice = str | Callable[[Path, Path], str]


def in_place_of(folder: Path) -> tuple[str, str] | None:
    """What `folder` holds that is no checkpoint of transformers, and what to do; None if nothing known.

    The first of `KINDS` that matches anything decides. Only names are read.
    """
    for pattern, found, advice in KINDS:
        match = min(folder.glob(pattern), default=None)
        if match is not None:
            return found, advice if isinstance(advice, str) else advice(folder, match)
    return None


def check_is_output(folder: Path, expected: str) -> None:
    """Raises `InputError` unless `folder` is one, and no half of an output, which is `expected`."""
    check_is_folder(folder, expected)
    if (folder / JOURNAL).is_dir():
        refuse(folder, UNFINISHED, expected, FINISH)


def _snapshot(folder: Path, match: Path) -> str:
    owner_and_name = folder.name.removeprefix("models--").replace("--", "/")
    return f"give {quote(owner_and_name)[1:-1]}, or the folder {quote(match.parent, 160)[1:-1]}"


def _inside(folder: Path, match: Path) -> str:
    return f"give {quote(match.parent, 160)[1:-1]}"


JOURNAL = "journal"  # in the partial folder of any run
UNFINISHED = "what an interrupted run of blr has done"
FINISH = "finish it by the command that began it"
TENSORS = "take the model's safetensors"
# pattern of names in the folder -> what it is, what to do
KINDS: tuple[tuple[str, str, Advice], ...] = (
    (JOURNAL, UNFINISHED, FINISH),
    ("adapter_config.json", "an adapter of peft", "merge it into its base model and give that"),
    ("*-of-*.safetensors", "shards without their index", "download the .safetensors.index.json, too"),
    ("*.gguf", "weights in GGUF", f"{TENSORS}, or let transformers read it (gguf_file=) and save it"),
    ("consolidated*", "weights in the author's own layout", "take those in that of transformers"),
    ("*.onnx", "a model in ONNX", TENSORS),
    ("*.h5", "weights of TensorFlow", TENSORS),
    ("*.msgpack", "weights of Flax", TENSORS),
    ("snapshots/*/config.json", "a model in the cache of the hub", _snapshot),
    ("*/config.json", "folders of checkpoints", _inside),
)
