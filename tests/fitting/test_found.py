"""Families that have no table are calibrated, too: their blocks are found, and found to be the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from calibrating import assert_parts_are_rows, calibration, opened, run
from pico import small
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from blr.compressor.base.errors import BlrError, CapabilityError
from blr.compressor.fitting.block_passes import run_block
from blr.compressor.fitting.blocks import BlockModel
from blr.compressor.recipe.architectures import find_family

pytestmark = pytest.mark.fast

VOCAB = 128
SIZES: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 64},
    **{"d_model": 32, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_heads": 4, "n_layers": 4},
    **{"embedding_size": 32, "state_size": 8, "num_layers": 4, "num_heads": 4, "n_positions": 64},
    **{"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0},
    **{"intermediate_size_mlp": 48, "bos_token_id": 1, "eos_token_id": 1, "layer_types": None},
}
GEMMA4 = {
    **{"vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8},
    **{"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"head_dim": 8, "sliding_window": 8, "num_hidden_layers": 6},
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}
# Model type -> what is peculiar about its blocks
EVERY_DAY = {
    "deberta-v2": "give tuples, and run q and k twice",
    "nomic_bert": "are stored with q, k and v in one",
    "electra": "follow a projection of the embedding",
    "mamba": "are followed by a norm of another name",
    "mpt": "are given biases of as many heads as there may be windows",
    "openai-gpt": "give lists",
    "llama4_text": "choose experts",
    "gemma4_text": "are each given something of their own",
    "modernbert-decoder": "are followed by a head of several layers",
}
TEXT = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_MASKED_LM_MAPPING_NAMES}
OTHERS = sorted(t for t in TEXT if t in CONFIG_MAPPING and find_family(t) is None and t not in EVERY_DAY)
MOST = 30_000_000  # parameters: of what has sizes of other names


def saved(model_type: str, folder: Path, **settings: Any) -> Any:
    """The native model of a type, small, saved into `folder`."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip("not in this release of transformers")
    generates = model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    auto = AutoModelForCausalLM if generates else AutoModel
    kind = CONFIG_MAPPING[model_type]
    known = GEMMA4 if model_type == "gemma4_text" else small(kind(), SIZES).to_dict()
    config = kind(**{**known, **settings})
    with torch.device("meta"):
        if sum(p.numel() for p in auto.from_config(config).parameters()) > MOST:
            raise ValueError("large")
    torch.manual_seed(0)
    model: Any = auto.from_config(config).eval()
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def assert_is_the_model(model: BlockModel, whole: Any) -> None:
    """Its blocks in turn, and what follows them; parts of a batch; groups that are in the blocks."""
    padded = not whole.can_generate()
    given = calibration(padded)
    batches = model.start(given)
    every = nn.ModuleList([model.load_block(index) for index in range(len(model))])
    for ids, mask, batch in zip(given.ids, given.masks, batches, strict=True):
        out = whole(input_ids=ids, attention_mask=mask) if padded else whole(input_ids=ids)
        behind = run_block(every, batch.hidden, batch)
        found, expected = (
            (behind, out.last_hidden_state) if padded else (model.logits(behind), out.logits)
        )
        keep = mask.bool()
        torch.testing.assert_close(found[keep], expected[keep], rtol=1e-3, atol=1e-4)
        assert_parts_are_rows(every, batch)


@pytest.mark.parametrize("model_type", EVERY_DAY)
def test_blocks_that_are_found_are_the_model(model_type: str, tmp_path: Path) -> None:
    whole = saved(model_type, tmp_path)
    model = opened(tmp_path)
    assert_is_the_model(model, whole)
    assert model.groups(model.load_block(len(model) - 1))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", OTHERS)
def test_any_family_is_calibrated_or_refused(model_type: str, tmp_path: Path) -> None:
    """Of all that read text and have no table, those whose configuration takes the usual sizes."""
    try:
        whole = saved(model_type, tmp_path)
        whole(input_ids=calibration().ids[0])
    except Exception as error:  # whatever a configuration of such sizes makes
        pytest.skip(f"no small model: {type(error).__name__}")
    try:
        model = opened(tmp_path)
        model.start(calibration(not whole.can_generate()))
    except BlrError as error:
        assert error.exit_code in (4, 9)
        return
    if whole.can_generate():  # what follows the blocks of an encoder is not asked for
        assert_is_the_model(model, whole)


