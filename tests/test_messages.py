"""Every error says what to do: its last words name a thing, a command or a value, never "it" alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from blr.compressor.base import errors

ROOT = Path(__file__).parents[1]
KINDS = {name for name, kind in vars(errors).items() if isinstance(kind, type)} | {"refuse", "_refuse"}
VAGUE = re.compile(
    r"(correct|check|repair|mend|fix|change|adjust) (it|this|them|this line)"
    r"|take (one|one of these|another)"
)
SAYS = re.compile(  # what was expected, or what to type
    r"expected|known:|\bmust |\bneeds? |--exclude"
    r"|([;:(,] |^|`)(or |to plan it )?(add|change|check|choose|compress|convert|copy|create|download|"
    r"free|give|heal|keep|leave|loosen|lower|make|mend|move|name|pass|pip|put|raise|repair|remove|run|save|"
    r"see|set|shorten|start|store|take|try|use|wait|write)\b"
    r"|bug in blr, keep"
)
pytestmark = pytest.mark.fast


def words(node: ast.expr) -> str:
    """The text of an expression, with {} for what is only known later."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(words(value) for value in node.values)
    if isinstance(node, ast.BinOp):
        return words(node.left) + words(node.right)
    return "{}"


def messages() -> Iterator[tuple[str, str, list[str]]]:
    """Where an error is made, by what, and the words that it is given."""
    for top in ("compressor", "kernels", "scripts/bench"):
        for path in sorted((ROOT / top).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and node.args:
                    name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                    if name in KINDS:
                        place = f"{path.relative_to(ROOT)}:{node.lineno}"
                        yield place, name, [words(argument) for argument in node.args]


def test_no_error_ends_in_words_that_say_nothing() -> None:
    ends = [(place, re.split(r"[;:] ", said[-1])[-1]) for place, _, said in messages()]
    assert len(ends) > 300
    assert not [f"{place}: {end}" for place, end in ends if VAGUE.fullmatch(end)]
    found = [
        (path.name, node.value)
        for top in ("compressor", "kernels", "scripts/bench")
        for path in (ROOT / top).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert not [each for each in found if VAGUE.fullmatch(each[1].rpartition("; ")[2])]


def test_every_error_says_what_was_expected_or_what_to_do() -> None:
    """But for those that pass on what another says, and those whose helper adds it."""
    told = [
        (place, said[0]) for place, name, said in messages() if "efuse" not in name and len(said) == 1
    ]
    open_ended = [(place, said) for place, said in told if not said.endswith("{}")]
    assert not [f"{place}: {said}" for place, said in open_ended if not SAYS.search(said)]
