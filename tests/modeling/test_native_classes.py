"""A native class that is named for a folder of ours: loud, or our own class; never random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bare
import pytest
import torch
import transformers
from exporting import compress_to, export_to
from pico import inputs_for, save_model, save_pico
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.t5.modeling_t5 import T5Stack

from blr.compressor.modeling.modeling_blr import GUARD, guard

# pico model -> native classes that somebody may name for it
NAMED = {
    "llama": ("LlamaForCausalLM", "LlamaModel", "LlamaForSequenceClassification"),
    "bert-mlm": ("BertModel", "BertForMaskedLM"),
    "t5": ("T5EncoderModel", "T5ForConditionalGeneration"),
    "vit": ("ViTForImageClassification",),
    "gpt2": ("GPT2LMHeadModel", "GPT2Model"),
}
# Names native classes where nothing of ours runs; prints what each says
WITHOUT_BLR = (
    bare.without("blr")
    + """
import json
import transformers
said = {}
for name, folder in json.loads(sys.argv[1]).items():
    try:
        getattr(transformers, name).from_pretrained(folder, attn_implementation="eager")
    except Exception as error:
        said[name] = str(error)
print(json.dumps(said))
"""
)
# A native class that is given our configuration, with the code in the folder
REMOTE = (
    bare.without("blr")
    + """
import torch, transformers
folder, ids, result = sys.argv[1:]
config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
model = transformers.T5EncoderModel.from_pretrained(folder, config=config).eval()
assert type(model).__name__ == "BlrT5EncoderModel"
with torch.no_grad():
    torch.save(model(input_ids=torch.load(ids)).last_hidden_state, result)
"""
)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Outputs at full rank, by pico model, and their sources."""
    folder = tmp_path_factory.mktemp("named")
    sources = {name: save_pico(name, folder / f"{name}-dense") for name in NAMED}
    made = {n: compress_to(s, folder / n, method="svd", rank=64) for n, s in sources.items()}
    return {**made, **{f"{name}-dense": source for name, source in sources.items()}}


def old(folder: Path, copy: Path) -> Path:
    """The output as versions of blr before this entry wrote it."""
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_bytes())
    del config[GUARD]
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def test_without_our_code_it_is_refused(outputs: dict[str, Path]) -> None:
    named = {cls: str(outputs[name]) for name, classes in NAMED.items() for cls in classes}
    done = bare.run(WITHOUT_BLR, json.dumps(named))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said.keys() == named.keys()
    assert all("structured" in text and "trust_remote_code=True" in text for text in said.values())


@pytest.mark.parametrize(("name", "cls"), [(name, cls) for name in NAMED for cls in NAMED[name]])
def test_where_blr_is_imported_it_is_refused(
    name: str, cls: str, outputs: dict[str, Path], tmp_path: Path
) -> None:
    """Also a folder that an earlier version wrote."""
    native = getattr(transformers, cls)
    with pytest.raises(AttributeError, match="layers of this folder are structured"):
        native.from_pretrained(outputs[name])
    with pytest.raises(ValueError, match=f"{cls} has no place for the structured layers of") as raised:
        native.from_pretrained(old(outputs[name], tmp_path / "old"))
    assert "\n" not in str(raised.value)


def hidden(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=ids).last_hidden_state


@pytest.mark.parametrize("door", ["installed", "remote"])
def test_a_native_class_that_is_given_our_configuration_is_ours(
    door: str, outputs: dict[str, Path], tmp_path: Path
) -> None:
    """As sentence-transformers loads the encoder of a T5."""
    dense = transformers.T5EncoderModel.from_pretrained(outputs["t5-dense"])
    ids = inputs_for(dense)["input_ids"]
    if door == "installed":
        config = transformers.AutoConfig.from_pretrained(outputs["t5"])
        model = transformers.T5EncoderModel.from_pretrained(outputs["t5"], config=config)
        found = hidden(model, ids)
    else:
        torch.save(ids, tmp_path / "ids.pt")
        done = bare.run(REMOTE, outputs["t5"], tmp_path / "ids.pt", tmp_path / "found.pt")
        assert done.returncode == 0, done.stderr
        found = torch.load(tmp_path / "found.pt")
    torch.testing.assert_close(found, hidden(dense, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "cls", "task"),
    [
        ("llama", "LlamaModel", "AutoModel"),
        ("bert-mlm", "BertModel", "AutoModel"),
        ("gpt2", "GPT2LMHeadModel", "AutoModelForCausalLM"),
    ],
)
def test_other_native_classes_as_well(name: str, cls: str, task: str, outputs: dict[str, Path]) -> None:
    config = transformers.AutoConfig.from_pretrained(outputs[name])
    model = getattr(transformers, cls).from_pretrained(outputs[name], config=config).eval()
    expected = getattr(transformers, task).from_pretrained(outputs[f"{name}-dense"]).eval()
    with torch.no_grad():
        found, wanted = (m(**inputs_for(expected))[0] for m in (model, expected))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert type(model).__name__ == f"Blr{cls}"


