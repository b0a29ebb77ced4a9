"""How long a text a model has positions for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

NGRAM = "ngram"  # in place of a draft: what followed the same tokens before
UNLIMITED = 1 << 30  # tokens of context where a model names no limit
# Families whose first position is the one behind the padding id, as fairseq counts them
_BEHIND_PADDING = re.compile(
    r"(blr_)?(.*roberta.*|camembert|data2vec-text|ibert|lilt|longformer|luke|mpnet|xmod)"
)


def of_text(config: Mapping[str, object]) -> Mapping[str, Any]:
    """A configuration; of a model of several parts, with the values of the part that reads text."""
    part = config.get("text_config")
    return {**config, **part} if isinstance(part, Mapping) else config


def _stretched(rope: object) -> int:
    """The positions that YaRN's factor reaches, 0 otherwise: its configs keep the trained limit."""
    if not isinstance(rope, Mapping):
        return 0
    kind = rope.get("rope_type", rope.get("type"))
    factor, trained = rope.get("factor"), rope.get("original_max_position_embeddings")
    if kind != "yarn" or not isinstance(factor, int | float) or not isinstance(trained, int):
        return 0
    return int(factor * trained) if 1 <= factor < 1 << 10 else 0


def context_of(config: Mapping[str, object]) -> int:
    """Tokens that a model with `config` has positions for; `UNLIMITED` where it sets no limit."""
    config = of_text(config)
    # GPT-2's name for it; T5's `n_positions` is no limit, its positions are relative
    limit = config.get("n_positions" if "n_embd" in config else "max_position_embeddings")
    if type(limit) is not int or limit < 1:
        return UNLIMITED
    limit = max(limit, _stretched(config.get("rope_parameters") or config.get("rope_scaling")))
    if not _BEHIND_PADDING.fullmatch(str(config.get("model_type"))):
        return limit
    padding = config.get("pad_token_id")
    return max(1, limit - 1 - (padding if isinstance(padding, int) else 1))
