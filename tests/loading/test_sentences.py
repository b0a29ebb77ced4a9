"""How a folder of sentence-transformers pools: its own modes, length, case and dense layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from blr.compressor.base.errors import InputError
from blr.compressor.loading.sentences import Sentences, read_sentences

# Two sentences of 2 and 3 tokens, padded on the left and on the right: states of one number.
HIDDEN = torch.tensor([[[9.0], [1.0], [4.0]], [[2.0], [6.0], [1.0]]])
MASK = torch.tensor([[0, 1, 1], [1, 1, 1]])
# mode -> embeddings of the two.
POOLED = {
    "cls": [1.0, 2.0],
    "max": [4.0, 6.0],
    "mean": [2.5, 3.0],
    "mean_sqrt_len_tokens": [5 / 2**0.5, 9 / 3**0.5],
    "weightedmean": [(1 + 8) / 3, (2 + 12 + 3) / 6],
    "lasttoken": [4.0, 1.0],
}


def folder_of(folder: Path, modules: list[str], pooling: dict[str, Any] | None = None) -> Path:
    """A folder with the modules' files; the pooling's settings as given."""
    rows = [{"path": f"{n}_{kind}" if n else "", "type": f"x.{kind}"} for n, kind in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(rows))
    for row in rows[1:]:
        (folder / row["path"]).mkdir()
        (folder / row["path"] / "config.json").write_text(json.dumps(pooling or {}))
    return folder


@pytest.mark.parametrize("mode", POOLED)
def test_modes(mode: str) -> None:
    found = Sentences((mode,)).embed(HIDDEN, MASK)[:, 0]
    torch.testing.assert_close(found, torch.tensor(POOLED[mode]))


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_side_of_the_padding_is_found(side: str) -> None:
    hidden, mask = torch.tensor([[[1.0], [4.0], [9.0]]]), torch.tensor([[1, 1, 0]])
    if side == "left":
        hidden, mask = hidden.roll(1, 1), mask.roll(1, 1)
    for mode, expected in POOLED.items():
        found = Sentences((mode,)).embed(hidden, mask)
        torch.testing.assert_close(found, torch.tensor([[expected[0]]]))


@pytest.mark.parametrize(
    ("pooling", "modes"),
    [
        ({"pooling_mode": "cls"}, ("cls",)),
        ({"pooling_mode": ["mean", "max"]}, ("mean", "max")),
        ({"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}, ("lasttoken",)),
        ({}, ("mean",)),
    ],
)
def test_what_the_files_say(pooling: dict[str, Any], modes: tuple[str, ...], tmp_path: Path) -> None:
    folder = folder_of(tmp_path, ["Transformer", "Pooling", "Normalize"], pooling)
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 7, "do_lower_case": true}')
    assert read_sentences(folder) == Sentences(modes, 7, True)


def test_dense_layers_follow(tmp_path: Path) -> None:
    settings = {"activation_function": "torch.nn.modules.activation.ReLU"}
    folder = folder_of(tmp_path, ["Transformer", "Pooling", "Dense"], settings)
    layer = {"linear.weight": torch.tensor([[2.0], [-1.0]]), "linear.bias": torch.tensor([1.0, 0.0])}
    save_file(layer, folder / "2_Dense" / "model.safetensors")
    found: Tensor = read_sentences(folder).embed(HIDDEN, MASK)
    torch.testing.assert_close(found, torch.tensor([[6.0, 0.0], [7.0, 0.0]]))
    assert read_sentences(tmp_path / "2_Dense") == Sentences()


@pytest.mark.parametrize(
    ("modules", "settings", "found"),
    [
        (["Transformer", "LSTM"], {}, "a module 'LSTM'"),
        (["Transformer", "Pooling"], {"pooling_mode": "median"}, "pooling 'median'"),
        (["Transformer", "Dense"], {"activation_function": "os.system"}, "activation 'os.system'"),
    ],
)
def test_what_is_not_known_is_refused(
    modules: list[str], settings: dict[str, Any], found: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=f"{found}; expected .*sentence-transformers itself"):
        read_sentences(folder_of(tmp_path, modules, settings))


SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"prompts": {"query": "q: ", "document": ""}, "default_prompt_name": None}, {}),
    ({"prompts": {"query": "q: "}, "default_prompt_name": "query"}, {"prompt": "q: "}),
    (
        {"prompts": {"s": "S "}, "default_prompt_name": "s", "truncate_dim": 3},
        {"prompt": "S ", "dimensions": 3},
    ),
    ({"default_prompt_name": "document", "truncate_dim": None}, {}),
]


@pytest.mark.parametrize(("settings", "expected"), SETTINGS)
def test_prompts_and_dimensions(
    settings: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    found = read_sentences(tmp_path)
    assert found == Sentences(**expected)
    assert found.texts(["A b"]) == [f"{expected.get('prompt', '')}A b"]


def test_a_prompt_that_is_not_there(tmp_path: Path) -> None:
    settings = {"prompts": {"s": "S "}, "default_prompt_name": "t"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match="a default prompt 't'; expected one of document, query, s"):
        read_sentences(tmp_path)


@pytest.mark.parametrize("mode", POOLED)
def test_tokens_of_a_prompt_are_left_out(mode: str) -> None:
    """Behind the padding on the left of the first row; two real tokens stay of the second."""
    head = Sentences((mode,), dimensions=1)
    found = head.embed(HIDDEN, MASK, unpooled=1)
    mask = torch.tensor([[0, 0, 1], [0, 1, 1]])
    torch.testing.assert_close(found, head.embed(HIDDEN, mask))
