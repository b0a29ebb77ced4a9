"""Settings of generation of another type are one line before any work, dense folders as well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from limited import Limited, refused
from pico import save_pico
from spoiling import spoil, words_tokenizer
from transformers import GenerationConfig

from blr.compressor.base.errors import InputError
from blr.compressor.loading.sidecar_files import Defaults, TokenIds, check_defaults

IDS = tuple(TokenIds.model_fields)
NO_IDS = ("abc", 2.5, True, ["a"], [1, [2]], [None], {"a": 1}, 10**30, -(10**10), float("inf"))
NO_NUMBERS: tuple[Any, ...] = ("abc", True, [1], {"a": 1}, float("inf"), float("nan"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "generation_config.json").write_text("{}")
    return tmp_path


@pytest.mark.fast
@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize("value", NO_IDS, ids=str)
def test_tokens_that_are_none(name: str, value: object, folder: Path) -> None:
    for file in ("generation_config.json", "config.json"):
        kept = (folder / file).read_text()
        spoil(folder, file, **{name: value})
        with pytest.raises(InputError, match=rf"{file}: found .* for .*{name}.*; expected") as error:
            check_defaults(folder)
        assert str(error.value).isprintable() and len(str(error.value)) < 500
        (folder / file).write_text(kept)
    spoil(folder, "config.json", text_config={name: value})
    with pytest.raises(InputError, match=rf"config\.json: found .* for .*{name}"):
        check_defaults(folder)


@pytest.mark.fast
@pytest.mark.parametrize("name", sorted(set(Defaults.model_fields) - set(IDS)))
def test_settings_that_are_none(name: str, folder: Path) -> None:
    texts, switch = ("stop_strings", "cache_implementation"), isinstance(_usual(name), bool)
    for value in (3, [3]) if name in texts else (3, "yes") if switch else NO_NUMBERS:
        spoil(folder, "generation_config.json", **{name: value})
        if ("tokens" in name and value == [1]) or (switch and value is True):
            continue
        with pytest.raises(InputError, match=rf"generation_config\.json: found .* for .*{name}"):
            check_defaults(folder)


def _usual(name: str) -> object:
    switches = ("do_sample", "use_cache", "renormalize_logits", "remove_invalid_values")
    return name in switches or name.startswith(("return_dict", "output_")) or None


GOOD: tuple[dict[str, Any], ...] = (
    {},
    {"eos_token_id": [1, 2], "pad_token_id": -1, "bos_token_id": None},
    {"top_k": 50, "top_p": 1, "temperature": 0.6, "do_sample": True, "max_length": None},
    {"a_key_of_tomorrow": {"a": [1, "x"]}, "transformers_version": "9.9"},
    {"temperature": {"__float__": "Infinity"}},
    {"suppress_tokens": [1], "bad_words_ids": [[1, 2]], "stop_strings": ["a"], "max_time": 1},
    GenerationConfig().to_dict(),
)


@pytest.mark.fast
@pytest.mark.parametrize("values", GOOD, ids=lambda values: str(values)[:40])
def test_what_some_model_means_passes(values: dict[str, Any], folder: Path) -> None:
    spoil(folder, "generation_config.json", **values)
    check_defaults(folder)


@pytest.mark.parametrize("command", ["generate", "compress", "export", "eval"])
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_every_command_says_so(command: str, file: str, limited: Limited, tmp_path: Path) -> None:
    model = save_pico("llama-tied", tmp_path / "model")
    words_tokenizer().save(str(model / "tokenizer.json"))
    (tmp_path / "t.txt").write_text("w1 w2 " * 40)
    (model / "generation_config.json").unlink(missing_ok=True)
    spoil(model, file, eos_token_id="abc")
    rest = {"generate": ("w1",), "eval": ("--text", "t.txt")}.get(command, ("-o", "out"))
    ended = limited.run(command, "model", *rest, cwd=tmp_path)
    refused(ended, 4, "eos_token_id")
    assert file in ended.err and "tokenizer" not in ended.err.partition(file)[0]
