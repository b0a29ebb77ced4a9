"""A source checkpoint, fully checked when opened and then read one tensor at a time. Opening reads
config, index and headers only. Reads use no mmap: resident memory stays one tensor's."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import eq
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
from blr.compressor.checkpoint.header import TORCH_NAMES, TensorEntry, find_shards, read_header
from blr.compressor.checkpoint.pickled import convert_pickle
from blr.compressor.checkpoint.regular import check_is_folder, open_regular, read_exactly, refuse
from blr.compressor.checkpoint.remote import remote_shard

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 8 * 2**20
JOURNAL = "journal"  # in the partial folder of any run
UNFINISHED = "what an interrupted run of blr has done"
FINISH = "finish it by the command that began it"
TENSORS = "take the model's safetensors"
# pattern of names in the folder -> what it is, what to do
KINDS: tuple[tuple[str, str, str], ...] = (
    (JOURNAL, UNFINISHED, FINISH),
    ("adapter_config.json", "an adapter of peft", "merge it into its base model and give that"),
    ("*-of-*.safetensors", "shards without their index", "download the .safetensors.index.json, too"),
    ("*.gguf", "weights in GGUF", f"{TENSORS}, or let transformers read it (gguf_file=) and save it"),
    ("consolidated*", "weights in the author's own layout", "take those in that of transformers"),
    ("*.onnx", "a model in ONNX", TENSORS),
    ("*.h5", "weights of TensorFlow", TENSORS),
    ("*.msgpack", "weights of Flax", TENSORS),
    ("snapshots/*/config.json", "a model in the cache of the hub", "give {name}, or the folder {place}"),
    ("*/config.json", "folders of checkpoints", "give {place}"),
)


@dataclass(frozen=True)
class Source:
    """A checked checkpoint: `config` as parsed, `shards` in order, `entries` of all tensors in byte
    order. Read as transformers does (`loading/loader.py`), `left` are tensors that the model does
    not have, and `said` are notes on them."""

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
        """The model type in config.json; of a model of diffusers, its class."""
        return kind_of(self.config)

    @property
    def library(self) -> Library:
        return library_of(self.config)

    @property
    def nbytes(self) -> int:
        """Stored bytes of the model's tensors."""
        return sum(entry.nbytes for entry in self.entries.values())

    @property
    def parameters(self) -> int:
        return sum(entry.parameters for entry in self.entries.values())

    @property
    def stored(self) -> list[TensorEntry]:
        """Every tensor of the shards once, under one of its names, in byte order within a shard."""
        places = {(e.file, e.start, e.end): e for e in (*self.left, *self.entries.values())}
        shards = {shard: number for number, shard in enumerate(self.shards)}
        return sorted(places.values(), key=lambda e: (shards.get(e.file, 0), e.start))

    def notes(self) -> list[str]:
        """Lines on what of the model is read otherwise than its folder says."""
        return [*self.said, *[UNAPPLIED] * (ADAPTER in self.extras.left)]

    def read_bytes(self, entry: TensorEntry, chunk: int = CHUNK) -> Iterator[bytearray]:
        """Yield the stored bytes of `entry` in pieces. Raises InputError if the shard cannot be read or
        has changed, HubError if the hub fails."""
        if (shard := remote_shard(entry.file)) is not None:
            yield from shard.read(entry.start, entry.end, chunk, entry.file)
            return
        with open_regular(entry.file) as file:
            if self._stamps.get(entry.file) != _stamp(os.fstat(file.fileno())):
                remedy = "run again when nothing writes to the folder"
                refuse(entry.file, "a file changed since it was checked", "the same file", remedy)
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

    def has(self, name: str, other: Source, theirs: str) -> bool:
        """Whether the tensor `name` is stored as `theirs` in `other`, byte for byte."""
        one, two = self.entries.get(name), other.entries.get(theirs)
        if one is None or two is None or (one.dtype, one.shape) != (two.dtype, two.shape):
            return False
        return all(map(eq, self.read_bytes(one), other.read_bytes(two)))

    def load_tensor(self, entry: TensorEntry) -> Tensor:
        """The tensor as stored. Raises InputError as `read_bytes`, or for a dtype that torch lacks."""
        import torch

        if entry.dtype not in TORCH_NAMES:
            found = f"dtype {entry.dtype} of tensor {quote(entry.name)}"
            refuse(entry.file, found, "a dtype that torch can hold", "exclude it or cast it before")
        dtype = getattr(torch, TORCH_NAMES[entry.dtype])
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=dtype)
        [data] = self.read_bytes(entry, entry.nbytes)
        return torch.frombuffer(data, dtype=dtype).reshape(entry.shape)


