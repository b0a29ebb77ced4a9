"""Modules joined into files mean what they meant apart, or are refused before anything is written."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest

from blr.compressor.bundling.bundle import BundleError, Module, bundle


def joined(sources: Mapping[str, str], files: Mapping[str, list[str]]) -> dict[str, str]:
    """The files of modules given by their last two names and text."""
    modules = {f"blr.{n}": Module(f"blr.{n}", dedent(text)) for n, text in sources.items()}
    held = {file: [f"blr.{name}" for name in names] for file, names in files.items()}
    made = bundle(held, modules, {file: f"About {file}." for file in held})
    return {name.removesuffix(".py"): data.decode() for name, data in made.items()}


def run(
    texts: Mapping[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, ModuleType]:
    """The files imported from a package of their own."""
    package = f"joined_{folder.name}"
    (folder / package).mkdir()
    for name, text in texts.items():
        (folder / package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    found = {}
    for name in texts:
        __import__(f"{package}.{name}")
        found[name] = sys.modules.pop(f"{package}.{name}")
    return found


CLASHING = {
    "a.first": '''
        """First."""
        from __future__ import annotations
        from math import pi

        LIMIT = 1
        def _help(x: int) -> int:
            return x + LIMIT  # the first's
        def value(LIMIT_=2): return [_help(value) for value in (1, 2)]
        class Held:
            LIMIT: int = _help(1)
            def call(self): return _help(5)
        ''',
    "b.second": '''
        """Second."""
        from __future__ import annotations
        from math import floor, pi
        from blr.a.first import _help as first_help
        from blr.a.first import Held
        try:
            import json as encoder
            from blr.a.first import value
        except ImportError as error:
            raise ImportError("no json") from error

        LIMIT = 10
        def _help(x):
            return first_help(x) * LIMIT
        def both(help=_help): return help(1), value(), floor(pi), encoder.dumps(LIMIT)
        def late():
            from blr.a.first import value, _help as run
            return value(), run(1), Held().call(), Held.LIMIT
        ''',
    "c.third": """
        from typing import TYPE_CHECKING
        from blr.b.second import LIMIT
        if TYPE_CHECKING:
            from blr.d.absent import Missing
        __all__ = ["later"]
        def later(x=LIMIT):
            from blr.b.second import _help as run
            return x, run(0)
        def gone():
            from blr.d.absent import thing
            return thing
        """,
}
EXPECTED = {"both": (20, [2, 3], 3, "10"), "late": ([2, 3], 2, 6, 2), "later": (10, 10)}
LAYOUTS = {
    "one file": {"all": ["c.third", "a.first", "b.second"]},
    "two files": {"low": ["b.second", "a.first"], "high": ["c.third"]},
    "three files": {"x": ["a.first"], "y": ["b.second"], "z": ["c.third"]},
}


@pytest.mark.parametrize("files", LAYOUTS.values(), ids=LAYOUTS)
def test_names_of_several_modules_keep_their_meaning(
    files: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one file or several, imported at the top, under another name or inside functions."""
    texts = joined(CLASHING, files)
    made = run(texts, tmp_path, monkeypatch)
    held = {name: value for module in made.values() for name, value in vars(module).items()}
    assert {name: held[name]() for name in EXPECTED} == EXPECTED
    with pytest.raises(ImportError, match=r"blr\.d\.absent is not part of this folder"):
        held["gone"]()


def test_files_say_where_they_come_from_and_keep_comments() -> None:
    text = joined(CLASHING, LAYOUTS["one file"])["all"]
    assert text.startswith("# type: ignore\n# ruff: noqa\n")
    assert '"""About all.\n"""' in text and text.count(" blr.a.first\n") == 1
    assert "def _a_first_help(x: int) -> int:\n    return x + A_FIRST_LIMIT  # the first's\n" in text
    assert text.count("from math import floor, pi\n") == 1 == text.count("import annotations\n")
    assert text == joined(dict(reversed(CLASHING.items())), LAYOUTS["one file"])["all"]


ONE = "def f(): return 1\n"
REFUSED: dict[str, tuple[dict[str, str], str]] = {
    "circle": ({"a.x": "from blr.b.y import g\nf = 1", "b.y": "from blr.a.x import f\ng = 1"}, "circle"),
    "not there": ({"a.x": ONE, "b.y": "from blr.a.x import g"}, "blr.a.x has no g"),
    "local of the new name": (
        {"a.x": ONE, "b.y": "f = 2\ndef g(b_y_f): return f"},
        "b.y: f becomes b_y_f, which is local there",
    ),
    **{
        f"also {kind}": ({"a.x": ONE, "b.y": f"def f(): ...\n{text}"}, "b.y: f has two meanings")
        for kind, text in {
            "an argument": "def g(f): return f",
            "a class's": "class C:\n  f = 1",
            "an inner function": "def g():\n  def f(): ...",
            "imported inside": "def g():\n  from blr.a.x import f",
        }.items()
    },
    "two meanings": ({"a.x": "from math import log", "b.y": "from cmath import log"}, "'log'"),
    "relative": ({"a.x": "from . import y"}, "expected an absolute import"),
    "two hooks": (
        {"a.x": "def __getattr__(name): ...", "b.y": "def __getattr__(name): ..."},
        "define __getattr__",
    ),
}


@pytest.mark.parametrize(("sources", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_joined_is_refused(sources: dict[str, str], reason: str) -> None:
    with pytest.raises(BundleError, match=reason):
        joined(sources, {"all": sorted(sources)})


def test_a_file_that_needs_a_later_one_at_its_top_is_refused() -> None:
    sources = {"a.x": ONE, "b.y": "from blr.a.x import f\ng = f"}
    with pytest.raises(BundleError, match="early needs late, which comes after it"):
        joined(sources, {"early": ["b.y"], "late": ["a.x"]})
    with pytest.raises(SyntaxError, match="`global` cannot be bundled"):
        joined({"a.x": "n = 0\ndef f():\n  global n\n  n = 1"}, {"all": ["a.x"]})
