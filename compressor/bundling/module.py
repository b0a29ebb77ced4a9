"""One module of this package as a bundle needs it: what it defines, what it imports and where."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from blr.compressor.bundling.scopes import Use, bound_names, global_uses

OURS = "blr."
Statement = ast.Import | ast.ImportFrom


class BundleError(Exception):
    """Modules that cannot be joined as they are; the message says what to change in which."""


class Imported(NamedTuple):
    """``from module import name as alias``, or ``import name as alias`` where `module` is ""."""

    module: str
    name: str
    alias: str


@dataclass
class Module:
    """A module by its name and source text.

    ours, others: what it imports at the top, of this package and of others; `guarded` the same of
    others inside ``try: … except ImportError``; `typing` of ours for annotations only.
    inner: imports of this package inside functions. dropped: statements with no place in a bundle.
    """

    name: str
    text: str
    ours: list[Imported] = field(default_factory=list)
    typing: list[Imported] = field(default_factory=list)
    others: list[Imported] = field(default_factory=list)
    guarded: list[Imported] = field(default_factory=list)
    inner: list[ast.ImportFrom] = field(default_factory=list)
    dropped: list[ast.stmt] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tree = ast.parse(self.text, self.name)
        for node in self.tree.body:
            self._read(node)
        top = {id(part) for node in self.dropped for part in ast.walk(node)}
        inner = (n for n in ast.walk(self.tree) if isinstance(n, ast.ImportFrom) and id(n) not in top)
        self.inner = [node for node in inner if _is_ours(node)]

    def _read(self, node: ast.stmt) -> None:
        if isinstance(node, Statement):
            self._read_import(node, self.ours, self.others)
        elif isinstance(node, ast.Try) and all(isinstance(part, Statement) for part in node.body):
            for part in node.body:
                self._read_import(part, self.ours, self.guarded)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for part in node.body:
                self._read_import(part, self.typing, [])
        elif not (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"):
            return
        self.dropped.append(node)

    def _read_import(self, node: ast.stmt, ours: list[Imported], others: list[Imported]) -> None:
        found = imported(node)
        if getattr(node, "module", None) not in ("__future__", "typing") or _is_ours(node):
            (ours if _is_ours(node) else others).extend(found)
        else:  # TYPE_CHECKING has no use without its block
            others.extend(i for i in found if i.module == "typing" and i.name != "TYPE_CHECKING")

    @cached_property
    def defined(self) -> list[str]:
        """Names that the module itself binds, in the order of its text."""
        held = [node for node in self.tree.body if node not in self.dropped]
        return list(dict.fromkeys(name for node in held for name in bound_names([node])))

    @cached_property
    def data(self) -> bytes:
        """Its text, which positions of the syntax tree count in bytes."""
        return self.text.encode()

    @cached_property
    def lines(self) -> list[bytes]:
        """The same line by line."""
        return self.data.splitlines(keepends=True)

    @cached_property
    def starts(self) -> list[int]:
        """Offset in bytes of every line."""
        return [0, *accumulate(map(len, self.lines))]

    @cached_property
    def uses(self) -> list[Use]:
        """Where its text names globals."""
        return global_uses(self.tree, self.lines)

    @property
    def eager(self) -> list[str]:
        """Modules of ours that must run before it."""
        return sorted({found.module for found in self.ours})

    @property
    def lazy(self) -> list[str]:
        """Modules of ours that it imports inside functions."""
        return sorted({node.module or "" for node in self.inner})


def imported(node: ast.stmt) -> list[Imported]:
    """What an import statement binds. Raises BundleError for anything else."""
    if isinstance(node, ast.ImportFrom) and not node.level and node.module:
        return [Imported(node.module, a.name, a.asname or a.name) for a in node.names]
    if isinstance(node, ast.Import):
        return [Imported("", a.name, a.asname or a.name) for a in node.names]
    raise BundleError(f"{ast.unparse(node)!r}: expected an absolute import")


def _is_ours(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and (node.module or "").startswith(OURS)
