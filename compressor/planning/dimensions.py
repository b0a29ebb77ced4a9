"""The sizes of a model that config.json tells, as far as forecasts ask for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from blr.compressor.checkpoint.context import of_text

MOST = 1 << 40  # of a size that is one


@dataclass(frozen=True)
class Dimensions:
    """Of a model: blocks, the width of their states and of their MLP, tokens known (0: none), and
    whether the output head is the embedding."""

    blocks: int
    width: int
    middle: int
    vocabulary: int
    tied: bool

    @property
    def tables(self) -> int:
        """Numbers of the embedding and of the head."""
        return self.vocabulary * self.width * (1 if self.tied else 2)


def dimensions_of(config: Mapping[str, object]) -> Dimensions:
    """What `config` tells, and 1 or a usual size in the place of what it does not."""
    text = of_text(config)

    def number(*names: str) -> int:
        found = (text.get(name) for name in names)
        return next((value for value in found if isinstance(value, int) and 0 < value < MOST), 0)

    width = number("hidden_size", "n_embd", "dim") or 1
    blocks = number("num_hidden_layers", "n_layer", "n_layers") or 1
    middle = number("intermediate_size", "n_inner", "ffn_dim", "hidden_dim") or 4 * width
    tied = bool(config.get("tie_word_embeddings", True))
    return Dimensions(blocks, width, middle, number("vocab_size"), tied)
