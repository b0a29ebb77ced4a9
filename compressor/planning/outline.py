"""Makes a checkpoint without weights: the tensors that config.json implies, enough to plan with."""

import re
from collections.abc import Iterator
from pathlib import Path

from blr.compressor.base.device import BYTES, CODES, DTYPES
from blr.compressor.base.errors import InputError
from blr.compressor.base.globs import matches
from blr.compressor.checkpoint.config import DIFFUSERS, TRANSFORMERS, read_config
from blr.compressor.checkpoint.header import TensorEntry
from blr.compressor.checkpoint.shapes import evaluate
from blr.compressor.checkpoint.source import Source
from blr.compressor.loading.checked import check_dense, check_unquantized, open_checked
from blr.compressor.recipe.architectures import Family, find_family


def open_or_outline(folder: Path) -> tuple[Source, bool]:
    """Open the checkpoint in `folder`, or make its outline if it has no weights; true for an outline.
    Raises InputError if neither is possible, or `compress` would refuse the checkpoint."""
    weights = [name for library in (TRANSFORMERS, DIFFUSERS) for name in (library.single, library.index)]
    if any((folder / name).exists() for name in weights) or not (folder / "config.json").exists():
        return open_checked(folder), False
    return outline(folder), True


def outline(folder: Path) -> Source:
    """The compressible weights of the model that `folder`/config.json describes. Raises InputError for
    a family without a table, or a config without a size."""
    config = read_config(folder)
    source = Source(folder, config, {}, ())
    check_dense(folder, source.model_type)
    check_unquantized(source)
    family = find_family(source.model_type)
    if family is None:
        found = f"no weights, and model type {source.model_type!r} has no table in configs/"
        raise InputError(f"{folder}: found {found}; to plan it give a folder with its weights")
    dtype = str(config.get("dtype") or config.get("torch_dtype"))
    dtype = dtype if dtype in DTYPES else "bfloat16"
    entries = {}
    for name in _names(source, family):
        shape = _shape(source, family, f"{name}.weight")
        size = BYTES[dtype] * shape[0] * shape[1]
        path = folder / "config.json"
        entries[f"{name}.weight"] = TensorEntry(f"{name}.weight", CODES[dtype], shape, path, 0, size)
    return Source(folder, config, entries, ())


def _names(source: Source, family: Family) -> Iterator[str]:
    counted = [
        (glob.removesuffix("#"), dims[0]) for glob, dims in family.shapes.items() if glob[-1] == "#"
    ]
    if not counted:
        said = f"config.json alone does not tell the layers of a {source.model_type!r} model"
        remedy = "give a folder with its weights"
        raise InputError(f"{source.folder}: found no weights, and {said}; {remedy}")
    container, symbol = counted[0][0].removeprefix("*"), counted[0][1]
    blocks = evaluate(source, symbol)
    if blocks is None:
        where, remedy = source.folder / "config.json", "take that of the model's own repository"
        raise InputError(f"{where}: found no {symbol}, expected it to plan; {remedy}")
    for number in range(blocks):
        for glob in family.modules:
            inner = re.sub(r"^\*.*?\.\*\.", "", glob)
            yield f"{family.prefix}{container}{number}.{inner}"


def _shape(source: Source, family: Family, tensor: str) -> tuple[int, int]:
    for glob, symbols in family.shapes.items():
        if len(symbols) == 2 and matches(tensor, glob):
            sizes = [evaluate(source, symbol) for symbol in symbols]
            if None not in sizes:
                return sizes[0] or 0, sizes[1] or 0
            missing = ", ".join(s for s, n in zip(symbols, sizes, strict=True) if n is None)
            found = f"{source.folder / 'config.json'}: found no {missing}, expected it for {tensor}"
            raise InputError(f"{found}; take the config.json of the model's own repository")
    raise InputError(f"configs/{family.name}.yaml: no shape for {tensor}; add it")
