"""By library: what an output says of its model, what it must pass, and how the model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blr.compressor.checkpoint.library import DIFFUSERS, TRANSFORMERS
from blr.compressor.checkpoint.source import Source
from blr.compressor.loading import diffusion, smoke_run, streamed, vendor
from blr.compressor.output import diffusion_files, files
from blr.compressor.output.produce import Written
from blr.compressor.planning.plan import Plan


@dataclass(frozen=True)
class Door:
    """What depends on the library.

    config: config.json of an output, from that of its source. check_fits: whether the output will load,
    from headers, before any work. check_reload: whether every tensor of a written folder finds its
    place; the files that it wrote. dense, written: the model in a source, and in an output. trial: runs
    a model on a small input. code: the Python files that travel.
    """

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
        config=diffusion_files.structured_config,
        check_fits=diffusion_files.check_fits,
        check_reload=diffusion_files.check_reload,
        dense=diffusion.dense_model,
        written=diffusion.load_written,
        trial=diffusion.diffusion_trial,
        code=vendor.diffusion_files,
    ),
}


def door_of(source: Source) -> Door:
    """That of the library whose model is in `source`."""
    return _DOORS[source.library]
