"""Converts pickled weights to safetensors, for `--allow-pickle` only. Three fences: archive and names in
the pickle are checked without unpickling; `torch.load` runs with `weights_only=True`; every tensor must
own the bytes it claims."""

from __future__ import annotations

import io
import json
import pickletools
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blr.compressor.base.disk import check_space, folder_bytes
from blr.compressor.base.exhaustion import storage_errors
from blr.compressor.base.quoting import quote
from blr.compressor.checkpoint.config import TRANSFORMERS, Library
from blr.compressor.checkpoint.header import TORCH_NAMES, check_name, find_shards
from blr.compressor.checkpoint.regular import inside, open_regular, refuse

if TYPE_CHECKING:
    from torch import Tensor

MAX_PICKLE_BYTES = 4_000_000  # some 300 bytes a tensor; scanned in Python, so also a time limit
MAX_GROWTH = 8  # tied weights are stored once and written several times; views could be endless
SHARD_BYTES = 2**30
# What torch.save writes for a plain state dict; narrower than what weights_only lets through,
# which includes bytearray(10**12).
GLOBALS = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_(tensor_v2|tensor_v3|parameter)"
    r"|torch \w+Storage|torch\.storage UntypedStorage|torch (" + "|".join(TORCH_NAMES.values()) + ")"
)
# Other ways to name or build an object than the GLOBAL and REDUCE of pickle protocol 2
OPCODES = frozenset({"STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4"})
REMEDY = "save the weights as safetensors with the software that made them"


def convert_pickle(folder: Path, scratch: Path, library: Library = TRANSFORMERS) -> Path:
    """Write the pickled weights of `folder`, named as in `library`, to `scratch` as an indexed
    safetensors checkpoint; `scratch`. Raises InputError for anything but plain tensors in torch's zip
    format, StorageError or OutputError where `scratch` cannot hold them."""
    shards, weight_map = find_shards(folder, library.pickle, library.pickle_index)
    sizes = {shard: _check_archive(shard) for shard in shards}
    names: dict[str, Path] = {}
    needed = 0
    for shard in shards:
        for name, tensor in _load(shard, sizes[shard]).items():
            needed += tensor.nbytes
            if name in names or (weight_map and weight_map.get(name) != shard.name):
                refuse(shard, f"tensor {quote(name)}", "it in one place, where the index says")
            names[name] = shard
    if lost := weight_map.keys() - names.keys():
        index = inside(folder, library.pickle_index)
        refuse(index, f"tensor {quote(min(lost))} that no shard has", "only present tensors")
    with storage_errors(scratch.parent, needed):
        scratch.mkdir(parents=True, exist_ok=True)
        check_space(scratch, needed - folder_bytes(scratch))
        _write(sizes, scratch)
    return scratch


def _check_archive(path: Path) -> set[int]:
    """The sizes of the records of a plain torch archive; refuses any other."""
    with open_regular(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                members = archive.infolist()
                if len({item.filename for item in members}) != len(members):
                    refuse(path, "an archive with a name twice", "unique names", REMEDY)
                for item in members:
                    if item.compress_type != zipfile.ZIP_STORED or item.compress_size != item.file_size:
                        refuse(path, f"compressed {quote(item.filename)}", "stored bytes only", REMEDY)
                pickled = [item for item in members if item.filename.endswith("/data.pkl")]
                if len(pickled) != 1 or pickled[0].file_size > MAX_PICKLE_BYTES:
                    expected = f"one data.pkl of at most {MAX_PICKLE_BYTES} bytes"
                    refuse(path, f"{len(pickled)} data.pkl in the archive or a huge one", expected)
                data = archive.read(pickled[0])
        except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError, RuntimeError) as error:
            found = f"no archive ({quote(error)[1:-1]})"
            refuse(path, found, "the zip format of torch.save", REMEDY)
    _check_pickle(path, data)
    return {item.file_size for item in members}


def _check_pickle(path: Path, data: bytes) -> None:
    """Looks at the opcodes, without executing any, for names outside a plain state dict."""
    try:
        for opcode, argument, _ in pickletools.genops(io.BytesIO(data)):
            name = str(argument) if opcode.name == "GLOBAL" else opcode.name
            if opcode.name in OPCODES or (opcode.name == "GLOBAL" and not GLOBALS.fullmatch(name)):
                found = f"a pickle that asks for {quote(name)}"
                refuse(path, found, "plain tensors only (nothing was run)", REMEDY)
    except ValueError as error:
        refuse(path, f"a broken pickle ({quote(error)[1:-1]})", "a state dict", REMEDY)


def _load(path: Path, sizes: set[int]) -> dict[str, Tensor]:
    """The state dict of a shard, mapped; each tensor's storage is a record of the archive."""
    import torch

    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a hostile pickle can raise anything inside the unpickler
        reason = quote(str(error).split("\n")[0], 120)[1:-1]
        refuse(path, f"a pickle that does not load ({reason})", "plain tensors", REMEDY)
    if not isinstance(state, dict) or not state:
        refuse(path, f"a {type(state).__name__}", "a dict of tensors", REMEDY)
    for name, value in state.items():
        _check_tensor(path, name, value, sizes)
    total = sum(value.numel() * value.element_size() for value in state.values())
    if total > MAX_GROWTH * path.stat().st_size:
        expected = f"at most {MAX_GROWTH} times the file's size"
        refuse(path, f"tensors of {total} bytes in all", expected, REMEDY)
    return state


def _check_tensor(path: Path, name: object, value: Any, sizes: set[int]) -> None:
    import torch

    if type(name) is not str or type(value) not in (torch.Tensor, torch.nn.Parameter):
        found = f"{type(value).__name__} under the key {quote(name)}"
        refuse(path, found, "tensors by name", REMEDY)
    check_name(name, path)
    plain = value.layout == torch.strided and value.device.type == "cpu" and not value.is_quantized
    if not plain or str(value.dtype).removeprefix("torch.") not in TORCH_NAMES.values():
        refuse(path, f"{quote(name)}, of a special kind", "a plain dense tensor", REMEDY)
    claimed, owned = value.numel() * value.element_size(), value.untyped_storage().nbytes()
    if claimed > owned or owned not in sizes:
        found = f"tensor {quote(name)} of {claimed} bytes over a storage of {owned}"
        refuse(path, found, "a stored record that holds it", REMEDY)


def _write(shards: dict[Path, set[int]], scratch: Path) -> None:
    """Saves all tensors in shards of about `SHARD_BYTES`, then the index."""
    from safetensors.torch import save_file

    weight_map: dict[str, str] = {}
    for number, group in enumerate(_groups(shards)):
        file = f"model-{number:05d}.safetensors"
        save_file(group, scratch / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(group, file))
    (scratch / TRANSFORMERS.index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _groups(shards: dict[Path, set[int]]) -> Iterator[dict[str, Tensor]]:
    """Tensors of all shards in groups of about `SHARD_BYTES`, each with memory of its own."""
    import torch

    group: dict[str, Tensor] = {}
    size = 0
    for shard, sizes in shards.items():
        for name, value in _load(shard, sizes).items():
            # cloned: safetensors refuses shared memory, and the map must not outlive its shard
            group[name] = value.detach().clone(memory_format=torch.contiguous_format)
            size += group[name].nbytes
            if size >= SHARD_BYTES:
                yield group
                group, size = {}, 0
    if group:
        yield group
