"""What `save_pretrained` of a model adds where `blr` is installed: the Python files that travel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from blr.compressor.modeling.configuration_blr import PREFIX
from blr.compressor.modeling.registry import auto_map
from blr.compressor.modeling.settings import export_settings
from blr.compressor.structures.specs import spec_from_dict
from blr.compressor.workspace.manifest import MANIFEST, is_output


def write_code(config: Any, folder: Path) -> None:
    """Make `folder`, where `config` is about to be saved, one that loads without `blr`.

    A manifest of an output that stood there before goes: it would describe other files.
    """
    classes = auto_map(config.model_type.removeprefix(f"{PREFIX.lower()}_"), config.architectures)
    config.auto_map, files = _code(config, classes)
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    if is_output(folder):
        (folder / MANIFEST).unlink()


def _code(config: Any, classes: dict[str, str]) -> tuple[dict[str, str], dict[str, bytes]]:
    """`auto_map` and files of a model: compressed, exported, or of pairs of linear layers."""
    from blr.compressor.loading import vendor

    if "pairs" in config.blr:
        return vendor.exported_classes(classes, vendor.PLAIN), vendor.plain_files()
    settings = export_settings(config)
    if settings is None:
        return classes, vendor.vendored_files()
    specs = map(spec_from_dict, config.blr.get("layers", {}).values())
    contents = vendor.contents_of(specs, settings)
    return vendor.exported_classes(classes), vendor.vendored_files(contents)
