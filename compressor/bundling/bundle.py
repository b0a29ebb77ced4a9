"""Joins modules of this package into a few files that run where it is not installed. Their text stays as
it is but for imports and names that clash. The same sources give the same bytes."""

import ast
import builtins
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from textwrap import fill, indent
from typing import NamedTuple

OURS, KEYWORDS = "blr.", (b"def ", b"class ")
OPTIONAL = "triton"  # not there on every machine: transformers asks for what is imported unguarded
Import = ast.Import | ast.ImportFrom
Definition = ast.FunctionDef | ast.ClassDef
# Linters and type checkers of whoever reads the file leave it alone.
HEAD = """# type: ignore
# ruff: noqa
# flake8: noqa
# pylint: skip-file
# fmt: off
# isort: skip_file
"""
WIDTH = 100
RULE = "# " + "=" * 20
LEFT_OUT = '{names} = None; raise ImportError("{module} is not part of this folder, which does without")'
GUARD = """try:
{imports}
except ImportError as error:
    raise ImportError("{file}.py needs {packages}") from error
"""
KEPT = "__getattr__"  # what Python looks up in a module by name


class BundleError(Exception):
    """Modules cannot be joined as they are. The message says what to change in which."""


class Imported(NamedTuple):
    """``from module import name as alias``, or ``import name as alias`` where `module` is ""."""

    module: str
    name: str
    alias: str


@dataclass
class Module:
    """A module by its name and source text. ours, others: its imports at the top, from this package and
    from others. guarded: imports from others inside ``try: … except ImportError``, and from Triton.
    typing: imports from this package for annotations only."""

    name: str
    text: str
    ours: list[Imported] = field(default_factory=list)
    typing: list[Imported] = field(default_factory=list)
    others: list[Imported] = field(default_factory=list)
    guarded: list[Imported] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tree, self.data = ast.parse(self.text, self.name), self.text.encode()
        lines = self.data.splitlines(keepends=True)
        self.starts = [0, *accumulate(map(len, lines))]  # syntax trees count in bytes
        self.dropped = [node for node in self.tree.body if self._read(node)]
        self.held = [node for node in self.tree.body if node not in self.dropped]
        self.nodes = [node for top in self.held for node in ast.walk(top)]
        self.defined = list(dict.fromkeys(name for node in self.held for name in bound_names(node)))
        if any(isinstance(node, ast.Global) for node in self.nodes):
            raise SyntaxError(f"{self.name}: `global` cannot be bundled; hold the value in an object")
        self.inner = [node for node in self.nodes if isinstance(node, ast.ImportFrom) and _is_ours(node)]
        self.eager = sorted({found.module for found in self.ours})
        self.lazy = sorted({node.module or "" for node in self.inner})

    def _read(self, node: ast.stmt) -> bool:
        """Record what a statement imports; returns whether a bundle leaves the statement out."""
        if isinstance(node, Import):
            module, name, _ = imported(node)[0]
            optional = (module or name).partition(".")[0] == OPTIONAL
            self._read_imports([node], self.ours, self.guarded if optional else self.others)
        elif isinstance(node, ast.Try) and isinstance(node.body[0], Import):
            self._read_imports(node.body, self.ours, self.guarded)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            self._read_imports(node.body, self.typing, [])
        else:
            return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        return True

    def _read_imports(self, nodes: list[ast.stmt], ours: list[Imported], others: list[Imported]) -> None:
        for node in nodes:
            found = [one for one in imported(node) if one.name not in ("annotations", "TYPE_CHECKING")]
            (ours if _is_ours(node) else others).extend(found)

    @cached_property
    def words(self) -> set[str]:
        """Every name that the module binds or reads, without attributes."""
        arguments = {node.arg for node in self.nodes if isinstance(node, ast.arg)}
        return arguments | {node.id for node in self.nodes if isinstance(node, ast.Name)}

    def uses(self, name: str) -> Iterator[int]:
        """The bytes where the global `name` stands. BundleError for another meaning, a string."""
        parts = (part for node in self.nodes if isinstance(node, ast.ClassDef) for part in node.body)
        fields = {id(part.target) for part in parts if isinstance(part, ast.AnnAssign)}
        for node in self.nodes:
            if self._is_other(node, name):
                raise BundleError(f"{self.name}: {name} has two meanings; rename one of them")
            named = isinstance(node, Definition) and node.name == name
            if not named and not (
                isinstance(node, ast.Name) and node.id == name and id(node) not in fields
            ):
                continue
            start = self.starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
            start += next((len(k) for k in KEYWORDS if self.data.startswith(k, start)), 0)
            if not self.data.startswith(name.encode(), start):
                raise BundleError(f"{self.name}: {name} cannot be renamed inside a string")
            yield start

    def _is_other(self, node: ast.AST, name: str) -> bool:
        """Whether a node gives `name` another meaning; fields of classes may have it."""
        if isinstance(node, ast.ClassDef):
            parts = [part for part in node.body if not isinstance(part, ast.AnnAssign)]
            if any(name in bound_names(part) for part in parts):
                return True
        if isinstance(node, ast.arg):
            return node.arg == name
        if isinstance(node, ast.alias):
            return (node.asname or node.name) == name
        return isinstance(node, Definition) and node.name == name and node not in self.held


