"""Every kind of peft's adapters and initializations on structured layers: as on the dense model of the
same weights, or refused; never another model in silence."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import compress_to
from peft import LoraConfig, LoraGAConfig, PeftModel, PeftType, TaskType, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.lora.config import (
    BdLoraConfig,
    CordaConfig,
    KasaConfig,
    MontecloraConfig,
    VeloraConfig,
)
from pico import VOCAB, save_pico
from torch import Tensor
from transformers import AutoModelForCausalLM

from blr.compressor import register
from blr.compressor.integrations.peft import StructuredLora
from blr.compressor.modeling.layers import Replaced

register()

STRUCTURES: dict[str, dict[str, Any]] = {
    "svd": {"method": "svd", "cf": 1.5},
    "blast": {"method": "blast", "cf": 1.5, "blocks": 4, "rounds": 1},
    "monarch": {"method": "monarch", "cf": 1.5, "blocks": 4},
    "ks": {"method": "ks", "cf": 1.5},
    "int4": {"method": "dense", "quantize": "int4", "group": 32},
}
HOLD = {"svd", "blast"}  # structures that hold the difference of themselves and an adapter
IDS = torch.arange(2, 26).view(2, 12) % VOCAB
TARGETS = ["q_proj", "up_proj"]
# What peft knows as `init_lora_weights`, and whether it takes the adapter out of the layer
KEEPING = [True, False, "gaussian", "orthogonal", "eva", "mica"]
SUBTRACTING = ["pissa", "pissa_niter_4", "olora"]
PREPARED = {  # what needs more than a configuration, and changes the layer
    "corda": {"corda_config": CordaConfig()},
    "loftq": {"loftq_config": {"loftq_bits": 4, "loftq_iter": 1}},
    "lora_ga": {"lora_ga_config": LoraGAConfig()},
}
# What makes LoRA another, but for what routes between adapters that are there already
VARIANTS = {f.name for f in dataclasses.fields(LoraConfig) if f.metadata.get("is_lora_variant")}
VARIANTS -= {"arrow_config"}
GIVEN: dict[str, Any] = {  # to a variant that is asked for by more than True
    "velora_config": VeloraConfig(),
    "use_bdlora": BdLoraConfig(["q_proj"], ["up_proj"], nblocks=2),
    "kasa_config": KasaConfig(),
    "monteclora_config": MontecloraConfig(),
    "alora_invocation_tokens": [5],
}
OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {name: GIVEN.get(name, True)} for name in sorted(VARIANTS)},
    "alora_invocation_tokens": {"alora_invocation_tokens": [5], "task_type": TaskType.CAUSAL_LM},
    "use_rslora": {"use_rslora": True},
    "layers_to_transform": {"layers_to_transform": [1]},
    "rank_pattern": {"rank_pattern": {"up_proj": 4}},
    "layer_replication": {"layer_replication": [[0, 2], [1, 2]]},
    "trainable_tokens": {"trainable_token_indices": [3, 4]},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
}
PROMPTS = {"task_type": TaskType.CAUSAL_LM, "num_virtual_tokens": 3}
# What a kind of adapter is given where its defaults do not fit a pico model
KINDS: dict[str, dict[str, Any]] = {
    "ADALORA": {"total_step": 10},
    "ADAPTION_PROMPT": {"target_modules": "self_attn", "adapter_len": 2, "adapter_layers": 1},
    "C3A": {"block_size": 16},
    "IA3": {"feedforward_modules": ["up_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "MISS": {"r": 2},
    "ROAD": {"group_size": 16},
    "SHADOW": {"target_modules": None},
    "SHIRA": {"r": 2},
    "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"], "token_indices": [3, 4]},
    "VBLORA": {"vector_length": 16, "num_vectors": 8, "topk": 2},
    "WAVEFT": {"n_frequency": 8},
}
AS_DENSE = {  # the others refuse structured layers
    *("ADAPTION_PROMPT", "CARTRIDGE", "CPT", "LN_TUNING", "LORA", "MULTITASK_PROMPT_TUNING"),
    *("PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING", "SHADOW", "TRAINABLE_TOKENS"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("structures")
    source = save_pico("llama", folder / "dense")
    made = {name: compress_to(source, folder / name, **recipe) for name, recipe in STRUCTURES.items()}
    return {"dense": source, **made}


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def pair(folders: dict[str, Path], structure: str) -> tuple[Any, Any]:
    """A structured model, and the native one with the dense weights of the same layers."""
    ours, dense = (AutoModelForCausalLM.from_pretrained(folders[n]) for n in (structure, "dense"))
    weights = {n: m.composed() for n, m in ours.named_modules() if isinstance(m, Replaced)}
    with torch.no_grad():
        for name, weight in weights.items():
            dense.get_submodule(name).weight.copy_(weight)
    return ours.eval(), dense.eval()


def logits(model: Any) -> Tensor:
    task = getattr(model, "active_peft_config", None)
    more = {"task_ids": torch.zeros(len(IDS), dtype=torch.int64)}
    tasks = getattr(task, "peft_type", None) == PeftType.MULTITASK_PROMPT_TUNING
    with torch.no_grad():
        return model.eval()(IDS, **more if tasks else {}).logits


def trained(model: Any) -> dict[str, Tensor]:
    """What an adapter has, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def adapted(model: Any, config: Any) -> Any:
    torch.manual_seed(0)
    return get_peft_model(model, config)


