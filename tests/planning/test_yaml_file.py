"""Recipe files: what they mean, where an error is, and that nothing but RecipeError comes out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from blr.compressor.base.errors import RecipeError
from blr.compressor.recipe.yaml_file import MAX_BYTES, read_recipe, validate

FAST = settings(
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class LowRank(Strict):
    kind: Literal["svd"]
    rank: int


class Blast(Strict):
    kind: Literal["blast"]
    blocks: int = 16


class Rule(Strict):
    match: str
    use: LowRank | Blast


class Example(Strict):
    name: str = "none"
    cf: float = 2.0
    tags: list[str] = []
    rules: list[Rule] = []
    extra: dict[str, int] = {}


GOOD = """# an example
name: "no"
cf: 3
tags: [a, 'b c', 012:30, 1.2.3]
rules:
  - match: '*.q_proj'
    use: {kind: svd, rank: 8}
  - match: "*"
    use:
      kind: blast
extra: {x: 1, y: -2}
"""


def written(folder: Path, content: str | bytes) -> Path:
    path = folder / "recipe.yaml"
    path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
    return path


def message(folder: Path, content: str | bytes) -> str:
    """What is wrong with a recipe: one short printable line that starts with the file."""
    path = written(folder, content)
    with pytest.raises(RecipeError) as error:
        validate(path, Example)
    text = str(error.value)
    assert text.startswith(f"{path}:") and text.isprintable() and len(text) < 600
    return text.removeprefix(str(path))


def test_good_recipe(tmp_path: Path) -> None:
    recipe = validate(written(tmp_path, GOOD), Example)
    assert recipe.name == "no" and recipe.cf == 3.0
    assert recipe.tags == ["a", "b c", "012:30", "1.2.3"]
    assert recipe.rules[0].use == LowRank(kind="svd", rank=8)
    assert recipe.rules[1].use == Blast(kind="blast")
    assert recipe.extra == {"x": 1, "y": -2}


def test_lines(tmp_path: Path) -> None:
    recipe = read_recipe(written(tmp_path, GOOD))
    assert recipe.line(("name",)) == 2
    assert recipe.line(("rules", 0, "use", "rank")) == 7
    assert recipe.line(("rules", 1, "use", "kind")) == 10
    assert recipe.line(("rules", 1, "use", "absent", 3)) == 9
    assert recipe.line(()) == 2


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("", None), ("~", None), ("null", None), ("true", True), ("False", False)],
        *[("yes", "yes"), ("on", "on"), ("nUll", "nUll"), ("'true'", "true"), ('"1"', "1")],
        *[("12", 12), ("-3", -3), ("+4", 4), ("010", 10), ("0x10", "0x10"), ("1_000", "1_000")],
        *[("1.5", 1.5), (".5", 0.5), ("2.", 2.0), ("1e3", 1000.0), ("-1.5E-2", -0.015)],
        *[(".inf", math.inf), ("-.INF", -math.inf), ("inf", "inf"), ("2001-01-01", "2001-01-01")],
        *[("=", "="), ("<<", "<<"), ("a b", "a b"), ("|\n  x\n  y\n", "x\ny\n"), ("[]", []), ("{}", {})],
    ],
)
def test_scalars_follow_the_core_schema(text: str, value: Any, tmp_path: Path) -> None:
    found = read_recipe(written(tmp_path, f"a: {text}\n")).data["a"]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("content", "start"),
    [
        (
            "nam: x",
            ":1: key 'nam': found an unknown key, expected one of cf, extra, name, rules, tags; did",
        ),
        ("cf: x", ":1: key 'cf': found 'x', expected it to be a valid number"),
        ("\n\ncf: '3'", ":3: key 'cf': found '3'"),
        ("tags:\n- a\n- [b]\n", ":3: key 'tags.1': found ['b'], expected it to be a valid string"),
        ("rules:\n- match: x\n", ":2: key 'rules.0': found no 'use', expected it"),
        (
            "rules:\n- match: x\n  use:\n    kind: svd\n    rnk: 3\n",
            ":5: key 'rules.0.use.rnk': found an unknown key",
        ),
        ("rules:\n- match: x\n  use: {kind: svd, rank: x}\n", ":3: key 'rules.0.use.rank': found 'x'"),
        ("extra:\n  a: 1\n  b: c\n", ":3: key 'extra.b': found 'c'"),
        ("cf: 2\ncf: 2", ":2: found the key 'cf' a second time; expected it once, as in line 1"),
        ("extra: {a: 1,\n a: 2}", ":2: found the key 'a' a second time"),
        ("a: 1\n  b: 2\n", ":2: found invalid YAML"),
        ("name: ]", ":1: found invalid YAML"),
        ("cf: 2\n\x00", ":2: found invalid YAML"),
        (b"\xff", ": found bytes that are no UTF-8 (at byte 0)"),
        (b" " * (MAX_BYTES + 1), f": found {MAX_BYTES + 1} bytes"),
    ],
)
def test_errors_name_line_and_key(content: str | bytes, start: str, tmp_path: Path) -> None:
    assert message(tmp_path, content).startswith(start)


def test_longest_recipe_is_read_quickly(tmp_path: Path) -> None:
    text = "tags: [" + "a, " * (MAX_BYTES // 3 - 4) + "a]"
    assert len(validate(written(tmp_path, text), Example).tags) > 20_000


def harmless(path: Path) -> None:
    """Reading gives plain data or RecipeError, whatever the file holds."""
    try:
        data = validate(path, Example).model_dump()
    except RecipeError as error:
        assert str(error).isprintable() and len(str(error)) < 700
    else:
        assert set(data) == set(Example.model_fields)


MARKS = st.sampled_from(
    [*"[]{},:-?&*!|>'\"%@`#\n\t ", ": ", "- ", "? ", "\n  ", "---\n", "...\n", "!!", "<<: ", "&a ", "*a"]
)
WORDS = st.sampled_from(
    ["name", "cf", "rules", "tags", "2", "1e9", "null", "true", ".nan", "!!int", "\\u"]
)


@FAST
@given(st.lists(MARKS | WORDS | st.text(max_size=3), max_size=30).map("".join))
def test_random_yaml(tmp_path: Path, text: str) -> None:
    harmless(written(tmp_path, text))


@FAST
@given(st.binary(max_size=200))
def test_random_bytes(tmp_path: Path, content: bytes) -> None:
    harmless(written(tmp_path, content))


@FAST
@given(st.data())
def test_mutated_recipe(tmp_path: Path, data: st.DataObject) -> None:
    """A good recipe with one piece of it replaced."""
    start = data.draw(st.integers(0, len(GOOD)))
    end = data.draw(st.integers(start, min(start + 8, len(GOOD))))
    piece = data.draw(st.lists(MARKS | WORDS | st.characters(), max_size=4).map("".join))
    harmless(written(tmp_path, GOOD[:start] + piece + GOOD[end:]))


TEXT = st.text(st.characters(codec="utf-8").filter(str.isprintable))
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=10,
)


@FAST
@given(st.dictionaries(TEXT, PLAIN, max_size=4))
def test_json_is_read_as_json(tmp_path: Path, data: dict[str, Any]) -> None:
    text = json.dumps(data, ensure_ascii=False).replace("Infinity", ".inf")
    assert read_recipe(written(tmp_path, text)).data == data
