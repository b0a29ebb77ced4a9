"""How a folder of sentence-transformers makes a sentence's embedding of the model's hidden states. Read
from modules.json, the folders it names and config_sentence_transformers.json, as that package does. A
folder without modules.json is pooled by the mean."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from blr.compressor.base.quoting import quote
from blr.compressor.checkpoint.extras import MAX_BYTES, MODULE_WEIGHTS, MODULES, read_modules
from blr.compressor.checkpoint.header import read_header
from blr.compressor.checkpoint.regular import inside, read_json, refuse

LENGTH, SETTINGS = "sentence_bert_config.json", "config_sentence_transformers.json"
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
    """How sentences become embeddings. `modes` of pooling are put side by side; `length` is the most
    tokens (None: the model's); `lower` makes lower case; `dense` layers follow the pooling; `prompt`
    comes before every sentence, pooled or not (`pools_prompt`); `dimensions` are kept (None: all)."""

    modes: tuple[str, ...] = ("mean",)
    length: int | None = None
    lower: bool = False
    dense: tuple[Callable[[Tensor], Tensor], ...] = ()
    prompt: str = ""
    pools_prompt: bool = True
    dimensions: int | None = None

    def texts(self, sentences: list[str]) -> list[str]:
        texts = [self.prompt + sentence for sentence in sentences]
        return [text.lower() for text in texts] if self.lower else texts

    def unpooled(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """How many tokens of the prompt, at the start of every text, are left out of the pooling."""
        if self.pools_prompt or not self.prompt:
            return 0
        ids = tokenizer(self.texts([""]))["input_ids"][0]
        return len(ids) - (ids[-1] in tokenizer.all_special_ids)

    def embed(self, hidden: Tensor, mask: Tensor, unpooled: int = 0) -> Tensor:
        """Embeddings [n, d'] of states [n, T, d] and mask [n, T], without the first `unpooled`."""
        if unpooled:
            mask = mask * (mask.cumsum(1) > unpooled)
        pooled = torch.cat([POOLING[mode](hidden, mask) for mode in self.modes], -1)
        for layer in self.dense:
            pooled = layer(pooled)
        return pooled[:, : self.dimensions]


def read_sentences(folder: Path) -> Sentences:
    """Read the settings in `folder`. Raises InputError for unknown modules or a missing prompt."""
    settings = _read(folder, LENGTH, needed=False)
    length, lower = settings.get("max_seq_length"), settings.get("do_lower_case") is True
    length = length if type(length) is int and length > 0 else None
    modes: tuple[str, ...] = ("mean",)
    dense, pools_prompt = [], True
    for row in read_modules(folder):
        kind, path = str(row.get("type")).rpartition(".")[2], str(row.get("path") or "")
        if kind == "Pooling":
            config = _read(folder, f"{path}/config.json")
            old = [mode for key, mode in OLD_MODES.items() if config.get(key) is True]
            named = config.get("pooling_mode", old or "mean")
            modes = (named,) if isinstance(named, str) else tuple(named)
            if unknown := [mode for mode in modes if mode not in POOLING]:
                refuse(folder / MODULES, f"pooling {quote(unknown[0], 40)}", ", ".join(POOLING), REMEDY)
            pools_prompt = config.get("include_prompt") is not False
        elif kind == "Dense":
            dense.append(_dense(folder, path))
        elif kind not in ("Transformer", "Normalize"):  # cosines know no norm
            refuse(folder / MODULES, f"a module {quote(kind)}", "Pooling, Dense or Normalize", REMEDY)
    own = _read(folder, SETTINGS, needed=False)
    prompt, dimensions = _prompt(folder, own), own.get("truncate_dim")
    dimensions = dimensions if type(dimensions) is int and dimensions > 0 else None
    return Sentences(modes, length, lower, tuple(dense), prompt, pools_prompt, dimensions)


def _prompt(folder: Path, settings: dict[str, object]) -> str:
    """The prompt that sentence-transformers puts before a sentence by default."""
    name, prompts = settings.get("default_prompt_name"), settings.get("prompts")
    known = {"query": "", "document": "", **(prompts if type(prompts) is dict else {})}
    if name is None:
        return ""
    if type(name) is not str or name not in known:
        found = f"a default prompt {quote(name, 40)}"
        refuse(folder / SETTINGS, found, f"one of {', '.join(sorted(known))}", REMEDY)
    return str(known[name] or "")


def _read(folder: Path, name: str, needed: bool = True) -> dict[str, Any]:
    there = needed or os.path.lexists(folder / name)
    return read_json(inside(folder, name), MAX_BYTES) if there else {}


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


def _places(mask: Tensor) -> Tensor:
    """Places [m, w] of the tokens of each text, from 1 on; 0 for padding."""
    return mask.cumsum(1) * mask


POOLING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cls": lambda hidden, mask: hidden[torch.arange(len(hidden)), mask.int().argmax(1)],
    "max": lambda hidden, mask: hidden.masked_fill(mask[..., None] == 0, float("-inf")).amax(1),
    "mean": _mean,
    "mean_sqrt_len_tokens": lambda hidden, mask: _mean(hidden, mask, 0.5),
    "weightedmean": lambda hidden, mask: _mean(hidden, _places(mask)),
    "lasttoken": lambda hidden, mask: hidden[torch.arange(len(hidden)), _places(mask).argmax(1)],
}
