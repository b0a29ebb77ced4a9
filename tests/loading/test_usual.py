"""What `configs/usual.yaml` lists is what transformers saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from pico import VOCAB, small

from blr.compressor.checkpoint.source import Source, open_source
from blr.compressor.loading.checked import TIES, is_usual, layouts

pytestmark = pytest.mark.fast
SMALL: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB, "sliding_window": 4},
    **{"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "layer_types": None},
    **{"n_embd": 32, "n_layer": 3, "n_head": 4, "n_inner": 48, "rotary_dim": 8, "n_positions": 64},
    **{"num_layers": 3, "num_heads": 4, "ffn_dim": 48, "word_embed_proj_dim": 32, "dim": 32},
    **{"max_position_embeddings": 64, "hidden_dim": 64, "n_layers": 3, "n_heads": 4},
    **{"image_size": 32, "patch_size": 16, "moe_intermediate_size": 16, "num_experts": 4},
    **{"num_local_experts": 4, "num_experts_per_tok": 2},
    "attention_types": [[["global", "local"], 1], [["global"], 1]],
}


@pytest.mark.parametrize("name", sorted(layouts()))
def test_what_a_class_saves_is_usual(name: str, tmp_path: Path) -> None:
    """Tied and not."""
    native = getattr(transformers, name)
    config = small(native.config_class(), SMALL)
    for ties in (True, False) if "head" in layouts()[name] else (layouts()[name]["ties"],):
        config.tie_word_embeddings = ties
        native(config).save_pretrained(tmp_path / str(ties))
        source = open_source(tmp_path / str(ties))
        assert source.config.get(TIES, layouts()[name]["ties"]) is ties
        assert is_usual(source)
        for gone in source.entries:
            kept = {entry: value for entry, value in source.entries.items() if entry != gone}
            assert not is_usual(Source(source.folder, source.config, kept, source.shards))
