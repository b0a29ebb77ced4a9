"""How a folder of sentence-transformers makes a sentence's embedding of the model's hidden states.

Read from modules.json and the folders it names, as that package does: pooling, length, and dense
layers behind. A folder without modules.json is pooled by the mean.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from blr.compressor.checkpoint.extras import MAX_BYTES, MODULE_WEIGHTS, MODULES
from blr.compressor.checkpoint.header import read_header
from blr.compressor.checkpoint.regular import inside, parse_json, read_whole, refuse
from blr.compressor.quoting import quote

LENGTH = "sentence_bert_config.json"
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **{"Identity": lambda y: y, "Tanh": torch.tanh, "ReLU": torch.relu, "Sigmoid": torch.sigmoid},
    **{"GELU": torch.nn.functional.gelu, "SiLU": torch.nn.functional.silu},
}
OLD_MODES = {  # keys of earlier versions to names of this one
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
REMEDY = "evaluate it with sentence-transformers itself"


@dataclass(frozen=True)
class Sentences:
    """`modes` of pooling, side by side; `length` in tokens at most, None for the model's; `lower` case
    or as it is; `dense` layers in order."""

    modes: tuple[str, ...] = ("mean",)
    length: int | None = None
    lower: bool = False
    dense: tuple[Callable[[Tensor], Tensor], ...] = ()

    def embed(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """[n, d'] of hidden states [n, T, d] and their mask [n, T], padded on either side."""
        pooled = torch.cat([POOLING[mode](hidden, mask) for mode in self.modes], -1)
        for layer in self.dense:
            pooled = layer(pooled)
        return pooled


def read_sentences(folder: Path) -> Sentences:
    """What the files of `folder` say. Raises InputError for modules that are not known here."""
    settings = _read(folder, LENGTH) if os.path.lexists(folder / LENGTH) else {}
    length, lower = settings.get("max_seq_length"), settings.get("do_lower_case") is True
    length = length if type(length) is int and length > 0 else None
    modes: tuple[str, ...] = ("mean",)
    dense = []
    for kind, path in _modules(folder):
        if kind == "Pooling":
            modes = _modes(folder, _read(folder, f"{path}/config.json"))
        elif kind == "Dense":
            dense.append(_dense(folder, path))
        elif kind not in ("Transformer", "Normalize"):  # cosines know no norm
            refuse(folder / MODULES, f"a module {quote(kind)}", "Pooling, Dense or Normalize", REMEDY)
    return Sentences(modes, length, lower, tuple(dense))


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Class and folder of each module, in order."""
    if not os.path.lexists(folder / MODULES):
        return []
    table = json.loads(read_whole(inside(folder, MODULES), MAX_BYTES))  # checked when it was opened
    rows = [entry for entry in table if type(entry) is dict] if type(table) is list else []
    return [(str(e.get("type")).rpartition(".")[2], str(e.get("path") or "")) for e in rows]


def _read(folder: Path, name: str) -> dict[str, Any]:
    path = inside(folder, name)
    return parse_json(read_whole(path, MAX_BYTES), path)


def _modes(folder: Path, config: dict[str, Any]) -> tuple[str, ...]:
    old = [mode for key, mode in OLD_MODES.items() if config.get(key) is True]
    named = config.get("pooling_mode", old or "mean")
    modes = (named,) if isinstance(named, str) else tuple(named)
    if unknown := [mode for mode in modes if mode not in POOLING]:
        refuse(folder / MODULES, f"pooling {quote(unknown[0], 40)}", ", ".join(POOLING), REMEDY)
    return modes


def _dense(folder: Path, path: str) -> Callable[[Tensor], Tensor]:
    name = str(_read(folder, f"{path}/config.json").get("activation_function", "Tanh"))
    activation = ACTIVATIONS.get(name.rpartition(".")[2])
    if activation is None:
        refuse(folder / path, f"activation {quote(name, 60)}", ", ".join(ACTIVATIONS), REMEDY)
    weights = inside(folder, f"{path}/{MODULE_WEIGHTS}")
    read_header(weights)
    stored = load_file(weights)
    weight, bias = stored["linear.weight"], stored.get("linear.bias")

    def layer(x: Tensor) -> Tensor:
        shift = None if bias is None else bias.to(x)
        return activation(torch.nn.functional.linear(x, weight.to(x), shift))

    return layer


def _mean(hidden: Tensor, mask: Tensor, power: float = 1.0) -> Tensor:
    kept = mask[..., None].to(hidden)
    return (hidden * kept).sum(1) / kept.sum(1).clamp(min=1e-9) ** power


def _weighted(hidden: Tensor, mask: Tensor) -> Tensor:
    """The mean by position, the first counted once."""
    weights = (mask.cumsum(1) * mask)[..., None].to(hidden)
    return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)


def _first(hidden: Tensor, mask: Tensor) -> Tensor:
    return hidden[torch.arange(len(hidden)), mask.int().argmax(1)]


def _last(hidden: Tensor, mask: Tensor) -> Tensor:
    return hidden[torch.arange(len(hidden)), (mask.cumsum(1) * mask).argmax(1)]


POOLING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cls": _first,
    "max": lambda hidden, mask: hidden.masked_fill(mask[..., None] == 0, float("-inf")).amax(1),
    "mean": _mean,
    "mean_sqrt_len_tokens": lambda hidden, mask: _mean(hidden, mask, 0.5),
    "weightedmean": _weighted,
    "lasttoken": _last,
}
