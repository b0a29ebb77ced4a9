"""Low-rank layers as pairs of `nn.Linear`. Shipped inside every checkpoint.

``config.blr["pairs"]`` names them::

    "pairs": {"model.layers.0.mlp.up_proj": {"in_features": 512, "out_features": 1376, "rank": 187}}
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import Tensor, nn

from blr.compressor.modeling.classes import by_module, planned


class Pair(nn.Sequential):
    """``y = U (V x) + bias``: `V` [r, i], then `U` [o, r], each an `nn.Linear`."""

    V: nn.Linear
    U: nn.Linear

    def __init__(self, in_features: int, out_features: int, rank: int, bias: bool) -> None:
        first, last = nn.Linear(in_features, rank, bias=False), nn.Linear(rank, out_features, bias=bias)
        super().__init__(OrderedDict(V=first, U=last))

    @property
    def weight(self) -> Tensor:
        """W [o, i], for models that read it; computed at each reading."""
        return self.U.weight @ self.V.weight


def place_pairs(model: Any) -> None:
    """Put a `Pair` in the place of every module that ``config.blr["pairs"]`` names: on its device, in
    its dtype. Raises KeyError for a name that is none of `model`."""
    modules = dict(model.named_modules())
    for name, sizes in by_module(model, (model.config.blr or {}).get("pairs") or {}).items():
        if name not in modules:
            raise KeyError(f"the configuration replaces {name!r}, which this model does not have")
        old = next(modules[name].parameters())
        pair = Pair(**sizes, bias=getattr(modules[name], "bias", None) is not None)
        parent, _, child = name.rpartition(".")
        setattr(modules[parent], child, pair.to(device=old.device, dtype=old.dtype))


def pair_plan(model: Any) -> dict[str, str]:
    """The native plan of tensor parallelism with a pair cut where its layer would be: U by outputs, V
    by inputs, so that what is summed over processes has the size of the rank.

    Empty for a model without pairs, or where layers of one name are pairs in some blocks alone.
    """
    kinds: dict[str, set[bool]] = {}
    plan: dict[str, str] = {}
    for name, module, style in planned(model):
        paired = isinstance(module, Pair)
        kinds.setdefault(name, set()).add(paired)
        plan[f"{name}.{'V' if style == 'rowwise' else 'U'}" if paired else name] = style
    mixed = any(len(found) > 1 for found in kinds.values())
    return plan if {True} in kinds.values() and not mixed else {}
