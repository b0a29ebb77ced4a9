"""What `save_pretrained` of a model adds where `blr` is installed: the Python files that travel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from blr.compressor.checkpoint.manifest import MANIFEST
from blr.compressor.modeling.configuration_blr import PREFIX
from blr.compressor.modeling.registry import auto_map
from blr.compressor.modeling.settings import export_settings
from blr.compressor.structures.specs import spec_from_dict


def write_code(config: Any, folder: Path) -> None:
    """Make `folder`, where `config` is about to be saved, one that loads without `blr`.

    A manifest of what stood there before goes: it would describe other files.
    """
    from blr.compressor.loading.vendor import contents_of, exported_classes, vendored_files

    settings = export_settings(config)
    classes = auto_map(config.model_type.removeprefix(f"{PREFIX.lower()}_"))
    specs = map(spec_from_dict, config.blr.get("layers", {}).values())
    contents = None if settings is None else contents_of(specs, settings)
    config.auto_map = classes if settings is None else exported_classes(classes)
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in vendored_files(contents).items():
        (folder / name).write_bytes(data)
    (folder / MANIFEST).unlink(missing_ok=True)
