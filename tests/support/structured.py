"""Pico models of any family with structured layers of random values, without a folder."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from pico import MODELS, MORE

from blr.compressor.modeling.modeling_blr import config_class
from blr.compressor.modeling.models import model_class
from blr.compressor.structures.specs import BlastSpec, LowRankSpec, MonarchSpec, Spec


def low_rank(inputs: int, outputs: int) -> Spec:
    return LowRankSpec(inputs, outputs, max(min(inputs, outputs) // 2, 1))


def monarch(inputs: int, outputs: int) -> Spec:
    return MonarchSpec(inputs, outputs, 4, 4)


def blast(inputs: int, outputs: int) -> Spec:
    return BlastSpec(inputs, outputs, 4, 8)


def per_head(inputs: int, outputs: int) -> Spec:
    return LowRankSpec(inputs, outputs, 3, 4)


def structured_model(name: str, spec: Any = low_rank, **changes: Any) -> Any:
    """The pico model `name` in evaluation mode, with `spec(inputs, outputs)` in its blocks.

    changes: of its configuration.
    """
    config_name, settings, model_name = {**MODELS, **MORE}[name]
    settings = {**settings, **changes}
    config = getattr(transformers, config_name)(**settings)
    torch.manual_seed(0)
    with torch.device("meta"):
        native = getattr(transformers, model_name)(config)
    layers = {
        path: spec(*_sizes(module)).to_dict()
        for path, module in native.named_modules()
        if _sizes(module) and any(part.isdecimal() for part in path.split("."))
    }
    made = config_class(f"Blr{config_name}")(**settings, blr={"format": 1, "layers": layers})
    made._attn_implementation = changes.get("attn_implementation")
    model = model_class(f"Blr{model_name}")(made).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def _sizes(module: Any) -> tuple[int, int] | None:
    """Inputs and outputs of a linear layer."""
    if isinstance(module, torch.nn.Linear):
        return module.in_features, module.out_features
    if isinstance(module, transformers.pytorch_utils.Conv1D):
        return module.nx, module.nf
    return None