def imported(node: ast.stmt) -> list[Imported]:
    """The names that an import statement binds. Raises BundleError for a relative import."""
    if not isinstance(node, Import) or (isinstance(node, ast.ImportFrom) and node.level):
        raise BundleError(f"{ast.unparse(node)!r}: expected an absolute import")
    module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
    return [Imported(module, one.name, one.asname or one.name) for one in node.names]


def _is_ours(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and (node.module or "").startswith(OURS)


def bound_names(node: ast.AST) -> list[str]:
    """The names that a statement binds in its own scope, with those of loops within expressions."""
    if isinstance(node, Definition):
        return [node.name]
    names = (inner for inner in ast.walk(node) if isinstance(inner, ast.Name))
    return [inner.id for inner in names if not isinstance(inner.ctx, ast.Load)]


def bundle(
    files: Mapping[str, Sequence[str]], modules: Mapping[str, Module], abouts: Mapping[str, str]
) -> dict[str, bytes]:
    """Join modules; returns the contents of every file by name. files: the modules of each file by its
    name without ``.py``. A file may import from those before it, and inside functions from any. A file
    of its one module's name is that module's text. modules: by name. In the files an import inside a
    function of any other module raises ImportError. abouts: the text at the top of each file. Raises
    BundleError for modules that cannot be joined as they are."""
    verbatim = {name for name, held in files.items() if held[0].endswith(f".{name}")}
    names = Names(modules, {files[name][0] for name in verbatim})
    homes = {module: file for file, held in files.items() for module in held}
    done: dict[str, bytes] = {}
    for file, held in files.items():
        writer = _Writer(file, names, homes, earlier=set(done))
        text = writer.text(abouts[file], reached(held, modules, set(held)))
        done[file] = modules[held[0]].data if file in verbatim else text.encode()
    return {f"{file}.py": data for file, data in done.items()}


def reached(
    roots: Iterable[str], modules: Mapping[str, Module], among: Collection[str] | None = None
) -> list[str]:
    """`roots` and what they import at the top, each after what it needs; BundleError for a circle."""
    done: dict[str, None] = {}

    def visit(name: str, *above: str) -> None:
        if name in above:
            raise BundleError(f"{' -> '.join([*above, name])}: modules import each other in a circle")
        if name not in done and name in (modules if among is None else among):
            for needed in modules[name].eager:
                visit(needed, *above, name)
            done[name] = None

    for root in sorted(roots):
        visit(root)
    return list(done)


class Names:
    """The names of definitions where `modules` are joined; those of `kept` stay as they are. Raises
    BundleError when two modules import different things under one name."""

    def __init__(self, modules: Mapping[str, Module], kept: Collection[str] = ()) -> None:
        self.modules, foreign = modules, dict[str, Imported]()
        for one in (o for module in modules.values() for o in (*module.others, *module.guarded)):
            if foreign.setdefault(one.alias, one) != one:
                found = f"{one.alias!r} is {one.name!r} of {one.module!r} and of another module"
                raise BundleError(f"{found}; give one of them another name")
        known = Counter(name for module in modules.values() for name in module.defined)
        taken = {*dir(builtins), *foreign} - {KEPT}
        self.final = {
            (module.name, name): qualified(module.name, name)
            if name != KEPT and module.name not in kept and (known[name] > 1 or name in taken)
            else name
            for module in modules.values()
            for name in module.defined
        }

    def home(self, module: str, name: str) -> tuple[str, str]:
        """The module that defines what `module` calls `name`, and its new name; or BundleError."""
        if (module, name) in self.final:
            return module, self.final[module, name]
        held = self.modules[module]
        for found in held.ours:
            if found.alias == name:
                return self.home(found.module, found.name)
        if any(found.alias == name for found in (*held.others, *held.guarded)):
            return module, name
        raise BundleError(f"{module} has no {name}, which another module imports from it")

    def of(self, one: Imported) -> str:
        """The new name of what an import binds."""
        return self.home(one.module, one.name)[1]

    def changed(self, module: Module) -> dict[str, str]:
        """The new name of every global in `module` that changes; BundleError if it is in use."""
        typing = [found for found in module.typing if found.module in self.modules]
        called = {name: self.final[module.name, name] for name in module.defined}
        called |= {one.alias: self.of(one) for one in (*module.ours, *typing)}
        changed = {old: new for old, new in called.items() if old != new}
        for old, new in changed.items():
            if new in module.words - changed.keys():
                raise BundleError(f"{module.name}: {old} becomes {new}, which is local there; rename it")
        return changed


def qualified(module: str, name: str) -> str:
    """Put the last two parts of its module's name before `name`, in the case of its kind."""
    bare = name.lstrip("_")
    hidden = name[: len(name) - len(bare)]
    words = dict.fromkeys(part.removesuffix("_blr") for part in module.split(".")[-2:])
    words.pop(bare.lower(), None)  # `VARIANTS` of blast.variants is `BLAST_VARIANTS`
    prefix = "_".join(words)
    if bare.isupper():
        return f"{hidden}{prefix.upper()}_{bare}"
    if bare[0].isupper():
        return f"{hidden}{prefix.title().replace('_', '')}{bare}"
    return f"{hidden}{prefix}_{bare}"


class _Writer:
    def __init__(self, file: str, names: Names, homes: Mapping[str, str], earlier: set[str]) -> None:
        self.file, self.names, self.homes, self.earlier = file, names, homes, earlier

    def text(self, about: str, order: Sequence[str]) -> str:
        held = [self.names.modules[name] for name in order]
        if sum(KEPT in module.defined for module in held) > 1:
            raise BundleError(f"{self.file}: two of {', '.join(order)} define {KEPT}")
        plain = {one for module in held for one in module.others}
        guarded = {one for module in held for one in module.guarded}
        packages = ", ".join(sorted({(one.module or one.name).partition(".")[0] for one in guarded}))
        tried = GUARD.format(
            imports=indent(_imports(guarded), "    "), file=self.file, packages=packages
        )
        parts = [f'{HEAD}"""{about}\n"""', "from __future__ import annotations"]
        parts += [_imports(plain - guarded), tried if guarded else "", self._siblings(held)]
        parts += [f"{RULE} {module.name}\n{self._section(module)}" for module in held]
        return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"

    def _siblings(self, held: Sequence[Module]) -> str:
        needed: dict[str, set[str]] = defaultdict(set)
        for one in (one for module in held for one in module.ours):
            module, name = self.names.home(one.module, one.name)
            if self.homes[module] != self.file:
                needed[self.homes[module]].add(name)
        if late := sorted(needed.keys() - self.earlier):
            raise BundleError(f"{self.file} needs {late[0]}, which comes after it, at its top")
        return "\n".join(_from(f".{home}", found) for home, found in sorted(needed.items()))

    def _section(self, module: Module) -> str:
        edits = [(*_span(module, node), b"") for node in module.dropped]
        edits += [(*_span(module, node), self._inner(node)) for node in module.inner]
        for old, new in self.names.changed(module).items():
            edits += [(at, at + len(old.encode()), new.encode()) for at in module.uses(old)]
        data = module.data
        for start, end, new_text in sorted(edits, reverse=True):
            data = data[:start] + new_text + data[end:]
        return re.sub(r"\n{3,}", "\n\n", data.decode())

    def _inner(self, node: ast.ImportFrom) -> bytes:
        target, wanted = node.module or "", imported(node)
        if target not in self.homes:
            names = " = ".join(one.alias for one in wanted)
            return LEFT_OUT.format(names=names, module=target).encode()
        names = ", ".join(_as(self.names.of(one), one.alias) for one in wanted)
        return f"from .{self.homes[target]} import {names}".encode()


def _span(module: Module, node: ast.stmt) -> tuple[int, int]:
    """The bytes that a statement takes; one at the top takes whole lines."""
    last = node.end_lineno or node.lineno
    if node.col_offset == 0:
        return module.starts[node.lineno - 1], module.starts[last]
    ends = module.starts[last - 1] + (node.end_col_offset or 0)
    return module.starts[node.lineno - 1] + node.col_offset, ends


def _imports(found: Iterable[Imported]) -> str:
    """One import statement for each module."""
    parts: dict[str, set[str]] = defaultdict(set)
    for one in found:
        parts[one.module].add(_as(one.name, one.alias))
    whole = [f"import {name}" for name in sorted(parts.pop("", ()))]
    return "\n".join([*whole, *(_from(module, names) for module, names in sorted(parts.items()))])


def _from(module: str, names: Iterable[str]) -> str:
    line = f"from {module} import {', '.join(sorted(names))}"
    return line if len(line) <= WIDTH else fill(line.replace("import ", "import (") + ")", WIDTH)


def _as(name: str, alias: str) -> str:
    return name if name == alias else f"{name} as {alias}"
