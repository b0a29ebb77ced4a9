"""Pico models and random tokens for the tests of calibration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from pico import MODELS, MORE, VOCAB, save_pico
from torch import nn

from blr.compressor.base.progress import Progress
from blr.compressor.checkpoint.source import open_source
from blr.compressor.fitting import sequential
from blr.compressor.fitting.block_passes import Batch, run_block, window_rows
from blr.compressor.fitting.blocks import BlockModel
from blr.compressor.fitting.factorize import Work
from blr.compressor.fitting.refit import finish_blocks
from blr.compressor.fitting.sensitivity import measure
from blr.compressor.fitting.student import FitRun
from blr.compressor.loading.native import family_of
from blr.compressor.planning.plan import make_plan
from blr.compressor.recipe.schema import make_recipe
from blr.compressor.text.reading import Calibration
from blr.compressor.workspace.journal import Journal

TEXT_MODELS = [name for name in MODELS if name not in ("vit", "opt")]
TEXT_MODELS += ["gemma2", "gemma3", "phi3", "distilbert", "xlm-roberta"]
CPU = torch.device("cpu")


def calibration(padded: bool = False) -> Calibration:
    """Two batches of random tokens; with `padded` some rows are shorter."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(2, VOCAB, (3, 12), generator=generator) for _ in range(2)]
    masks = [torch.ones_like(batch) for batch in ids]
    if padded:
        masks[1][0, 7:] = 0
    return Calibration(ids, masks)


def opened(folder: Path) -> BlockModel:
    """The checkpoint in `folder`, ready to run its blocks."""
    source = open_source(folder)
    model = BlockModel(source, family_of(source), CPU)
    model.load_rest()
    return model


def block_model(name: str, folder: Path) -> BlockModel:
    """The pico model `name`, ready to run its blocks."""
    return opened(save_pico(name, folder))


def native(name: str, folder: Path) -> Any:
    """The same checkpoint as transformers loads it."""
    config = {**MODELS, **MORE}[name][2]
    return getattr(transformers, config).from_pretrained(folder, dtype=torch.float32).eval()


def run(
    folder: Path,
    journal: Path,
    *,
    epochs: int = 0,
    finish: int = 0,
    measured: bool = True,
    **settings: Any,
) -> FitRun:
    """Fit the checkpoint in `folder`, keeping layers in `journal`; with sensitivities if `measured`."""
    journal.mkdir(exist_ok=True)
    model, recipe = opened(folder), make_recipe(**settings)
    source = model.source
    batches = model.start(calibration())
    work = Work(source, recipe, Journal(journal), Progress(quiet=True), "cpu")
    sensitivity = measure(work, model, batches, "sensitivity") if measured else None
    plan = make_plan(source, recipe)
    found = FitRun(work, model, plan, batches, sensitivity, epochs, "prefix", finish)
    sequential.fit_blocks(found)
    if finish:
        finish_blocks(found, model.start(calibration()))
    return found


@torch.no_grad()
def assert_parts_are_rows(every: nn.ModuleList, batch: Batch) -> None:
    """Every block gives for some windows of a batch what it gives for them among all."""
    states, windows = batch.hidden, torch.tensor([1])
    for block in every:
        whole = run_block(block, states, batch)
        part = run_block(block, states[windows], window_rows(batch, windows))
        torch.testing.assert_close(part, whole[windows], rtol=1e-3, atol=1e-4)
        states = whole


def drift(found: FitRun) -> float:
    """Relative distance of the compressed model's last hidden states from the dense ones."""
    pairs = [(batch.student, batch.hidden) for batch in found.batches]
    return float(sum((s - h).norm() for s, h in pairs) / sum(h.norm() for _, h in pairs))
