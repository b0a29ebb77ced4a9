"""Writes recipes/guides/reference.md, and lists of families and recipes elsewhere, from the product.

Usage: python scripts/reference.py. Commands and options come from the command line itself, the fields of
a recipe from its schema, exit codes from the errors, families from configs/. Variables are described
here; tests/cli/test_reference.py compares them with those that the code reads, and the pages with this.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer
import typer.main

from blr.compressor.base import errors
from blr.compressor.cli import app
from blr.compressor.recipe.architectures import families
from blr.compressor.recipe.chosen import describe_recipe, shipped_recipes
from blr.compressor.recipe.schema import Recipe

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = "recipes/guides/reference.md"
WIDTH = 108
HIDDEN = ("help", "install_completion", "show_completion")  # typer's own
VARIABLES = {
    "BLR_DEBUG": "1 adds the traceback to an error",
    "BLR_KERNELS": "torch keeps layers on plain torch; triton makes a missing kernel an error",
    "BLR_COMPILED": "what `torch.compile` makes of layers: plain (library products) or operator (ours)",
    "BLR_DECODE": "how exports decode: graph (default), eager or token (all layers in one kernel)",
    "BLR_TRANSIENT": "MiB of intermediates before chunks are computed, or off; 64 on a CPU, off on "
    "a GPU",
    "BLR_TUNED_DIR": "where `blr tune` keeps its tables; else blr/tuned in XDG_CACHE_HOME",
    "BLR_TEXT_DIR": "where text that models wrote is kept (1 GiB at most), a whole path or off; else "
    "blr/own-text in XDG_CACHE_HOME",
    "BLR_EVAL, BLR_ONLY, BLR_COUNT, BLR_TABLE": "of scripts/batch_compress.sh (see its head)",
    "BLR_FULL, BLR_ENV, BLR_PACKAGES, BLR_PAGES, BLR_COMMON": "of scripts/check*",
    "BLR_VLLM, BLR_VLLM_PYTHON": "of scripts/check_vllm.sh",
    "BLR_ENGINES, BLR_FIGURES, BLR_SMOLLM": "of scripts/check_engines.sh",
    "BLR_MEETING, BLR_PARENT": "set by `--gpus` for the processes that it starts; not for you",
    "HF_HUB_OFFLINE, HF_HOME, HF_TOKEN, HF_ENDPOINT": "the hub: no socket, cache, login, another hub",
    "OMP_NUM_THREADS, MKL_NUM_THREADS": "threads on a CPU where `--threads` says nothing",
    "OMP_WAIT_POLICY, KMP_BLOCKTIME": "how these wait; asleep unless you say otherwise",
    "CUDA_VISIBLE_DEVICES": "the GPUs that `--gpus` and `blr sweep` share out",
    "RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE": "set by torchrun and accelerate",
    "ACCELERATE_USE_FSDP, GLOO_SOCKET_IFNAME": "`blr heal` as with `--fsdp`; the network of processes",
    "TRITON_INTERPRET": "1 runs kernels on the CPU, slowly, for tests",
    "CXX, TMPDIR": "the compiler of `--as pt2`; where temporary files go",
    "LMEVAL_LOG_LEVEL": "what `blr eval --tasks` says; errors alone by default",
}
FIELDS = {  # of a recipe, that no option sets
    "extends": "a shipped recipe or a file beside this one, whose settings these replace",
    "rules": "settings of the layers whose names match a glob, the first match counting; keys: match, "
    "method, cf, rank, blocks, pattern, heads, solver, rounds, quantize, group, couplings, base, bpw",
    "floor": "least share of its uniform rank that the allocation by sensitivity leaves a layer",
    "strength": "weight of the sensitivities against uniform ranks",
    "sequential": "fit each layer to the inputs that the compressed layers before it give",
}


def wrapped(text: str) -> str:
    """An item of a list, in lines that fit."""
    words = f"- {' '.join(text.split())}"
    return textwrap.fill(words, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def commands(group: Any, path: str = "blr") -> Iterator[tuple[str, Any]]:
    """Every command below `group` with what one types for it."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def command_section(typed: str, command: Any) -> list[str]:
    """A command with what its help says of it and of each option."""
    context = typer.Context(command)
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name not in HIDDEN]
    records = [option.get_help_record(context) for option in options if not option.hidden]
    head = " ".join([typed, *((a.name or "").upper() for a in arguments)])
    lines = [f"### {head}", "", textwrap.fill(" ".join((command.help or "").split()), WIDTH), ""]
    lines += [wrapped(f"`{(a.name or '').upper()}`: {a.help}") for a in arguments]
    return [*lines, *(wrapped(f"`{names}`: {said}") for names, said in records), ""]