def compare(ours: Any, dense: Any) -> None:
    """Both have the same adapter and compute the same with any values of it."""
    torch.testing.assert_close(logits(ours), logits(dense), atol=1e-4, rtol=1e-4)
    mine, theirs = trained(ours), trained(dense)
    assert {n: p.shape for n, p in mine.items()} == {n: p.shape for n, p in theirs.items()}
    assert mine
    torch.manual_seed(1)
    with torch.no_grad():
        for name, values in theirs.items():
            moved = values + 0.02 * torch.randn_like(values)
            values.copy_(moved), mine[name].copy_(moved)
    torch.testing.assert_close(logits(ours), logits(dense), atol=1e-4, rtol=1e-4)


def judged(ours: Any, dense: Any, config: Any) -> str:
    """ "as the dense model", or why not: "refused", or "no peft" where the dense model is, too."""
    before = logits(ours)
    try:
        expected = adapted(dense, dataclasses.replace(config))
    except Exception:
        return "no peft"
    try:
        found = adapted(ours, dataclasses.replace(config))
    except (ValueError, TypeError, NotImplementedError, KeyError, RuntimeError) as error:
        assert str(error)
        torch.testing.assert_close(logits(ours), before)  # and the model is as it was
        return "refused"
    compare(found, expected)
    return "as the dense model"


@pytest.mark.parametrize("way", KEEPING)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_initializations_that_keep_the_layer(structure: str, way: Any, folders: dict[str, Path]) -> None:
    config = LoraConfig(r=2, target_modules=TARGETS, init_lora_weights=way)
    assert judged(*pair(folders, structure), config) == "as the dense model"


@pytest.mark.parametrize("way", SUBTRACTING)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_what_an_initialization_takes_out_of_a_layer(
    structure: str, way: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """The model computes what it did; it is trained, saved and loaded as the dense one is."""
    ours, _ = pair(folders, structure)
    config = LoraConfig(r=2, lora_alpha=6, target_modules=TARGETS, init_lora_weights=way)
    before = logits(ours)
    if structure not in HOLD:
        with pytest.raises(ValueError, match="cannot change as it asks; take True or one of") as raised:
            adapted(ours, config)
        assert "\n" not in str(raised.value)
        torch.testing.assert_close(logits(ours), before)
        return
    model = adapted(ours, config)
    torch.testing.assert_close(logits(model), before, atol=1e-4, rtol=1e-4)
    lora = [m for m in model.modules() if isinstance(m, StructuredLora)]
    assert len(lora) == 4 and all(float(m.lora_B["default"].weight.detach().norm()) > 0.1 for m in lora)
    assert all(m.get_base_layer().spec.rank == m.get_base_layer().U.shape[-1] for m in lora)
    with torch.no_grad():
        for parameter in trained(model).values():
            parameter.mul_(1.5)
    expected = logits(model)
    assert not torch.allclose(expected, before, atol=1e-3)
    if way == "pissa_niter_4":
        return  # as with the dense model: what random numbers chose is not found again
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(pair(folders, structure)[0], tmp_path)
    torch.testing.assert_close(logits(again), expected, atol=1e-4, rtol=1e-4)
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("way", PREPARED)
@pytest.mark.parametrize("structure", ["svd", "int4"])
def test_initializations_that_change_the_layer_otherwise(
    structure: str, way: str, folders: dict[str, Path]
) -> None:
    ours, _ = pair(folders, structure)
    before = logits(ours)
    config = LoraConfig(r=2, target_modules=TARGETS, init_lora_weights=way, **PREPARED[way])
    with pytest.raises(ValueError, match=f"init_lora_weights='{way}' for a layer of"):
        adapted(ours, config)
    torch.testing.assert_close(logits(ours), before)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("structure", ["svd", "monarch", "int4"])
def test_options_of_lora(structure: str, option: str, folders: dict[str, Path]) -> None:
    config = LoraConfig(**{"r": 2, "target_modules": TARGETS, **OPTIONS[option]})
    found = judged(*pair(folders, structure), config)
    assert found == ("refused" if option == "kasa_config" else "as the dense model")


def config_of(kind: str) -> Any:
    """The configuration of a kind of adapter with as little as it needs."""
    cls = PEFT_TYPE_TO_CONFIG_MAPPING[kind]
    fields = {field.name for field in dataclasses.fields(cls)}
    given = {"target_modules": TARGETS, **PROMPTS, **KINDS.get(kind, {})}
    return cls(**{name: value for name, value in given.items() if name in fields})


@pytest.mark.parametrize("kind", sorted(k.value for k in PEFT_TYPE_TO_CONFIG_MAPPING if k != "XLORA"))
def test_kinds_of_adapters(kind: str, folders: dict[str, Path]) -> None:
    found = judged(*pair(folders, "svd"), config_of(kind))
    assert found == ("as the dense model" if kind in AS_DENSE else "refused")