def test_layers_of_one_input_are_a_group(tmp_path: Path) -> None:
    """And what is run twice, on tokens and on distances, is in none."""
    saved("electra", tmp_path / "electra")
    model = opened(tmp_path / "electra")
    model.start(calibration(padded=True))
    groups = [group.modules for group in model.groups(model.load_block(0))]
    assert set(groups[0]) == {f"attention.self.{name}" for name in ("query", "key", "value")}
    assert groups[1:] == [("attention.output.dense",), ("intermediate.dense",), ("output.dense",)]
    saved(
        "deberta-v2",
        tmp_path / "deberta",
        relative_attention=True,
        share_att_key=True,
        pos_att_type=["p2c", "c2p"],
    )
    model = opened(tmp_path / "deberta")
    model.start(calibration(padded=True))
    groups = [group.modules for group in model.groups(model.load_block(0))]
    assert groups[0] == ("attention.self.value_proj",) and len(groups) == 4


STREAMS: dict[str, dict[str, str]] = {
    "llama": {"self_attn.o_proj": "input_layernorm", "mlp.down_proj": "post_attention_layernorm"},
    "gpt2": {"attn.c_proj": "ln_1", "mlp.c_proj": "ln_2"},
    "bert": {"attention.output.dense": "attention", "output.dense": "intermediate"},
    "smollm3": {"self_attn.o_proj": "input_layernorm", "mlp.down_proj": "post_attention_layernorm"},
    "granite": {"self_attn.o_proj": "input_layernorm", "mlp.down_proj": "post_attention_layernorm"},
    "qwen3_moe": {"self_attn.o_proj": "input_layernorm"},
    "gemma2": {},  # what is added is normed before
    "phi": {},  # attention and MLP are added at once
}


SCALED = {"granite": pytest.approx(0.25, rel=1e-6)}


@pytest.mark.parametrize("model_type", STREAMS)
def test_what_a_layer_adds_to_is_found(model_type: str, tmp_path: Path) -> None:
    """The module that reads the residual stream: targets of calibrated fits make good its drift."""
    saved(model_type, tmp_path, **({"residual_multiplier": 0.25} if model_type in SCALED else {}))
    model = opened(tmp_path)
    model.start(calibration())
    for number in range(len(model)):
        groups = model.groups(model.load_block(number))
        found = {group.modules[0]: group.residual for group in groups if group.residual}
        assert found == STREAMS[model_type]
        assert all(g.scale == SCALED.get(model_type, 1.0) for g in groups if g.residual)


@pytest.mark.parametrize(
    ("model_type", "settings", "found"),
    [
        ("albert", {}, "are given something else than their own states"),
        ("xlnet", {}, "have states of shape"),
        ("gemma4_text", {"num_kv_shared_layers": 2}, "cannot be run one by one .KeyError: "),
        ("flaubert", {"emb_dim": 32}, "runs text through one list of blocks"),
    ],
)
def test_blocks_that_are_not_the_model_are_refused(
    model_type: str, settings: dict[str, Any], found: str, tmp_path: Path
) -> None:
    """Before anything is fitted: blocks that are shared, that count otherwise, that keep something."""
    saved(model_type, tmp_path, **settings)
    with pytest.raises(CapabilityError, match=f"{found}.*compress it without --text"):
        opened(tmp_path).start(calibration())


def test_a_found_family_is_fitted_and_refitted(tmp_path: Path) -> None:
    """Calibrated factors of a model without a table lose less than those of the weights alone."""
    torch.manual_seed(0)
    saved("nomic_bert", tmp_path / "model")
    fitted = run(tmp_path / "model", tmp_path / "journal", method="svd", cf=1.5, epochs=1)
    assert set(fitted.results) == set(fitted.planned)
    assert fitted.results and all("refit" in record for _, record in fitted.results.values())
