"""No clock on the wall decides a test: a busy machine is slow, not wrong.

Where speed is the behaviour, tests count seconds of CPU; what might hang has `PATIENCE` as its limit.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

TESTS = Path(__file__).parent
FILES = [path for path in TESTS.rglob("*.py") if "gpu" not in path.relative_to(TESTS).parts]
CLOCKS = ("monotonic", "perf_counter", "time.time(", ".seconds")


def limits(tree: ast.AST) -> Iterator[str]:
    """Numbers given as a time limit, and clocks in assertions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "timeout" and is_number(node.value):
            yield f"line {node.value.lineno}: timeout={ast.unparse(node.value)}"
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            named = [v for k, v in pairs if isinstance(k, ast.Constant) and k.value == "timeout"]
            yield from (f"line {v.lineno}: timeout {ast.unparse(v)}" for v in named if is_number(v))
        if isinstance(node, ast.Assert):
            text = ast.unparse(node.test)
            yield from (f"line {node.lineno}: {text}" for clock in CLOCKS if clock in text)


def is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def test_no_limit_of_time_decides() -> None:
    found = {path: list(limits(ast.parse(path.read_text("utf-8")))) for path in FILES}
    assert {str(path.relative_to(TESTS)): lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "wrong",
    [
        "subprocess.run(command, timeout=60)",
        "options = {**more, 'timeout': 5.0}",
        "assert time.monotonic() - started < 10",
        "assert code == 0 and stopped.seconds < SECONDS",
    ],
)
def test_a_limit_is_seen(wrong: str) -> None:
    assert len(list(limits(ast.parse(wrong)))) == 1
