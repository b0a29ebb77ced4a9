"""What an output must pass before it is committed: it loads, runs, and loses no more than it may. What
depends on the library of the model is in its `Door`."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from blr.compressor.base.disk import write_stream
from blr.compressor.base.errors import NumericsError, OutputError
from blr.compressor.base.exhaustion import raise_exhausted
from blr.compressor.base.quoting import first_line, quote
from blr.compressor.checkpoint.config import DIFFUSERS, TRANSFORMERS, kind_of
from blr.compressor.checkpoint.extras import CARD, REPORT, inert
from blr.compressor.checkpoint.source import Source, open_source
from blr.compressor.loading import diffusion, loader, smoke_run, vendor
from blr.compressor.loading.diffusion import PREFIX, dense_model
from blr.compressor.loading.native import continues_text
from blr.compressor.loading.smoke_run import NO_CHECK, Trial
from blr.compressor.loading.vendor import DIFFUSION
from blr.compressor.modeling.modeling_blr import FORMAT
from blr.compressor.output import files
from blr.compressor.output.files import Written
from blr.compressor.output.loss import Measure, Text, measure_of
from blr.compressor.output.loss_messages import (
    LARGE,
    MARK,
    MOST,
    CheckFacts,
    LossFacts,
    number,
    rounded,
    told,
)
from blr.compressor.output.report import report_pages
from blr.compressor.planning.plan import Plan
from blr.compressor.structures.specs import spec_from_dict
from blr.compressor.workspace.ownership import sibling


@dataclass(frozen=True)
class Bar:
    """The limit on a loss: over `MOST` nats `output` is refused without `force`, from `LARGE` on `warn`
    is called. `remedy`: options that lose less. `kept`: what was computed stays for the next run."""

    output: Path
    remedy: str
    force: bool
    warn: Callable[[str], None]
    kept: bool = True

    def hold(self, facts: LossFacts) -> None:
        """Raise NumericsError for a loss over `MOST`, without `force`."""
        loss = facts["loss"]
        if loss < LARGE:
            return
        before, after = (number(facts["perplexity"][name]) for name in ("before", "after"))
        lost = f"{loss:.2f} nats a token lost (perplexity {before} -> {after} on {facts['read']})"
        if loss > MOST and not self.force:
            then, partial = "add --force to write it all the same", sibling(self.output, "partial")
            if self.kept:
                then = f"repeat the command with --force, which writes what {partial} keeps, and train "
                then += "that (blr heal)"
            raise NumericsError(
                f"{self.output}: {lost}, expected at most {MOST:g}; {self.remedy}; or {then}"
            )
        self.warn(f"{lost}; {self.remedy}")


class OutputCheck:
    """Compares the model in a written folder with the one that it was made from.

    Args:
        source: the checkpoint that the output is made from; its model runs now, before any work.
        reload: loads a written folder, checks its tensors and returns the files that it wrote.
        runs: whether both models run; otherwise only `reload` is called.
        text: returns the text to measure a decoder's loss on; None for text of its own.
        load: loads a written folder, in a dtype of torch; None for the library of the source.
        why: why nothing runs.

    Raises InputError or NumericsError for a source whose model does not run.
    """

    def __init__(
        self,
        source: Source,
        reload: Callable[[Path], Written],
        bar: Bar,
        runs: bool = True,
        text: Callable[[], Text | None] = lambda: None,
        load: Callable[..., Any] | None = None,
        why: str = "--no-check",
    ) -> None:
        self.reload, self.bar = reload, bar
        self.door = door_of(source)
        self.load = load or self.door.written
        self.distance: float | None = None
        self.loss = LossFacts()
        self.trial: Trial | None = None
        self.measure: Measure | LossFacts = {}
        if runs:
            self.trial = self.door.trial(self.door.dense(source), source.folder)
            self.measure = measure_of(source, text() if continues_text(source) else None)
        elif continues_text(source):
            self.measure = {"unmeasured": why}

    def __call__(self, folder: Path) -> Written:
        """Check `folder`, and set `facts`. Raises OutputError for a model that does not load or run,
        NumericsError for NaN or Inf and as `Bar.hold`."""
        written = self.unjudged(folder)
        if "loss" in self.loss:
            self.bar.hold(self.loss)
        elif self.loss and self.trial is not None:
            self.bar.warn(f"perplexity {told(self.loss)}")
        return written

    def unjudged(self, folder: Path) -> Written:
        """The same without a limit on the loss, for a model that is still to be trained."""
        written = self.reload(folder)
        self.loss = {} if isinstance(self.measure, Measure) else self.measure
        if self.trial is not None:
            self.distance, self.loss = self._run(self.trial, folder)
        files, report = _card(folder / CARD, self.loss), folder / REPORT
        if self.loss and report.is_file():
            files |= report_pages(json.loads(report.read_bytes()) | {"loss": rounded(self.loss)})
        return written | {name: write_stream(folder / name, [data]) for name, data in files.items()}

    @property
    def facts(self) -> CheckFacts | None:
        """What was run, the distance of the results, and the loss; None if nothing ran."""
        if self.trial is None or self.distance is None:
            return None
        return {"ran": self.trial.what, "distance": self.distance, **self.loss}

    def _run(self, trial: Trial, folder: Path) -> tuple[float, LossFacts]:
        try:
            distance = trial.distance(self.load(folder), folder)
            if not isinstance(self.measure, Measure):
                return distance, self.measure
            return distance, self.measure(self.load(folder, torch.float32), folder)
        except Exception as error:  # a model may raise anything
            raise_exhausted(error)
            reason = first_line(error)
            found = f"what was written does not run ({quote(reason, 160)[1:-1]})"
            remedy = f"exclude the layer that this is about ({NO_CHECK})"
            expected = "expected it to as its source does"
            raise OutputError(f"{folder}: {found}, {expected}; {remedy}") from error


def _card(path: Path, facts: LossFacts) -> dict[str, bytes]:
    text = path.read_text("utf-8") if path.is_file() else ""
    if MARK not in text:
        return {}
    said = f"\nPerplexity {told(facts)}.\n" if facts else ""
    return {CARD: text.replace(MARK, said).encode()}


KEPT = {DIFFUSERS.kind, "_diffusers_version"}  # keys that sound like code and are none


def _diffusion_config(config: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """The native config.json with a class of blr and the table of layers."""
    name = PREFIX + kind_of(config)
    return {
        **inert(config, KEPT),
        DIFFUSERS.kind: name,
        "auto_map": {"AutoModel": f"{DIFFUSION}.{name}"},
        "quantization_config": {"quant_method": "blr"},  # the native class stops there
        "blr": {"format": FORMAT, "layers": {p.layer.module: p.spec.to_dict() for p in plan.layers}},
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
    work, the models of source and output, a small run, and the files that travel."""

    config: Callable[[dict[str, Any], Plan], dict[str, Any]]
    check_fits: Callable[[Source, Plan], None]
    check_reload: Callable[[Source, Path], Written]
    dense: Callable[[Source], Any]
    written: Callable[..., Any]
    trial: Callable[[Any, object], smoke_run.Trial]
    code: Callable[[], dict[str, bytes]]


_DOORS = {
    TRANSFORMERS: Door(
        config=files.structured_config,
        check_fits=files.check_fits,
        check_reload=files.check_reload,
        dense=loader.streamed_model,
        written=loader.load_written,
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
    """The `Door` of the library of the model in `source`."""
    return _DOORS[source.library]
