"""Where the text of a module names its globals, as Python resolves names."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
Pattern = ast.MatchAs | ast.MatchStar


class Use(NamedTuple):
    """A name of the module or a builtin at `line`, `column` (bytes), where the names in `hidden`
    mean something local; `unclear` in the body of a class that binds the name, too."""

    name: str
    line: int
    column: int
    hidden: frozenset[str]
    unclear: bool = False


def global_uses(tree: ast.Module, lines: list[bytes]) -> list[Use]:
    """Every use or definition of a global in a module, but for import statements."""
    visitor = _Uses(lines)
    visitor.visit(tree)
    return visitor.found


def bound_names(body: Iterable[ast.AST]) -> list[str]:
    """Names that statements bind in their own scope, once for each time they do."""
    found: list[str] = []
    waiting = list(body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.append(node.name)
        elif isinstance(node, Comprehension):
            walrus = [n.target.id for n in ast.walk(node) if isinstance(n, ast.NamedExpr)]
            found += walrus
        elif not isinstance(node, ast.Lambda):
            found += _binds(node)
            waiting += ast.iter_child_nodes(node)
    return found


def _binds(node: ast.AST) -> list[str]:
    """Names that `node` itself binds."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
        return [node.id]
    if isinstance(node, ast.alias):
        return [node.asname or node.name.partition(".")[0]]
    if isinstance(node, ast.ExceptHandler | Pattern):
        return [node.name] if node.name else []
    if isinstance(node, ast.MatchMapping):
        return [node.rest] if node.rest else []
    return []


class _Uses(ast.NodeVisitor):
    def __init__(self, lines: list[bytes]) -> None:
        self.lines = lines
        self.found: list[Use] = []
        self.hidden: frozenset[str] = frozenset()  # by the functions around
        self.own: frozenset[str] = frozenset()  # names of the class around, which functions do not see
        self.inside = False

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in self.own and isinstance(node.ctx, ast.Load) and node.id not in self.hidden:
            self.found.append(Use(node.id, node.lineno, node.col_offset, self.hidden, unclear=True))
        self._add(node.id, node.lineno, node.col_offset)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._add_definition(node)
        self._visit_all(node.decorator_list)
        self._visit_function(node, node.body)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._visit_function(node, [node.body])

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._add_definition(node)
        self._visit_all([*node.decorator_list, *node.bases, *node.keywords])
        with self._scope((), own=bound_names(node.body)):
            self._visit_all(node.body)

    def _visit_comprehension(self, node: Any) -> None:
        first, *others = node.generators
        self.visit(first.iter)
        with self._scope(bound_names([g.target for g in node.generators])):
            self._visit_all([first.target, *first.ifs, *others])
            self._visit_all(getattr(node, part, None) for part in ("elt", "key", "value"))

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _visit_comprehension

    def visit_Global(self, node: ast.Global) -> None:
        raise SyntaxError(f"line {node.lineno}: `global` cannot be bundled; hold the value in an object")

    def _visit_function(self, node: Function, body: list[Any]) -> None:
        arguments = node.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        named += [found for found in (arguments.vararg, arguments.kwarg) if found is not None]
        outside = [argument.annotation for argument in named] + [getattr(node, "returns", None)]
        self._visit_all([*arguments.defaults, *arguments.kw_defaults, *outside])
        with self._scope([argument.arg for argument in named] + bound_names(body)):
            self._visit_all(body)

    def _visit_all(self, nodes: Iterable[ast.AST | None]) -> None:
        for node in nodes:
            if node is not None:
                self.visit(node)

    def _add_definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        if not self.inside:
            head = self.lines[node.lineno - 1]
            keyword = b"class " if isinstance(node, ast.ClassDef) else b"def "
            start = head.index(keyword, node.col_offset) + len(keyword)
            self._add(node.name, node.lineno, head.index(node.name.encode(), start))

    def _add(self, name: str, line: int, column: int) -> None:
        if name not in self.hidden and name not in self.own:
            self.found.append(Use(name, line, column, self.hidden))

    @contextmanager
    def _scope(self, names: Iterable[str], own: Iterable[str] = ()) -> Iterator[None]:
        before = self.hidden, self.own, self.inside
        self.hidden, self.own, self.inside = self.hidden | set(names), frozenset(own), True
        yield
        self.hidden, self.own, self.inside = before
