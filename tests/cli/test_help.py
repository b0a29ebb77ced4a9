"""`--help` of every command says all that its options say of themselves, their defaults too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from running import Invoke
from typer.testing import CliRunner

from blr.compressor.cli import app
from blr.compressor.cli.options import ADVANCED
from blr.compressor.structures.registry import STRUCTURES

pytestmark = pytest.mark.fast

# Options whose absence means that the thing is not done, or not bounded: there is no default to show
WITHOUT_DEFAULT = {
    *(
        "rank",
        "bpw",
        "bits",
        "draft",
        "tokens_per_second",
        "include",
        "exclude",
        "recipe",
        "calibration",
        "text",
        "sts",
        "max_tokens",
        "top_k",
    ),
    *(
        "top_p",
        "quantize",
        "seconds",
        "peer",
        "output",
        "patterns",
        "epochs",
        "steps",
        "patience",
        *(
            "pairs",
            "tasks",
            "tasks_path",
            "limit",
            "metrics",
            "signature",
            "public_key",
            "identity",
            "issuer",
        ),
    ),
}


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command below `group` with what one types for it."""
    yield path, group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name))


EVERY = dict(commands(typer.main.get_command(app)))
NAMES = {path: " ".join(path) or "blr" for path in EVERY}


def options(path: tuple[str, ...]) -> Iterator[Any]:
    """The parameters of a command but those that are not ours, or taken and of no use to it."""
    for parameter in EVERY[path].params:
        others = parameter.name in ("help", "install_completion", "show_completion")
        if not others and not getattr(parameter, "hidden", False):
            yield parameter


def flat(text: str) -> str:
    """Without spaces and the frames of panels."""
    return "".join(text.replace("│", "").split())


@pytest.fixture(scope="module")
def shown() -> dict[tuple[str, ...], str]:
    runner = CliRunner(env={"COLUMNS": "2000"})  # a line an option
    return {path: flat(runner.invoke(app, [*path, "--help"]).stdout) for path in EVERY}


@pytest.mark.parametrize("path", EVERY, ids=NAMES.get)
def test_says_what_the_command_does(path: tuple[str, ...], shown: dict[tuple[str, ...], str]) -> None:
    assert EVERY[path].help and flat(EVERY[path].help) in shown[path]


@pytest.mark.parametrize("path", EVERY, ids=NAMES.get)
def test_no_word_of_a_hint_is_lost(path: tuple[str, ...], shown: dict[tuple[str, ...], str]) -> None:
    """Square brackets least of all, which rich takes for markup."""
    for parameter in options(path):
        assert parameter.help and flat(parameter.help) in shown[path]
        assert "[default" not in parameter.help, "show_default is the place for it"


@pytest.mark.parametrize("path", EVERY, ids=NAMES.get)
def test_every_default_shows(path: tuple[str, ...], shown: dict[tuple[str, ...], str]) -> None:
    for parameter in options(path):
        entry = shown[path].split(flat(parameter.help), 1)[1]
        default, said = parameter.default, parameter.show_default
        if parameter.required:
            assert entry.startswith("[required")
        elif isinstance(said, str):
            assert entry.startswith(f"[default:({flat(said)})")
        elif default is None:
            assert parameter.name in WITHOUT_DEFAULT
        elif default is True:  # the name that sets it, of --name/--no-name
            assert entry.startswith(f"[default:{parameter.opts[0].lstrip('-')}"), parameter.name
        elif default is not False:
            value = str(getattr(default, "value", default))
            assert entry.startswith(f"[default:{flat(value)}"), parameter.name


@pytest.mark.parametrize("group", [("bench",), ("recipes",)])
def test_a_command_left_out_is_answered_by_all_there_are(group: tuple[str, ...], invoke: Invoke) -> None:
    """In the lines of the help, on standard error: nothing was done."""
    code, out, err = invoke(*group)
    assert (code, out) == (2, "") and err.strip().startswith("Usage: ") and err.count("\n") > 5
    inside = {path[-1] for path in EVERY if path[:-1] == group and path}
    assert inside and all(f"\n│ {name} " in err for name in inside)


def test_blr_alone_shows_what_to_start_with(invoke: Invoke) -> None:
    code, out, err = invoke()
    assert (code, out) == (2, "")
    assert all(f"  blr {name} " in err for name in ("compress", "heal", "eval")) and err.count("\n") < 10


def test_the_method_lists_the_structures_of_the_registry(shown: dict[tuple[str, ...], str]) -> None:
    """All but the one that method svd becomes by another option."""
    listed = ", ".join(STRUCTURES)
    assert flat(f"Structure of the replaced layers: {listed}, dense. ks is") in shown["compress",]


def test_compress_shows_few_options_first() -> None:
    panels = [getattr(option, "rich_help_panel", None) for option in EVERY["compress",].params]
    assert 10 < panels.count(None) <= 1 + 16 and set(panels) == {None, ADVANCED}