def open_source(folder: Path, *, allow_pickle: bool = False, scratch: Path | None = None) -> Source:
    """Open and check the checkpoint in `folder` without reading tensor data. `allow_pickle` converts
    pytorch_model.bin into `scratch`, which must outlive the `Source`. Raises InputError."""
    folder = Path(folder)
    check_is_folder(folder, "a checkpoint folder")
    if not os.path.lexists(folder / "config.json"):
        _refuse_folder(folder, "no config.json")
    config = read_config(folder)
    names, weights = library_of(config), folder
    if not any(os.path.lexists(folder / name) for name in (names.single, names.index)):
        if not any(os.path.lexists(folder / name) for name in (names.pickle, names.pickle_index)):
            _refuse_folder(folder, "no weights", names)
        if not allow_pickle:
            remedy = "convert them, or pass --allow-pickle if you trust them"
            refuse(folder, f"only pickled weights ({names.pickle})", "safetensors", remedy)
        if scratch is None:
            raise ValueError("allow_pickle needs a scratch folder")
        weights, names = convert_pickle(folder, scratch, names), TRANSFORMERS
    shards, weight_map = find_shards(weights, names.single, names.index)
    entries = _read_shards(shards, weight_map, weights / names.index)
    check_counts(config, folder, len(entries))
    stamps = {file: _stamp(os.stat(file)) for file in shards}
    used = {path.name for path in (shards if weights == folder else folder.glob("*.bin"))}
    extras = find_extras(folder, used)
    if allow_pickle and scratch is not None:
        extras = _converted(folder, extras, scratch)
    return Source(folder, config, entries, tuple(shards), extras, _stamps=stamps)


def _converted(folder: Path, extras: Extras, scratch: Path) -> Extras:
    """`extras` with the pickled weights of the first ten modules as safetensors."""
    made, names = dict(extras.carried), extras.pickled[:10]
    for number, name in enumerate(names):
        module = name.partition("/")[0]
        files = [*convert_pickle(folder / module, scratch / f"module-{number}").glob("*.safetensors")]
        if len(files) != 1:
            refuse(folder / name, f"weights of {len(files)} files", "a small module", "convert them")
        made[f"{module}/{MODULE_WEIGHTS}"] = files[0]
    left = tuple(name for name in extras.left if name not in names)
    return Extras(dict(sorted(made.items())), left, extras.pickled[10:])


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


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _refuse_folder(folder: Path, found: str, names: Library = TRANSFORMERS) -> None:
    looked = f"config.json with {names.single}, {names.index} or {names.pickle}"
    instead, remedy = in_place_of(folder) or ("", "check the path")
    found = f"{found} but {instead}" if instead else found
    refuse(folder, found, f"a Hugging Face checkpoint ({looked})", remedy)


def in_place_of(folder: Path) -> tuple[str, str] | None:
    """What `folder` holds in place of a checkpoint, and what to do, by the first of `KINDS`."""
    for pattern, found, advice in KINDS:
        if match := min(folder.glob(pattern), default=None):
            name, place = folder.name.removeprefix("models--").replace("--", "/"), match.parent
            return found, advice.format(name=quote(name)[1:-1], place=quote(place, 160)[1:-1])
    return None


def check_is_output(folder: Path, expected: str) -> None:
    """Raises `InputError` unless `folder` is one, and no half of an output, which is `expected`."""
    check_is_folder(folder, expected)
    if (folder / JOURNAL).is_dir():
        refuse(folder, UNFINISHED, expected, FINISH)
