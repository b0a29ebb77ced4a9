"""Checks an output: by its manifest, or, where transformers saved it and left none, by its model."""

import os
from dataclasses import replace
from pathlib import Path

from blr.compressor.base.errors import InputError, VerifyError
from blr.compressor.checkpoint.regular import read_json
from blr.compressor.checkpoint.source import check_is_output
from blr.compressor.workspace.manifest import MANIFEST, MAX_BYTES, saved_by, verify_manifest


def verify_output(folder: Path) -> dict[str, object]:
    """Check the files of `folder`, and say how many and against what. Raises VerifyError for a
    difference, OutputError for no output of blr, InputError for malformed files."""
    check_is_output(folder, "one that blr wrote")
    saved = None if os.path.lexists(folder / MANIFEST) else _saved(folder)
    if saved is not None:
        from blr.compressor.checkpoint.source import open_source
        from blr.compressor.exporting.origin import native_config
        from blr.compressor.loading.native import native_class, native_errors
        from blr.compressor.modeling.models import model_class
        from blr.compressor.output.files import misfits

        source = open_source(folder)
        native = replace(source, config=native_config(source))
        native_class(native)
        with native_errors(native):
            found = misfits(model_class(source.config["architectures"][0]), folder)
        named = {f"{name.partition('.')[0]}.py" for name in source.config.get("auto_map", {}).values()}
        found = found or ", ".join(sorted(name for name in named if not (folder / name).is_file()))
        if found:
            said = f"{found} missing or not as its configuration says"
            raise VerifyError(f"{folder}: {said}; save it again")
        count = sum(path.is_file() for path in folder.rglob("*"))
        return {"output": str(folder), "files": count, "ok": True, "saved": saved}
    return {"output": str(folder), "files": verify_manifest(folder), "ok": True}


def verify_text(result: dict[str, object]) -> str:
    if "saved" in result:
        said = f"{result['saved']}, which leaves no digests to compare"
        files = f"{result['files']} files, whose tensors fit the configuration"
        return f"{result['output']}: {said}: {files}"
    signed = f", signed by {result['signed']}" if "signed" in result else ""
    return f"{result['output']}: {result['files']} files match the manifest{signed}"


def _saved(folder: Path) -> str | None:
    """By whom a folder without a manifest was saved; None for a folder that is not of blr."""
    try:
        return saved_by(read_json(folder / "config.json", MAX_BYTES))
    except (InputError, KeyError, TypeError):
        return None