def kind_of(schema: dict[str, Any]) -> str:
    """What a field of a recipe may be, of its JSON schema."""
    kinds = [s for s in schema.get("anyOf", [schema]) if s.get("type") != "null"]
    words = []
    for each in kinds:
        if "enum" in each:
            words += [str(value) for value in each["enum"]]
        elif "const" in each:
            words.append(str(each["const"]))
        else:
            words.append(
                {"array": "list", "boolean": "true or false"}.get(each.get("type"), each["type"])
            )
    return ", ".join(words)


def field_lines() -> Iterator[str]:
    """A line for each field of a recipe: help and default are those of its option, if it has one."""
    compress = dict(commands(typer.main.get_command(app)))["blr compress"]
    options = {param.name: param for param in compress.params}
    for name, schema in Recipe.model_json_schema()["properties"].items():
        option, default = options.get(name), schema.get("default")
        said = FIELDS.get(name) or (option.help or "").strip()
        shown = option.show_default if option and isinstance(option.show_default, str) else default
        words = shown if isinstance(shown, str) else str(shown).lower()
        end = "" if shown in (None, [], "") else f" Default: {words}."
        yield wrapped(f"`{name}` ({kind_of(schema)}): {said.rstrip('.')}.{end}")


def exit_lines() -> Iterator[str]:
    yield wrapped("`0`: done.")
    kinds: dict[int, str] = {}
    for kind in vars(errors).values():
        if isinstance(kind, type):
            kinds.setdefault(kind.exit_code, (kind.__doc__ or "").partition("\n")[0])
    for code, said in sorted((kinds | {1: "A bug in blr."}).items()):
        yield wrapped(f"`{code}`: {said}")
    yield wrapped("`128+N`: stopped by signal N (Ctrl-C: 130, kill: 143).")


def reference() -> str:
    """The whole page."""
    lines = [
        "# Reference",
        "",
        "Written by `scripts/reference.py`; change the product, not this page.",
        "",
    ]
    lines += ["## Commands", ""]
    for typed, command in commands(typer.main.get_command(app)):
        lines += command_section(typed, command)
    lines += ["## Fields of a recipe", "", *field_lines(), ""]
    lines += ["## Environment variables", ""]
    lines += [wrapped(f"`{names.replace(', ', '`, `')}`: {said}.") for names, said in VARIABLES.items()]
    lines += ["", "## Exit codes", "", *exit_lines()]
    return "\n".join(lines) + "\n"


def family_table() -> str:
    """A line for each table of configs/ with the model types that it describes."""
    lines = []
    for family in families():
        how = "" if family.blocks else " Not calibrated."
        lines.append(wrapped(f"**{family.name}**: {', '.join(sorted(family.model_types))}.{how}"))
    return "\n".join(lines)


def recipe_table() -> str:
    """A line for each shipped recipe, as it says of itself in its first one."""
    found = sorted(shipped_recipes().items())
    return "\n".join(wrapped(f"`{name}`: {describe_recipe(path)}.") for name, path in found)


PAGES: dict[str, Callable[[], dict[str, str]]] = {  # with what stands between their marks
    "recipes/guides/08-families.md": lambda: {"families": family_table()},
    "recipes/README.md": lambda: {"recipes": recipe_table()},
}


def with_tables(name: str) -> str:
    """A page with the tables between its marks as they should be."""
    page = (ROOT / name).read_text("utf-8")
    for mark, table in PAGES[name]().items():
        start, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
        before, _, rest = page.partition(start)
        page = f"{before}{start}\n{table}\n{end}{rest.partition(end)[2]}"
    return page


def main() -> None:
    (ROOT / REFERENCE).write_text(reference(), "utf-8")
    for name in PAGES:
        (ROOT / name).write_text(with_tables(name), "utf-8")


if __name__ == "__main__":
    main()
