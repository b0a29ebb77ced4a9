"""Models of every kind run on a small input, a block in memory at a time, with the same results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pico import MODELS, MORE, save_model, save_pico
from tolerances import TOLERANCES

from blr.compressor.base.errors import InputError, NumericsError
from blr.compressor.checkpoint.source import open_source
from blr.compressor.loading.loader import blocks_of, streamed_model
from blr.compressor.loading.smoke_run import first_trial

pytestmark = pytest.mark.fast

SMALL = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"vocab_size": 128, "max_position_embeddings": 64, "num_labels": 2},
}
CLIP = {**SMALL, "image_size": 32, "patch_size": 16}
BART = {
    **{"vocab_size": 128, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64},
    **{"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 8, "max_source_positions": 40},
    **{"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2},
}
SOUND = {**SMALL, "conv_dim": [8, 8], "conv_stride": [40, 8], "conv_kernel": [40, 8]}
SOUND |= {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
SERIES = {"context_length": 32, "patch_length": 8, "d_model": 32, "num_hidden_layers": 1, "ffn_dim": 32}
FUNNEL = {"vocab_size": 128, "block_sizes": [1, 1], "d_model": 32, "n_head": 4, "d_head": 8}
KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "BertForMultipleChoice": ("BertConfig", SMALL, "16 tokens"),
    "BertForNextSentencePrediction": ("BertConfig", SMALL, "16 tokens"),
    "BartForSequenceClassification": ("BartConfig", BART, "16 tokens"),
    "CLIPModel": ("CLIPConfig", {"text_config": CLIP, "vision_config": CLIP}, "16 tokens and an image"),
    "Wav2Vec2ForCTC": ("Wav2Vec2Config", SOUND, "a sound"),
    # whose configuration names no token that ends a text
    "FunnelBaseModel": ("FunnelConfig", {**FUNNEL, "d_inner": 64}, "16 tokens"),
    "WhisperForConditionalGeneration": ("WhisperConfig", BART, "a spectrum"),
}


@pytest.mark.parametrize("name", KINDS)
def test_an_input_of_its_kind_is_found(name: str, tmp_path: Path) -> None:
    config, settings, what = KINDS[name]
    save_model(config, settings, name, tmp_path)
    trial = first_trial(streamed_model(open_source(tmp_path)), tmp_path)
    assert trial.what == what and bool(trial.expected.isfinite().all())


@pytest.mark.parametrize("name", [*MODELS, *MORE])
def test_block_by_block_is_the_model(name: str, tmp_path: Path) -> None:
    """As transformers loads it whole, with the weights of its blocks gone before and after."""
    save_pico(name, tmp_path)
    model = streamed_model(open_source(tmp_path))
    blocks = dict(blocks_of(model))
    loaded: list[int] = []
    for block in blocks.values():
        block.register_forward_hook(lambda *_: loaded.append(len(in_memory())))

    def in_memory() -> list[str]:
        return [n for n, b in blocks.items() if not all(p.is_meta for p in b.parameters())]

    trial = first_trial(model, tmp_path)
    whole = getattr(transformers, {**MODELS, **MORE}[name][2]).from_pretrained(tmp_path)
    assert trial.distance(whole.eval(), tmp_path) < TOLERANCES[torch.float32]
    assert len(blocks) >= 2 and in_memory() == [] and max(loaded) == 0
    assert trial.distance(model, tmp_path) == 0.0


def test_a_kind_of_model_whose_input_is_not_known_is_refused(tmp_path: Path) -> None:
    save_model("PatchTSTConfig", SERIES, "PatchTSTForPrediction", tmp_path)
    with pytest.raises(InputError, match=r"'past_values' is known.*--no-check"):
        first_trial(streamed_model(open_source(tmp_path)), tmp_path)


def test_results_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    save_pico("llama", tmp_path)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    trial = first_trial(model, tmp_path)
    model.lm_head.weight.data[3] = torch.nan
    with pytest.raises(NumericsError, match="found NaN"):
        trial.distance(model, "out")
    model.model.norm.weight.data[:] = torch.inf
    with pytest.raises(NumericsError, match="nothing finite"):
        first_trial(model, "model")
