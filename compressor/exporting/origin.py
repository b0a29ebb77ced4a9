"""Opens and checks what is to be exported: a dense checkpoint or an output of `blr compress`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blr.compressor.base.errors import InputError, OutputError
from blr.compressor.base.quoting import quote
from blr.compressor.checkpoint.regular import refuse
from blr.compressor.checkpoint.source import Source, open_source
from blr.compressor.loading.checked import check_transformers, check_unquantized, open_checked
from blr.compressor.structures.specs import Spec, spec_from_dict
from blr.compressor.workspace.manifest import check_listed, read_manifest, saved_by

# As in modeling/modeling_blr.py, which imports transformers: the format of config.blr, names, and
# what an output's configuration has beside the native one
FORMAT = 1
OUR_TYPE, OUR_CLASS = "blr_", "Blr"
OUR_KEYS = {"blr", "auto_map", "for_native_classes"}
EXPORTED = {"export", "pairs"}  # what only an export has in config.blr
AGAIN = "compress the model again with this version of blr"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint to export. source: with the native configuration. specs: by structured module.
    compressed: whether it has structured layers. saved: by whom and from what, if not by blr."""

    source: Source
    specs: Mapping[str, Spec]
    compressed: bool
    saved: str | None = None

    @property
    def manifest(self) -> dict[str, Any]:
        """What its manifest says; {} of a dense one, or without a manifest."""
        try:
            return read_manifest(self.source.folder)
        except OutputError:
            return {}


def open_checkpoint(folder: Path, allow_pickle: bool = False, scratch: Path | None = None) -> Checkpoint:
    """Open the checkpoint in `folder` and check its headers and small files; shards are compared with
    the manifest later, as they are read. Raises InputError for one that is malformed, other than its
    manifest says, quantized, or exported already."""
    check_listed(folder, "small")
    source = open_source(folder, allow_pickle=allow_pickle, scratch=scratch)
    check_transformers(source, "blr export and blr heal take")
    if not source.model_type.startswith(OUR_TYPE):
        return Checkpoint(open_checked(folder, allow_pickle, scratch), {}, compressed=False)
    check_unquantized(source)
    specs = _specs(source)
    native = replace(source, config=native_config(source))
    return Checkpoint(native, specs, compressed=True, saved=_saved(source))


def _specs(source: Source) -> dict[str, Spec]:
    """The spec of every module in config.blr. Raises InputError for anything malformed."""
    path = source.folder / "config.json"
    table = source.config.get("blr")
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        refuse(path, "no blr table of a format this version reads", f"format {FORMAT}", AGAIN)
    if not table.keys().isdisjoint(EXPORTED):
        said = "an export already, its tensors are not those of a checkpoint"
        raise InputError(f"{source.folder}: {said}; give the checkpoint it was exported from")
    layers = table.get("layers")
    if not isinstance(layers, dict):
        refuse(path, "no blr.layers", "a table of structured layers", AGAIN)
    return {module: _spec(path, module, fields) for module, fields in layers.items()}


def _spec(path: Path, module: str, fields: dict[str, object]) -> Spec:
    try:
        spec = spec_from_dict(fields)
        sizes = [size for shape in spec.shapes().values() for size in shape]
        if not all(type(size) is int and size > 0 for size in sizes):
            raise ValueError("sizes that are no positive integers")
    except (TypeError, ValueError, KeyError, ArithmeticError, AttributeError) as error:
        found = f"a layer {quote(module)} that is none ({quote(error, 120)[1:-1]})"
        refuse(path, found, "structure and sizes", AGAIN)
    return spec


def _saved(source: Source) -> str | None:
    try:
        return saved_by(source.config)
    except TypeError as error:
        refuse(source.folder / "config.json", str(error), "who saved the model", AGAIN)


def native_config(source: Source) -> dict[str, object]:
    """The configuration of the dense model that was compressed."""
    names = source.config.get("architectures") or []
    config = {key: value for key, value in source.config.items() if key not in OUR_KEYS}
    classes = [name.removeprefix(OUR_CLASS) for name in names]
    return {**config, "model_type": source.model_type.removeprefix(OUR_TYPE), "architectures": classes}
