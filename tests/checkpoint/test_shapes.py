"""Shapes against config: the mini language and its defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from blr.compressor.base.errors import InputError
from blr.compressor.checkpoint.header import TensorEntry
from blr.compressor.checkpoint.shapes import check_against_config, evaluate
from blr.compressor.checkpoint.source import Source

pytestmark = pytest.mark.fast

GPT2 = {
    "*wte.weight": ["vocab_size", "n_embd"],
    "*h.*.attn.c_attn.weight": ["n_embd", "3*n_embd"],
    "*h.*.mlp.c_fc.weight": ["n_embd", "n_inner"],
    "*h.#": ["n_layer"],
}


def source(config: dict[str, Any], **shapes: tuple[int, ...]) -> Source:
    """A source of headers only; '__' in a keyword stands for '.'."""
    file = Path("folder") / "model.safetensors"
    entries = {}
    for keyword, shape in shapes.items():
        name = keyword.replace("__", ".")
        entries[name] = TensorEntry(name, "F32", shape, file, 0, 0)
    return Source(Path("folder"), {"model_type": "gpt2", **config}, entries, (file,))


@pytest.mark.parametrize(
    ("symbol", "config", "value"),
    [
        (7, {}, 7),
        ("_", {}, None),
        ("a", {"a": 5}, 5),
        ("3 * a", {"a": 5}, 15),
        ("a*b + 2*b*c", {"a": 2, "b": 3, "c": 5}, 36),
        ("unknown*3", {}, None),
        ("head_dim", {"hidden_size": 64, "num_attention_heads": 4}, 16),
        ("head_dim", {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32}, 32),
        ("head_dim", {"hidden_size": 64, "num_attention_heads": 4, "head_dim": None}, 16),
        ("num_key_value_heads", {"num_attention_heads": 4}, 4),
        ("n_inner", {"n_embd": 4, "n_inner": None}, 16),
    ],
)
def test_evaluate(symbol: str | int, config: dict[str, Any], value: int | None) -> None:
    assert evaluate(source(config), symbol) == value


@pytest.mark.parametrize("symbol", ["", "a-b", "a*", "__import__('os')", "2**9", "a.b", "(a)"])
def test_symbols_are_products_only(symbol: str) -> None:
    with pytest.raises(ValueError, match="neither"):
        evaluate(source({"a": 2}), symbol)


@pytest.mark.parametrize("value", ["8", -1, 0, 1.5, True, [8], 2**40])
def test_bad_config_values(value: Any) -> None:
    with pytest.raises(InputError, match=r"config\.json: found a "):
        evaluate(source({"a": value}), "a")


def test_gpt2_good_with_and_without_prefix() -> None:
    config = {"vocab_size": 9, "n_embd": 4, "n_layer": 2, "n_inner": None}
    for prefix in ("", "transformer__"):
        shapes: dict[str, tuple[int, ...]] = {f"{prefix}wte__weight": (9, 4)}
        for layer in (0, 1):
            shapes[f"{prefix}h__{layer}__attn__c_attn__weight"] = (4, 12)
            shapes[f"{prefix}h__{layer}__mlp__c_fc__weight"] = (4, 16)
        check_against_config(source(config, **shapes), GPT2)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"wte__weight": (9, 5)}, r"'wte.weight' of shape \[9, 5\]; expected \[9, 4\] = \[vocab"),
        ({"h__0__attn__c_attn__weight": (12, 4)}, r"expected \[4, 12\]"),
        ({"h__1__ln__weight": (4,)}, "1 modules .* numbered to 1; expected n_layer = 1"),
        ({"wte__weight": (9, 4, 1)}, r"\[9, 4, 1\]"),
    ],
)
def test_gpt2_bad(shapes: dict[str, tuple[int, ...]], message: str) -> None:
    config = {"vocab_size": 9, "n_embd": 4, "n_layer": 1}
    with pytest.raises(InputError, match=message):
        check_against_config(source(config, **shapes), GPT2)


def test_nothing_known_checks_nothing() -> None:
    check_against_config(source({}, wte__weight=(9, 5)), None)
    check_against_config(source({}, wte__weight=(9, 5)), GPT2)
