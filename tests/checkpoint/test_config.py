"""How many tokens a model has positions for, as its config.json says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pico import save_pico
from transformers import AutoModel

from blr.compressor.base.errors import InputError
from blr.compressor.checkpoint.config import check_counts, read_config
from blr.compressor.checkpoint.context import UNLIMITED, context_of


@pytest.mark.parametrize("name", ["bert", "distilbert", "gpt2", "opt", "roberta", "xlm-roberta"])
def test_the_context_is_the_longest_text_that_a_model_takes(name: str, tmp_path: Path) -> None:
    folder = save_pico(name, tmp_path / name)
    longest = context_of(read_config(folder))
    model = AutoModel.from_pretrained(folder).eval()
    assert context_of(model.config.to_dict()) == longest
    model(torch.full((1, longest), 3))
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.full((1, longest + 1), 3))


@pytest.mark.parametrize("config", [{}, {"model_type": "t5", "n_positions": 512, "d_model": 32}])
def test_relative_positions_set_no_limit(config: dict[str, object]) -> None:
    assert context_of(config) == UNLIMITED


@pytest.mark.parametrize(("kind", "longest"), [("yarn", 256), ("llama3", 64), ("default", 64)])
@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_yarn_reaches_beyond_what_was_trained_with(name: str, kind: str, longest: int) -> None:
    rope = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 64}
    config = {"model_type": "qwen2", "max_position_embeddings": 64, name: rope}
    assert context_of(config) == longest
    assert context_of({**config, "max_position_embeddings": 512}) == 512


def test_blocks_of_a_layer_are_no_blocks_of_the_model(tmp_path: Path) -> None:
    config = {"model_type": "blr_llama", "blr": {"layers": {"a": {"structure": "blast", "blocks": 192}}}}
    check_counts(config, tmp_path, 94)
    with pytest.raises(InputError, match=r"192. with 94 tensors"):
        check_counts({"model_type": "llama", "num_hidden_layers": 192}, tmp_path, 94)
