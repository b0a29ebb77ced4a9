"""Models to compute with: in bfloat16 on a GPU, where they run in that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from blr.compressor.base.exhaustion import raise_exhausted
from blr.compressor.loading.load import load_model
from blr.compressor.loading.smoke_run import plain_tokens

TOKENS = 4  # read to see whether a model runs


def model_dtype(device: torch.device) -> str:
    """bfloat16 on a GPU, float32 elsewhere."""
    return "bfloat16" if device.type == "cuda" else "float32"


def load_computing(folder: Path, task: str, device: torch.device, dtype: str | None = None) -> Any:
    """Load a model of text in `dtype` (by default `model_dtype`), or in float32 where it does not run in
    that: some, as XLNet, multiply tensors of two dtypes."""
    asked = dtype or model_dtype(device)
    model = load_model(folder, task, dtype=asked, device=str(device))
    if asked == "float32" or _runs(model):
        return model
    del model
    return load_model(folder, task, dtype="float32", device=str(device))


@torch.no_grad()
def _runs(model: Any) -> bool:
    ids = plain_tokens(model.config)[None, :TOKENS].to(model.device)
    try:
        model(input_ids=ids)
    except Exception as error:  # whatever a model raises where dtypes meet
        raise_exhausted(error)
        return False
    return True
