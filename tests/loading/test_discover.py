"""Which layers of a checkpoint are compressible: those of its blocks, whatever class it is of."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from pico import MODELS, MORE, save_model
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from blr.compressor.base.errors import CapabilityError
from blr.compressor.checkpoint.extras import inert
from blr.compressor.checkpoint.source import open_source
from blr.compressor.loading.native import decoded, discover_family, linear_layers, native_class
from blr.compressor.planning.layers import find_layers
from blr.compressor.recipe.architectures import find_family
from blr.compressor.recipe.schema import make_recipe

pytestmark = pytest.mark.fast

SMALL = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"vocab_size": 128, "max_position_embeddings": 64, "embedding_size": 16},
}
BART = {
    **{"vocab_size": 128, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    **{"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64},
}
CLIP = {**SMALL, "image_size": 32, "patch_size": 16}
SETTINGS = {config: settings for config, settings, _ in (*MODELS.values(), *MORE.values())}
SETTINGS |= dict.fromkeys(("AlbertConfig", "ElectraConfig", "MPNetConfig", "DebertaV2Config"), SMALL)
SETTINGS |= {"BartConfig": BART, "CLIPConfig": {"text_config": CLIP, "vision_config": CLIP}}
SETTINGS |= {"Dinov2Config": CLIP, "SwinConfig": {"embed_dim": 16, "image_size": 32, "depths": [1, 1]}}
SETTINGS |= {"OpenAIGPTConfig": {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 128}}
BERT_MLM = {"cls.predictions.transform.dense", "cls.predictions.decoder"}
ROBERTA = {"classifier.dense", "classifier.out_proj"}
# Configuration, class -> the layers that it has outside of its blocks, by name on disk
HEADS: dict[tuple[str, str], set[str]] = {
    ("LlamaConfig", "LlamaForSequenceClassification"): {"score"},
    ("LlamaConfig", "LlamaForQuestionAnswering"): {"qa_outputs"},
    ("LlamaConfig", "LlamaForTokenClassification"): {"score"},
    ("MistralConfig", "MistralForCausalLM"): {"lm_head"},
    ("GPT2Config", "GPT2ForSequenceClassification"): {"score"},
    ("GPT2Config", "GPT2DoubleHeadsModel"): {"multiple_choice_head.summary"},
    ("OpenAIGPTConfig", "OpenAIGPTForSequenceClassification"): {"score"},
    ("OPTConfig", "OPTForSequenceClassification"): {"score"},
    ("OPTConfig", "OPTForQuestionAnswering"): {"qa_outputs"},
    ("Phi3Config", "Phi3ForCausalLM"): {"lm_head"},
    ("Gemma2Config", "Gemma2ForSequenceClassification"): {"score"},
    ("Gemma3TextConfig", "Gemma3TextForSequenceClassification"): {"score"},
    ("BertConfig", "BertModel"): {"pooler.dense"},
    ("BertConfig", "BertForPreTraining"): {
        *BERT_MLM - {"cls.predictions.decoder"},
        *("bert.pooler.dense", "cls.seq_relationship"),
    },
    ("BertConfig", "BertForNextSentencePrediction"): {"bert.pooler.dense", "cls.seq_relationship"},
    ("BertConfig", "BertForMultipleChoice"): {"bert.pooler.dense", "classifier"},
    ("BertConfig", "BertForQuestionAnswering"): {"qa_outputs"},
    ("RobertaConfig", "RobertaForSequenceClassification"): ROBERTA,
    ("XLMRobertaConfig", "XLMRobertaModel"): {"pooler.dense"},
    ("XLMRobertaConfig", "XLMRobertaForMaskedLM"): {"lm_head.dense"},
    ("XLMRobertaConfig", "XLMRobertaForSequenceClassification"): ROBERTA,
    ("XLMRobertaConfig", "XLMRobertaForTokenClassification"): {"classifier"},
    ("DistilBertConfig", "DistilBertForSequenceClassification"): {"pre_classifier", "classifier"},
    ("DistilBertConfig", "DistilBertForMaskedLM"): {"vocab_transform"},
    ("DistilBertConfig", "DistilBertForQuestionAnswering"): {"qa_outputs"},
    ("AlbertConfig", "AlbertForSequenceClassification"): {
        *("albert.encoder.embedding_hidden_mapping_in", "albert.pooler", "classifier"),
    },
    ("ElectraConfig", "ElectraForPreTraining"): {
        "electra.embeddings_project",
        *("discriminator_predictions.dense", "discriminator_predictions.dense_prediction"),
    },
    ("MPNetConfig", "MPNetForMultipleChoice"): {"mpnet.pooler.dense", "classifier"},
    ("DebertaV2Config", "DebertaV2ForSequenceClassification"): {
        *("deberta.embeddings.embed_proj", "pooler.dense", "classifier"),
    },
    ("T5Config", "T5ForConditionalGeneration"): set(),  # its head is the embedding
    ("T5Config", "T5ForSequenceClassification"): {
        "classification_head.dense",
        "classification_head.out_proj",
    },
    ("T5Config", "T5ForTokenClassification"): {"classifier"},
    ("BartConfig", "BartForSequenceClassification"): {
        "classification_head.dense",
        "classification_head.out_proj",
    },
    ("ViTConfig", "ViTModel"): {"pooler.dense"},
    ("ViTConfig", "ViTForImageClassification"): {"classifier"},
    ("Dinov2Config", "Dinov2ForImageClassification"): {"classifier"},
    ("SwinConfig", "SwinForImageClassification"): {"classifier"},
    ("CLIPConfig", "CLIPModel"): {"text_projection", "visual_projection"},
    ("CLIPConfig", "CLIPForImageClassification"): {"classifier"},
}
LOOKED_UP = ("embeddings", "embedding", "_embed", "embed_tokens", "embed_positions", "wte", "wpe")
LOOKED_UP += ("shared", "relative_attention_bias")


def matrices(names: Any) -> set[str]:
    """Modules of the 2-D weights that are multiplied with, of tensor name to shape."""
    weights = [name for name, shape in names if name.endswith(".weight") and len(shape) == 2]
    modules = {name.removesuffix(".weight") for name in weights}
    return {name for name in modules if not name.endswith(LOOKED_UP)}


@pytest.mark.parametrize(("config", "name"), HEADS)
def test_all_but_the_heads_is_compressible(config: str, name: str, tmp_path: Path) -> None:
    """By the tables of configs/ and by what is found in a model that has none."""
    save_model(config, SETTINGS[config], name, tmp_path)
    source = open_source(tmp_path)
    every = matrices((entry.name, entry.shape) for entry in source.entries.values())
    found = {layer.module for layer in find_layers(source, make_recipe(), [])}
    assert every - found == HEADS[config, name]
    if find_family(source.model_type) is not None:
        discovered = discover_family(source)
        assert set(discovered.modules) == found


def test_a_discovered_head_is_compressed_where_it_is_asked_for(tmp_path: Path) -> None:
    config, name = "BartConfig", "BartForSequenceClassification"
    save_model(config, {**BART, "tie_word_embeddings": False}, name, tmp_path)
    recipe = make_recipe(include=["classification_head.*"])
    layers = find_layers(open_source(tmp_path), recipe, [])
    assert HEADS[config, name] < {layer.module for layer in layers}


def test_heads_that_a_decoder_borrows_stay_dense() -> None:
    """Detection models hand the heads of every level to their decoder."""
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 64}
    backbone = transformers.ResNetConfig(depths=[1], hidden_sizes=[8], embedding_size=8)
    config = transformers.DeformableDetrConfig(
        **sizes, backbone_config=backbone, with_box_refine=True, two_stage=True, decoder_ffn_dim=64
    )
    with torch.device("meta"):
        inner, outer = linear_layers(transformers.DeformableDetrForObjectDetection(config))
    assert {name.split(".")[2] for name in inner} == {"layers"}
    assert any("bbox_embed" in name for name in outer) and any("class_embed" in name for name in outer)


def test_a_linear_layer_that_computes_something_else_is_none_of_them() -> None:
    """Llama 4's router is an `nn.Linear` that gives two tensors; Falcon's own class multiplies."""

    class Router(torch.nn.Linear):
        def forward(self, x: Any) -> Any:
            scores = super().forward(x)
            return scores.sigmoid(), scores

    class Own(torch.nn.Linear):
        def forward(self, x: Any) -> Any:
            return x @ self.weight.T

    with torch.device("meta"):
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SETTINGS["LlamaConfig"]))
        model.model.layers[0].mlp.router = Router(8, 4)
        model.model.layers[1].mlp.own = Own(8, 4, bias=False)
    inner, outer = linear_layers(model)
    assert "model.layers.0.mlp.gate_proj" in inner and "lm_head" in outer
    assert "model.layers.1.mlp.own" in inner
    assert not [name for name in (*inner, *outer) if name.endswith("router")]


def test_numbers_that_json_has_no_word_for() -> None:
    """Bamba's and Granite's time steps have no upper bound; what merely looks like one stays text."""
    stored = {"limit": [0.0, {"__float__": "Infinity"}], "size": 3}
    assert inert(stored) == stored
    assert decoded(stored)["limit"] == [0.0, float("inf")]
    assert decoded({"a": {"__float__": "os.system"}}) == {"a": {"__float__": "os.system"}}


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "ExaoneForCausalLM"])
def test_a_type_that_borrows_its_classes_is_refused(architecture: str, tmp_path: Path) -> None:
    """EXAONE 3 has Llama's, and outputs of it would load where blr is installed and nowhere else."""
    if "exaone" not in CONFIG_MAPPING:
        pytest.skip("this transformers does not have the type")
    config = {"model_type": "exaone", "architectures": [architecture]}
    source = SimpleNamespace(folder=tmp_path, config=config, model_type="exaone")
    with pytest.raises(CapabilityError, match="makes 'exaone' of another family's classes"):
        native_class(source)  # type: ignore[arg-type]
