"""Modules of a model exchanged by name. Shipped in every checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def replace_modules(
    model: nn.Module,
    layers: dict[str, dict[str, Any]],
    make: Callable[[dict[str, Any], bool], nn.Module],
) -> None:
    """Put what `make` makes of an entry of `layers`, and of whether there is a bias, in the place of the
    module of its name: on that one's device, in its dtype. Raises KeyError for a name that is none."""
    modules = dict(model.named_modules())
    for name, fields in layers.items():
        if name not in modules:
            raise KeyError(f"the configuration replaces {name!r}, which this model does not have")
        old = next(modules[name].parameters())
        with torch.device(old.device):
            new = make(fields, getattr(modules[name], "bias", None) is not None)
        parent, _, child = name.rpartition(".")
        setattr(modules[parent], child, new.to(old.dtype))
