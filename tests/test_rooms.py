"""The order of the rooms: imports run from higher rooms to lower ones, in no circle."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# From the ground up: a room (a folder or module of compressor/, the kernels, or scripts/bench) imports
# what stands before it in this list, and within itself whatever is no circle.
ROOMS = (
    *("base", "kernels", "structures", "checkpoint", "workspace", "recipe", "__init__", "bundling"),
    *("modeling", "loading", "planning", "text", "fitting", "output", "runtime", "exporting"),
    *("integrations", "healing", "commands", "bench", "cli", "__main__"),
)
# What a lower room may ask of a higher one, inside a function: exported models run on the runtime if
# it is there, and a model saved where blr is installed takes its code along.
LAZY = {
    ("modeling.generation", "runtime"),
    ("modeling", "integrations.peft"),
}
LAZY |= {("__init__", "commands.api"), ("__init__", "modeling")}  # the public names
pytestmark = pytest.mark.fast


def modules() -> dict[str, Path]:
    """Every module by the name that other modules import it by, without ``blr.compressor.``."""
    found = {}
    for top in ("compressor", "kernels", "scripts/bench"):
        for path in (ROOT / top).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts if top == "kernels" else parts[1:])
            found[name.removesuffix(".__init__") or "__init__"] = path
    return found


def imports(path: Path, known: dict[str, Path]) -> Iterator[tuple[str, bool]]:
    """Modules of ours that a file imports, and whether a function does so."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("blr"):
            continue
        base = node.module.removeprefix("blr.").removeprefix("compressor").strip(".")
        for name in (alias.name for alias in node.names if alias.name != "__version__"):
            full = f"{base}.{name}".strip(".")
            target = full if full in known else base or "__init__"
            yield target, node.col_offset > 0


def room(module: str) -> int:
    return ROOMS.index(module.partition(".")[0])


def test_no_import_runs_from_a_lower_room_to_a_higher_one() -> None:
    known, wrong = modules(), []
    for name, path in known.items():
        for target, lazy in imports(path, known):
            allowed = lazy and any(name == a and f"{target}.".startswith(f"{b}.") for a, b in LAZY)
            if room(target) > room(name) and not allowed:
                wrong.append(f"{name} imports {target}")
    assert wrong == []


def test_imports_of_modules_have_no_circle() -> None:
    known = modules()
    below = {
        name: {t for t, lazy in imports(path, known) if not lazy and t != name}
        for name, path in known.items()
    }
    while free := [name for name, targets in below.items() if not targets & below.keys()]:
        for name in free:
            del below[name]
    assert below == {}


def test_a_command_lies_where_its_name_says() -> None:
    """`blr X` is in commands/ or a room (`eval`, `export`, `plan` and `recipes` by their nouns)."""
    import re

    text = (ROOT / "compressor/cli/__init__.py").read_text()
    named = {"eval": "evaluate", "export": "exporting", "plan": "planning"}
    named |= {"recipes": "recipe", "tune": "bench"}
    commands = re.findall(r'app\.command\("(\w+)"\)|name="(\w+)"\)', text)
    for command in filter(None, (word for pair in commands for word in pair)):
        if command != "blr":
            noun = named.get(command, command)
            assert any(f"{name}.".startswith((f"commands.{noun}.", f"{noun}.")) for name in modules())


def test_the_top_level_holds_what_it_may_and_no_more() -> None:
    """What tests or builds leave there has no place in the repository."""
    may = [
        "pyproject.toml",
        "LICENSE",
        "README.md",
        "compressor",
        "kernels",
        "configs",
        "recipes",
        "tests",
        "scripts",
    ]
    built = ("build", "dist")  # .gitignore leaves these out
    found = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    strange = [n for n in found if n not in (*may, *built) and not n.endswith(".egg-info")]
    assert [name for name in strange if not name.startswith("tiny-llama-")] == []  # of the README
    assert set(may) <= found


def test_every_folder_of_modules_is_in_the_wheel() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = {name for name in settings["tool"]["setuptools"]["packages"] if name != "blr"}
    tops = ("compressor", "kernels", "configs", "recipes", "scripts/bench")
    folders = {path.parent for top in tops for path in (ROOT / top).rglob("*.py")}
    parts = (folder.relative_to(ROOT).parts for folder in folders)
    assert {".".join(("blr", *p[p[0] == "scripts" :])) for p in parts} <= listed


def test_every_test_is_where_pytest_looks() -> None:
    files = (path for path in (ROOT / "tests").rglob("*.py") if "\ndef test_" in path.read_text("utf-8"))
    assert [path.name for path in files if not path.name.startswith("test_")] == []
