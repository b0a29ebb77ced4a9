"""Reads a module of this package for a bundle: what it defines, what it imports and where."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

OURS, KEYWORDS = "blr.", (b"def ", b"class ")
OPTIONAL = "triton"  # not there on every machine: transformers asks for what is imported unguarded
Function = ast.FunctionDef | ast.Lambda
Import = ast.Import | ast.ImportFrom


class BundleError(Exception):
    """Modules cannot be joined as they are. The message says what to change in which."""


class Imported(NamedTuple):
    """``from module import name as alias``, or ``import name as alias`` where `module` is ""."""

    module: str
    name: str
    alias: str


@dataclass
class Module:
    """A module by its name and source text.

    ours, others: its imports at the top, from this package and from others. guarded: imports from others
    inside ``try: … except ImportError``, and from Triton. typing: imports from this package for
    annotations only.
    """

    name: str
    text: str
    ours: list[Imported] = field(default_factory=list)
    typing: list[Imported] = field(default_factory=list)
    others: list[Imported] = field(default_factory=list)
    guarded: list[Imported] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tree, self.data = ast.parse(self.text, self.name), self.text.encode()
        self.lines = self.data.splitlines(keepends=True)
        self.starts = [0, *accumulate(map(len, self.lines))]  # syntax trees count in bytes
        self.dropped = [node for node in self.tree.body if self._read(node)]
        self.held = [node for node in self.tree.body if node not in self.dropped]
        self.defined = list(dict.fromkeys(name for node in self.held for name in bound_names(node)))
        every = [node for top in self.held for node in ast.walk(top)]
        if any(isinstance(node, ast.Global) for node in every):
            raise SyntaxError(f"{self.name}: `global` cannot be bundled; hold the value in an object")
        self.inner = [node for node in every if isinstance(node, ast.ImportFrom) and _is_ours(node)]
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
        nodes = list(ast.walk(self.tree))
        arguments = {node.arg for node in nodes if isinstance(node, ast.arg)}
        return arguments | {node.id for node in nodes if isinstance(node, ast.Name)}

    def uses(self, name: str) -> Iterator[int]:
        """The bytes at which the global `name` is used, or a local that is assigned: in a function all
        uses of a name are renamed, or none where an argument, import or function has it. Raises
        BundleError for a use whose meaning is not clear."""
        word = name.encode()
        for line, column in (place for node in self.held for place in _uses(node, name)):
            start = self.starts[line - 1] + column
            start += next((len(k) for k in KEYWORDS if self.data.startswith(k, start)), 0)
            if not self.data.startswith(word, start):
                raise BundleError(f"{self.name}, line {line}: {name} cannot be renamed inside a string")
            yield start


def _uses(node: ast.AST, name: str, inside: bool = False) -> Iterator[tuple[int, int]]:
    defined = isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name and not inside
    if defined or (isinstance(node, ast.Name) and node.id == name):
        yield node.lineno, node.col_offset  # type: ignore[attr-defined]
    for child in ast.iter_child_nodes(node):
        if not _is_local(node, child, name):
            yield from _uses(child, name, inside or isinstance(node, ast.ClassDef | Function))


def _is_local(node: ast.AST, child: ast.AST, name: str) -> bool:
    """Whether `name` means a local of a function or class in this part of its statement."""
    if isinstance(node, Function) and child is not node.args:
        body = node.body if isinstance(node.body, list) else [node.body]
        return child in body and name in _bound_otherwise(node)
    if not isinstance(node, ast.ClassDef) or isinstance(child, ast.FunctionDef):
        return False
    bound = name in (n for part in node.body for n in bound_names(part))
    loads = (n for n in ast.walk(child) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
    if bound and any(load.id == name for load in loads):
        found = f"line {node.lineno}: {name} may be the class's or the module's"
        raise BundleError(f"{found}; rename one of them")
    return bound


def imported(node: ast.stmt) -> list[Imported]:
    """The names that an import statement binds. Raises BundleError for anything but an absolute
    import."""
    if not isinstance(node, Import) or (isinstance(node, ast.ImportFrom) and node.level):
        raise BundleError(f"{ast.unparse(node)!r}: expected an absolute import")
    module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
    return [Imported(module, one.name, one.asname or one.name) for one in node.names]


def _is_ours(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and (node.module or "").startswith(OURS)


def bound_names(node: ast.AST) -> list[str]:
    """The names that a statement binds in its own scope, with those of loops within expressions."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    names = (inner for inner in ast.walk(node) if isinstance(inner, ast.Name))
    return [inner.id for inner in names if not isinstance(inner.ctx, ast.Load)]


def _bound_otherwise(function: Function) -> set[str]:
    """The names that a function binds as arguments, by imports or as inner functions."""
    body = function.body if isinstance(function.body, list) else []
    nodes = [function.args, *(inner for part in body for inner in ast.walk(part))]
    arguments = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
    names = {getattr(node, "asname", None) or getattr(node, "name", None) for node in nodes}
    return arguments | {name for name in names if name}