def test_a_class_without_a_structured_variant_says_so(outputs: dict[str, Path]) -> None:
    config = transformers.AutoConfig.from_pretrained(outputs["t5"])
    with pytest.raises(ValueError, match="T5Stack has no structured variant"):
        T5Stack.from_pretrained(outputs["t5"], config=config)


def test_native_models_are_as_before(outputs: dict[str, Path]) -> None:
    dense = outputs["llama-dense"]
    model, info = transformers.LlamaForCausalLM.from_pretrained(dense, output_loading_info=True)
    assert type(model) is transformers.LlamaForCausalLM and not info["missing_keys"]
    config = transformers.AutoConfig.from_pretrained(dense)
    assert type(transformers.LlamaModel.from_pretrained(dense, config=config)) is transformers.LlamaModel


def test_a_head_of_another_task_over_a_decoder_is_new_and_the_rest_is_loaded(
    outputs: dict[str, Path],
) -> None:
    """As of a native decoder."""
    auto = transformers.AutoModelForSequenceClassification
    (found, info), (_, native) = (
        auto.from_pretrained(outputs[n], output_loading_info=True) for n in ("llama", "llama-dense")
    )
    assert set(info["missing_keys"]) == set(native["missing_keys"]) == {"score.weight"}
    base = transformers.AutoModel.from_pretrained(outputs["llama"])
    ids = inputs_for(base)["input_ids"]
    torch.testing.assert_close(hidden(found.model, ids), hidden(base, ids))


def test_the_entry_travels_with_our_folders_and_no_others(
    outputs: dict[str, Path], tmp_path: Path
) -> None:
    saved = transformers.AutoModelForCausalLM.from_pretrained(old(outputs["llama"], tmp_path / "old"))
    saved.save_pretrained(tmp_path / "saved")
    export_to(outputs["llama"], tmp_path / "exported")
    export_to(outputs["llama"], tmp_path / "dense", kind="dense")
    configs = {n: json.loads((tmp_path / n / "config.json").read_bytes()) for n in ("saved", "exported")}
    assert all(config[GUARD] == guard("llama") for config in configs.values())
    assert GUARD not in json.loads((tmp_path / "dense" / "config.json").read_bytes())
    assert transformers.LlamaForCausalLM.from_pretrained(tmp_path / "dense").config.model_type == "llama"


TYPES = (
    "llama",
    "bert",
    "t5",
    "vit",
    "llava",
    "whisper",
    "clip",
    "mamba",
    "dbrx",
    "mpt",
    "esm",
    "qwen3_moe",
)


@pytest.mark.parametrize("kind", TYPES)
def test_native_configurations_meet_the_entry(kind: str, tmp_path: Path) -> None:
    """Of families of every kind; one of no type, as AutoTokenizer takes, passes it by."""
    config = {"model_type": f"blr_{kind}", "blr": {"layers": {}}, GUARD: guard(kind)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(AttributeError, match="layers of this folder are structured"):
        CONFIG_MAPPING[kind].from_pretrained(tmp_path)
    assert transformers.PreTrainedConfig.from_pretrained(tmp_path).blr == {"layers": {}}


def test_several_types_of_one_class(tmp_path: Path) -> None:
    """mT5 and T5 share code: each configuration meets its own entry."""
    settings = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    save_model("MT5Config", settings, "MT5EncoderModel", tmp_path / "mt5")
    output = compress_to(tmp_path / "mt5", tmp_path / "out", method="svd", rank=64)
    with pytest.raises(AttributeError, match="layers of this folder are structured"):
        transformers.MT5EncoderModel.from_pretrained(output)
    model = transformers.AutoModelForTextEncoding.from_pretrained(output)
    assert type(model).__name__ == "BlrMT5EncoderModel"
