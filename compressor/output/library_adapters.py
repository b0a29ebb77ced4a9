"""By library: what an output says of its model, what it must pass, and how the model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from blr.compressor.base.errors import OutputError
from blr.compressor.base.quoting import quote
from blr.compressor.checkpoint.config import DIFFUSERS, TRANSFORMERS, kind_of
from blr.compressor.checkpoint.extras import inert
from blr.compressor.checkpoint.source import Source, open_source
from blr.compressor.loading import diffusion, smoke_run, streamed, vendor
from blr.compressor.loading.diffusion import PREFIX, dense_model
from blr.compressor.loading.vendor import DIFFUSION
from blr.compressor.modeling.modeling_blr import FORMAT
from blr.compressor.output import files
from blr.compressor.output.files import Written
from blr.compressor.planning.plan import Plan
from blr.compressor.structures.specs import spec_from_dict

KEPT = {DIFFUSERS.kind, "_diffusers_version"}  # keys that sound like code and are none


def _diffusion_config(config: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """The native configuration with a class of ours, where that is, and the table of layers."""
    name = PREFIX + kind_of(config)
    return {
        **inert(config, KEPT),
        DIFFUSERS.kind: name,
        "auto_map": {"AutoModel": f"{DIFFUSION}.{name}"},
        "quantization_config": {"quant_method": "blr"},  # the native class stops there
        "blr": {
            "format": FORMAT,
            "layers": {p.layer.module: p.spec.to_dict() for p in plan.layers},
        },
    }


def _fits_diffusion(source: Source, plan: Plan) -> None:
    """Raise InputError if `source` does not fit its class; without diffusers its table alone decides."""
    if find_spec("diffusers") is not None:
        dense_model(source, meta=True)


def _reload_diffusion(source: Source, folder: Path) -> Written:
    """Raise OutputError, which is a bug, if a written folder lacks tensors of its table of layers."""
    written = open_source(folder)
    expected = {name: entry.shape for name, entry in source.entries.items()}
    for module, fields in written.config["blr"]["layers"].items():
        del expected[f"{module}.weight"]
        stored = spec_from_dict(fields).stored().items()
        expected |= {f"{module}.{suffix}": shape for suffix, (shape, _) in stored}
    found = {name: entry.shape for name, entry in written.entries.items()}
    if wrong := {n for n in expected.keys() | found.keys() if expected.get(n) != found.get(n)}:
        names = quote(sorted(wrong)[:3], 240)[1:-1]
        told = f"tensors {names} of {len(wrong)} are not as config.json says"
        raise OutputError(f"{folder}: {told}; this is a bug in blr, keep the checkpoint")
    return {}


@dataclass(frozen=True)
class Door:
    """What depends on the library: config.json of an output, checks of its fit before and after the
    work, the model in a source (`dense`) and an output (`written`), a small run, and the files that
    travel."""

    config: Callable[[dict[str, Any], Plan], dict[str, Any]]
    check_fits: Callable[[Source, Plan], None]
    check_reload: Callable[[Source, Path], Written]
    dense: Callable[[Source], Any]
    written: Callable[[Path], Any]
    trial: Callable[[Any, object], smoke_run.Trial]
    code: Callable[[], dict[str, bytes]]


_DOORS = {
    TRANSFORMERS: Door(
        config=files.structured_config,
        check_fits=files.check_fits,
        check_reload=files.check_reload,
        dense=streamed.streamed_model,
        written=streamed.load_written,
        trial=smoke_run.first_trial,
        code=vendor.code_files,
    ),
    DIFFUSERS: Door(
        config=_diffusion_config,
        check_fits=_fits_diffusion,
        check_reload=_reload_diffusion,
        dense=diffusion.dense_model,
        written=diffusion.load_written,
        trial=diffusion.diffusion_trial,
        code=vendor.diffusion_files,
    ),
}


def door_of(source: Source) -> Door:
    """That of the library whose model is in `source`."""
    return _DOORS[source.library]
