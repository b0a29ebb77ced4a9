"""What transformers loads is read as it does, and what it would not load is told from headers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from odd import ODDITIES, class_of, save_odd
from pico import MODELS, save_pico
from safetensors.torch import load_file, save_file

from blr.compressor.base.errors import InputError
from blr.compressor.base.progress import Progress
from blr.compressor.checkpoint.source import Source, open_source
from blr.compressor.loading.checked import is_usual, open_checked
from blr.compressor.loading.loader import streamed_model, whole_model
from blr.compressor.loading.native import meta_model
from blr.compressor.loading.smoke_run import first_trial
from blr.compressor.workspace.scan import scan_source

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("name", ODDITIES)
def test_what_transformers_loads_is_read_as_it_does(name: str, tmp_path: Path) -> None:
    folder = save_odd(name, tmp_path)
    native = getattr(transformers, class_of(name)).from_pretrained(folder, dtype=torch.float32).eval()
    trial, source = first_trial(native, folder), open_checked(folder)
    assert trial.distance(streamed_model(source), folder) < 1e-5
    assert trial.distance(whole_model(source), folder) < 1e-5
    told, notes = ODDITIES[name].told, source.notes()
    assert told in " ".join(notes) and bool(notes) == bool(told)
    _assert_whole(source)


def _assert_whole(source: Source) -> None:
    """Every tensor that is read has its place, none is read twice, and each of the file is somewhere."""
    stored = load_file(source.shards[0])
    assert len(source.stored) == len(stored) == len({entry.start for entry in source.stored})
    assert [entry.start for entry in source.stored] == sorted(entry.start for entry in source.stored)
    assert source.config["architectures"] == [type(meta_model(source)).__name__]
    floats = {name for name, entry in source.entries.items() if entry.is_float}
    assert scan_source(source, "", Progress(silent=True), floats).norms.keys() == floats


@pytest.mark.parametrize("name", ["own-llama", "own-gpt2", "own-bert"])
def test_a_head_of_its_own_is_tied_no_longer(name: str, tmp_path: Path) -> None:
    """So that all that comes after knows, and what reads the output alone as well."""
    source = open_checked(save_odd(name, tmp_path))
    assert source.config["tie_word_embeddings"] is False
    assert not meta_model(source).all_tied_weights_keys
    assert source.entries.keys() == meta_model(source).state_dict().keys()


@pytest.mark.parametrize("name", ["own-t5"])
def test_an_encoder_decoder_keeps_what_scales_its_outputs(name: str, tmp_path: Path) -> None:
    source = open_checked(save_odd(name, tmp_path))
    assert source.config.get("tie_word_embeddings") is open_source(tmp_path).config.get(
        "tie_word_embeddings"
    )


# --- What is no checkpoint ------------------------------------------------------------------------

NORM = "model.layers.1.input_layernorm.weight"
REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "no norm": ("llama", {NORM: None}, {}, f"missing keys ['{NORM}']"),
    "no head": ("llama", {"lm_head.weight": None}, {}, "missing keys ['lm_head.weight']"),
    "no table": ("llama-tied", {"model.embed_tokens.weight": None}, {}, "missing keys"),
    "other class": ("bert", {}, {"architectures": ["BertForMaskedLM"]}, "missing keys ['cls.predict"),
    "other width": ("gpt2", {"transformer.ln_f.weight": torch.ones(8), "x": torch.ones(1)}, {}, "ln_f"),
    "fewer blocks": ("llama", {}, {"num_hidden_layers": 1}, "2 modules"),
    "fewer blocks of no table": ("electra", {}, {"num_hidden_layers": 1}, "1 modules electra.encoder"),
    "no class": ("llama", {NORM: None}, {"architectures": None}, "no architectures, and no class of"),
    "class of no library": ("llama", {}, {"architectures": ["Evil"]}, "architecture 'Evil'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_does_not_load_is_told_from_headers(case: str, tmp_path: Path) -> None:
    name, tensors, config, message = REFUSED[case]
    save_pico(name, tmp_path)
    stored = {**load_file(tmp_path / "model.safetensors"), **tensors}
    kept = {key: value for key, value in stored.items() if value is not None}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    with pytest.raises(InputError) as found:
        open_checked(tmp_path)
    assert message in str(found.value)


# --- What is usual --------------------------------------------------------------------------------

USUAL = [name for name in MODELS if name not in ("bert-mlm", "roberta")]


@pytest.mark.parametrize("name", USUAL)
def test_what_a_class_saves_is_known_without_it(name: str, tmp_path: Path) -> None:
    source = open_source(save_pico(name, tmp_path))
    assert is_usual(source)
    for gone in source.entries:
        assert not is_usual(_of(source, source.entries.keys() - {gone}))
    assert not is_usual(_of(source, source.entries.keys() | {"x.weight"}))
    source.config["architectures"] = ["T5Model"]
    assert not is_usual(source)


def _of(source: Source, names: Any) -> Source:
    some = next(iter(source.entries.values()))
    entries = {name: source.entries.get(name, some) for name in names}
    return Source(source.folder, source.config, entries, source.shards)


@pytest.mark.parametrize("number", ["999999999999", "7", "00"])
def test_odd_numbers_are_not_usual(number: str, tmp_path: Path) -> None:
    source = open_source(save_pico("llama", tmp_path))
    names = {name.replace("layers.1.", f"layers.{number}.") for name in source.entries}
    assert not is_usual(_of(source, names))
